"""Saving and loading with shardwise and with its peers, in turns, on the same states.

states      what is saved: the shapes of a transformer with its optimizer, as rows, columns and flat slices
sides       who saves and who loads: ours, and files
peers       who saves and who loads: everybody else
memory      the peak memory and the bytes that something reads
rank        what one process of a cell does
cells       start the processes of a cell, bring back what they measured
alone       what needs no second rank: planning for many, and tiny tensors
asked       the numbers that were asked for
table       from outcomes to tables
"""
