"""Verification: a few updates under a layout, each compared with what one process makes of the same state and rows."""
