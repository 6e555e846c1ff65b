"""Measure a model: scenes, an elastic vision-language model, and the runner that turns both into a
profile."""
