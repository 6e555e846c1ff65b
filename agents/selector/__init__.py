"""The selector, which turns a query and its pool into a sequence of demonstrations."""
