"""The bandit of the controller: budgets, rewards, contexts, and the environments."""
