"""Measure a model: what it is asked, the runner that times its configurations, and beams of
demonstrations."""
