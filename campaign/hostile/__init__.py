"""`knobwise serve` in front of an endpoint whose answers are odd, and what is left of them in its
log."""
