"""Logs that are sound, and logs that are poisoned: what `knobwise update` makes of them."""
