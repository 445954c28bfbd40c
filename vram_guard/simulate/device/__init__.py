"""The simulated CUDA device: answers of torch during a trace, and values that are known without computing.

Imports :mod:`..memory` only.
"""
