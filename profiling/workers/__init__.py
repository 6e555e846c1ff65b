"""Measuring and recording in several processes of Ray, on this machine or a cluster."""
