"""What a pipeline costs: against its own plan, against torch.distributed.pipelining, and for what it clips.

models      what is trained: plain blocks, blocks that sleep, a Llama
step        one update with its times; and who can do it
ours        our sides: one per schedule
theirs      the peer's: the same blocks, cut by hand
timelines   what a schedule predicts, and what was measured
clipping    how long a rank is busy with what is not its own
memory      the bytes that a rank holds, and the microbatches
rank        what one process of a cell does
cells       start the processes of a cell, bring back what they measured
outcome     what a cell is, and what it measured
asked       the numbers that were asked for
table       from outcomes to tables
"""
