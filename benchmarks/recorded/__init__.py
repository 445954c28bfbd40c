"""Allocator histories that other people recorded on GPUs: replayed, and predicted from the models alone."""
