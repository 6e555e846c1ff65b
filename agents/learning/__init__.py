"""Learning after deployment: on other hardware, and from the log of a deployed controller."""
