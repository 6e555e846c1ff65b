"""Accuracy and latency of every configuration, predicted without a network."""
