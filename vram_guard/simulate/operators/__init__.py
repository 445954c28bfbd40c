"""Allocations of single operators on CUDA: kernels, autocast, composite operators, shapes.

Imports :mod:`..device` and :mod:`..memory`.
"""
