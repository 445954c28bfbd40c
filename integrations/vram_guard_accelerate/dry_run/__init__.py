"""The dry run: the script followed symbolically in copies of its process."""
