"""parallel: how a training is spread over N GPUs, as a value, and put on a model."""
