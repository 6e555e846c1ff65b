"""Requests that wait for one another: arrivals, the queue, and its environments."""
