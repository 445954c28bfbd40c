"""Estimates and plans as people and programs read them.

``text`` for terminals, ``as_json`` for programs, ``plot`` for pictures (needs matplotlib), ``snapshot`` for
PyTorch's memory_viz page. Nothing is imported here: each costs only those who use it.
"""
