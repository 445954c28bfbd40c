"""Blocks of GPU and host memory, recorded as tensors come and go. Imports no other room of ``simulate``."""
