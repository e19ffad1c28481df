"""Metrics over all rows of all ranks."""
