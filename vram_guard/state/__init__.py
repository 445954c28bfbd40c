"""State that a trace, a repeated forward or a recovered batch puts back. Imports nothing of the other rooms."""
