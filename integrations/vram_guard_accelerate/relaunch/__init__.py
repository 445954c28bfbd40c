"""Launches of the same script in another precision or sharding, and the proof that they are the same training."""
