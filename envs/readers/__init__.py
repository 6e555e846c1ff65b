"""Readers that make tables of files of measurements.

A new type of file that holds tables is only a suffix in `folders.TABLES` and a branch of
`frames._read`. A tool whose files need more than that has a module here, and an entry in
`tool_files.FORMATS`.

A new reader is a module here that ends in `long_table.table_from_frame`. To choose it as
`profile=…`, add a dataclass in `knobwise.experiments.settings.profiles`, with an entry in
`PROFILES` and one in the table of `_read` there, and its name in
`experiments/command_line/usage.txt`.
"""
