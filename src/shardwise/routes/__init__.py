"""Who sends which piece to whom, decided for all ranks at once and before a byte moves.

    holders         the different pieces of a tensor, and where each is: what a save, a load and a reshard ask
    reshard         from who holds to who wants: a `ReshardPlan`
    reshard_plan    that value, its text, and its batches

Pure, as `plan` is, which knows nothing of it: `moving` and `checkpoint` carry out what is decided here.
"""
