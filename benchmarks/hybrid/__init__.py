"""What stages 2 and 3 and tensor parallelism cost, beside FSDP2, DeepSpeed and `parallelize_module`.

tensor      the sides that cut single parameters over ranks; all other sides are those of `benchmarks`
memory      the most bytes of tensors that a step of stage 3 needs, and its formula
counting    casts, collectives and bytes of an update, as a recorded channel lists them, and their formulas
asked       the numbers that were asked for
table       from what was measured to tables
"""
