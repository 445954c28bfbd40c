"""Predictions compared with peaks that others measured and published."""
