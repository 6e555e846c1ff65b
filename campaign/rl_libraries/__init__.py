"""Libraries of reinforcement learning that are too heavy for the tests, with the environments as
they are."""
