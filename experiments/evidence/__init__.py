"""Decisions, their summary and statistics, and the folder of a run."""
