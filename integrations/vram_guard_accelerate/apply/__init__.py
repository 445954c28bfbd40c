"""A launch plan on what a real launch prepares."""
