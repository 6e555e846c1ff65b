"""What separates a promise from a hope: kills, torn files, mutated inputs and limits, see
docs/trust.md."""
