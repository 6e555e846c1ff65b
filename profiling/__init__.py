"""Measure a model: scenes, an elastic vision-language model, and the runner that turns both into a
profile."""

from pathlib import Path

DATA = Path(__file__).with_name("data")
"""The files that come with knobwise."""
