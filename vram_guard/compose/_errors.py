"""The error of what cannot be composed."""

from __future__ import annotations


class CannotComposeError(Exception):
    """Traces are not made of the same parts; the reason is for developers."""
