"""Launches of the same script with other options of its own, and the proof that they are the same training."""
