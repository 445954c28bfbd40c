"""Predictions for one rank of several GPUs, beside peaks that others measured and published."""
