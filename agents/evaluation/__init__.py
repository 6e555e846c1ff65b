"""The Policy protocol, baselines, the outcomes of decisions, and what a decision costs."""
