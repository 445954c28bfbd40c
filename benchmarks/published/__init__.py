"""Predictions beside peaks that others measured and published."""
