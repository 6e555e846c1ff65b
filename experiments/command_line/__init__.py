"""The verbs, and sweeps."""
