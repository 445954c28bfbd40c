"""known: timelines that are there before anything is traced, read without torch."""
