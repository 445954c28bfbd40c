"""Real training steps measured on a GPU, and the same steps predicted without one."""
