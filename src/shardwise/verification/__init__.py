"""Verification: a few updates of a program under a layout, each compared with one process from the same state."""
