"""A run: train, judge, write, report."""
