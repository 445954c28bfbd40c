"""The trace itself: a training loop run on symbolic tensors. Imports every other room; none imports this one."""
