"""Appliers that know torch and no framework."""
