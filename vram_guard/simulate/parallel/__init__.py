"""parallel: one rank of several pretended ones; what its process groups, collectives and sharding do in a trace.

Imports ``memory`` and ``device``; ``tracing`` imports it.
"""
