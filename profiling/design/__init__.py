"""Which configurations and which cells of a profile are measured."""
