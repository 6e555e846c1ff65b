"""Recorded beams: pools, search, scorers, the built-in task."""
