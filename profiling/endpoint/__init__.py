"""Measure models that are served elsewhere, behind an OpenAI-compatible endpoint."""
