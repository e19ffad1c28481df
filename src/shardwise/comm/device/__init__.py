"""Channels between devices: torch's backend for their kind moves tensors, the connections of the CPUs compare and fail.

channel   calls, and what a wait does
groups    the communicators of a backend, each made when it is first used
sums      the order in which ranks are added
watch     a thread that ends what a device waits for, where a rank is lost
kinds     which device is a rank's own
"""
