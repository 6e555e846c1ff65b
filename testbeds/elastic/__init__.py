"""The built-in elastic vision-language model."""
