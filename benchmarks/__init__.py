"""Measurements: speed, plans, and predictions compared with peaks that were measured on real GPUs."""
