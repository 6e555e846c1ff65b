"""Evaluate, export, live."""
