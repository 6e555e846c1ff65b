"""Simulated tables: kinds that differ in what they ask of a policy, and one calibrated to published numbers."""
