"""A query and its pool become a sequence of demonstrations."""
