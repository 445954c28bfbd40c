"""Floating-point operations and bytes moved of each operator, for the cost model.

Imports :mod:`..device` and :mod:`..memory`.
"""
