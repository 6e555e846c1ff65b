"""Measurements as tables of samples × configurations, and how samples are split."""
