"""Whether `knobwise inspect` is right about profiles whose truth is known."""
