"""Files of measurements, and the built-in profile, become tables.

A new reader is a module here that ends in `long_table.table_from_frame`. To choose it as
`profile=…`, add a dataclass, its case and its line of `PROFILES` in
`knobwise.experiments.settings.profiles`, and its name in `options.py` beside it.
"""
