"""What decides, what is learned, and how it is judged."""
