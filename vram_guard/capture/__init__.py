"""Capture: training steps from names, configs and loaders, and the helpers that adapters share to read a framework."""
