"""The trace itself: the training loop run on symbolic tensors, and the recorder of what it allocates."""
