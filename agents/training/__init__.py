"""The loop, its stages, and the two agents in it."""
