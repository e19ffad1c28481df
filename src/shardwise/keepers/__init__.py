"""Keepers: one process per host holds files in memory, for programs that may be killed and started again.

    keeper       the process: files by name, owners, and when it ends
    keeper_talk  what is said to it over a socket: heads of JSON, bytes of files, and the proof of a secret
    keeper_host  a keeper of this host, started where there is none

The room knows nothing of checkpoints, and loads neither torch nor numpy: a keeper starts quickly and is small.
"""
