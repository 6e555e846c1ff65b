"""Measure a model: scenes, an elastic vision-language model, and the runner that turns both into a profile.

Nothing is imported here, so that ``import knobwise.profiling`` costs nothing; take what you need from
:mod:`knobwise.profiling.scenes`, :mod:`~knobwise.profiling.elastic`, :mod:`~knobwise.profiling.training` and
:mod:`~knobwise.profiling.runner`.
"""
