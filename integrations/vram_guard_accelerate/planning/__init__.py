"""From a dry run to a plan: prediction in a process of its own, decision, agreement of ranks."""
