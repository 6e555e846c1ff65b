"""The bandit of the selector: recorded beams, rewards, and the environments."""
