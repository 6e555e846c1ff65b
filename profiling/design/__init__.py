"""Which cells of a profile are measured."""
