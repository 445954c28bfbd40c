"""Forked copies of this process, in which user code runs without disturbing the original."""
