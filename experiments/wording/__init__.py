"""Policies, numbers and what a run shows, in words; pages and printed lines are made of them."""
