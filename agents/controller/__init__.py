"""Features and a budget become log-probabilities of configurations."""
