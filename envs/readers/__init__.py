"""Readers that make tables of files of measurements, and the built-in profiles.

A new reader is a module here that ends in `long_table.table_from_frame`. To choose it as
`profile=…`, add a dataclass, its case and its line of `PROFILES` in
`knobwise.experiments.settings.profiles`, and its name in `options.py` beside it.
"""
