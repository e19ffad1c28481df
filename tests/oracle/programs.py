"""The one driver of tests that train, and the table of its programs.

A test whose claim is "this trains under that plan like one process does" is three lines:

    from tests.oracle.comparison import assert_trains_like_one_process
    from tests.oracle.program import Program, adamw, plan_of, seeded
    from tests.oracle.programs import PROGRAMS

    assert_trains_like_one_process(PROGRAMS["words"], plan_of(PROGRAMS["words"], "dp_shard=2", stage=3, k=2, clip=0.3))

It compares losses, norms, all parameters, buffers and moments after each update, and the loss evaluated at the end, on
all ranks: to the bit, or in float64 where a plan adds up in an order that no simple program has (`comparison.py`).

    trained = train(program, plan)                    # of places.py: what all ranks have, put together (`Trained`)
    train(program, plan, Processes(pool, TCP))        # in real processes; the program is one of the table
    train_on(channel, program, plan)                  # what one rank does, inside of sw.simulate
    program.engine(plan, channel)                     # an engine to do something else with
    expected(program, k, clip=0.3)                    # of one_process.py: what anybody would write
    in_rank_order(program, plan)                      # of rank_order.py: the bits that a plan has to give

To add a program: a line in `PROGRAMS`, and its net in a file of this folder that its idea is in. It gets all layouts.

    "mine": Program(
        make=seeded(Mine),                            # the same values at each call
        batches=[points(seed, 12) for seed in range(2)],
        loss=square_loss,                             # f(output, batch); None: the model gives its own
        stages={"first": 0, "last": 1}, num_stages=2, # where a pipeline cuts it; None: balanced
        rules={"first": "column", "last": "row"},     # where tp does; None: nowhere
    )

A program of one file stays in it: `assert_trains_like_one_process(Program(...), plan)` needs no table.
"""

from collections.abc import Mapping
from dataclasses import replace

from tests.engine.pipeline import models, path_models
from tests.oracle.batches import word_batch, word_loss
from tests.oracle.decoder import DECODER
from tests.oracle.program import WIDE, Program
from tests.oracle.units import net
from tests.oracle.words import words_with_kept_norm

_TABLE: Mapping[str, Program] = {
    "words": Program(
        make=words_with_kept_norm,
        batches=[word_batch(seed, 24) for seed in range(3)],
        loss=word_loss,
        rules={"wide": "column", "narrow": "row"},
        rounds_by_hand=True,
    ),
    "decoder": DECODER,
    **{
        f"units {kind}".strip(): Program(
            make=net(kind), batches=[word_batch(seed, 24) for seed in range(2)], loss=word_loss
        )
        for kind in ("", "tied", "twice", "recurrent", "frozen middle", "checkpointed")
    },
    **models.CASES,
    **path_models.CASES,
}

PROGRAMS = {name: replace(program, name=name) for name, program in _TABLE.items()}


def program_named(name: str) -> Program:
    """A program of the table, and by its own name its variant in float64."""
    program = PROGRAMS[name.removesuffix(WIDE)]
    return program.in_float64() if name.endswith(WIDE) else program
