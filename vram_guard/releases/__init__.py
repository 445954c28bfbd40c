"""Releases: what a prediction holds for, and what the training's own files ask for."""
