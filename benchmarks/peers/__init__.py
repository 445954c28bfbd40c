"""Comparison with other tools: every estimator on the same training steps."""
