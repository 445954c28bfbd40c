"""Measurements: speed, plans, and predictions beside peaks that were measured on real GPUs."""
