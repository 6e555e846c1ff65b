"""Measure a model: scenes, an elastic vision-language model, and the runner that turns both into a profile.

Nothing is imported here, so that ``import knobwise.profiling`` costs nothing; take what you need from
:mod:`knobwise.profiling.elastic.scenes`, :mod:`~knobwise.profiling.elastic.model`,
:mod:`~knobwise.profiling.elastic.training` and :mod:`~knobwise.profiling.elastic.profile`.
"""
