"""One optimizer step run for real in two ways, and their comparison."""
