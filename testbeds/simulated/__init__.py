"""A simulated table, calibrated to published numbers."""
