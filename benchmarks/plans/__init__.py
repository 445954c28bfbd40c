"""Plans for large models on small budgets, against halving the batch until it fits."""
