"""Files of measurements, and the built-in profile, become tables.

A new reader is a module here that ends in `long_table.table_from_frame`, and a dataclass with its case in
`knobwise.experiments.settings.profiles`.
"""
