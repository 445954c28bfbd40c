"""How much each operator computes and moves, for the cost model."""
