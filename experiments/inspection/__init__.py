"""`knobwise inspect`: what a profile or a log holds, and what is wrong with it."""
