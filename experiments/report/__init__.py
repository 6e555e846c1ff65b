"""Results in words, tables and pages."""
