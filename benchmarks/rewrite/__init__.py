"""What a rewrite costs: checking and resolving it for very many names, and converting a model through it.

experts     names, shapes and statements of a mixture of experts of any size; nothing is stored
planning    how long parsing, checking and resolving them takes
weights     a model of any size as safetensors files, and the statements that fuse and transpose it
converting  convert it, copy its files, or only open them: one run and its peak memory
job         one such run in a process of its own
outcome     what a cell is, and what it measured
rounds      all runs of a cell, in turns
asked       the numbers that were asked for
table       from outcomes to tables
"""
