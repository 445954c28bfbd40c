"""Capture: what the adapters share while they read a training from its framework's objects."""
