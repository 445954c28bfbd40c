"""The simulated CUDA device: what torch answers while a trace runs, and values that are known without computing."""
