"""The Policy protocol, baselines, and the outcomes of decisions."""
