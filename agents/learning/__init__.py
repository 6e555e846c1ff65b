"""Learning goes on: other hardware, the log of a deployed controller, and whether an update is
better."""
