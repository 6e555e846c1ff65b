"""A small pretrained language model that needs no hub."""
