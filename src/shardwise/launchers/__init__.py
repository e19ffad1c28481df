"""Processes that are started together: by a launcher of others, or by ours.

environment   what launchers announce to each process
local         ours: one process per rank on this host
"""
