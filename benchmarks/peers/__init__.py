"""Beside what one would pick instead: every estimator on the same training steps."""
