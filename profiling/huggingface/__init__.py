"""Hugging Face vision-language models."""
