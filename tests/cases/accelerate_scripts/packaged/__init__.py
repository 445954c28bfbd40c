"""A package that trains: its modules import each other relatively."""
