"""Requests that wait for one another: arrivals and the queue."""
