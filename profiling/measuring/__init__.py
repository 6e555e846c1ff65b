"""Any model with knobs: its interface, what is measured, and the files."""
