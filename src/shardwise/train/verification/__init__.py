"""Verification: a few updates under a layout, each compared with one process from the same state and rows."""
