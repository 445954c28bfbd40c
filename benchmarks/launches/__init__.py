"""Published scripts, trained as they are written and under a plan."""
