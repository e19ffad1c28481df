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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.oracle import by_other_ways as ways
from tests.oracle import kept_state, shapes
from tests.oracle import pipeline_programs as staged
from tests.oracle.batches import Batch, points, square_loss, word_batch, word_loss
from tests.oracle.decoder import DECODER, decoder
from tests.oracle.of_transformers import CARRIED, TRANSFORMERS
from tests.oracle.pipeline_values import PIPELINE_PROGRAMS
from tests.oracle.program import WIDE, Program, seeded, sgd
from tests.oracle.units import net
from tests.oracle.words import curve, curve_batch, curve_loss, words_with_kept_norm


def on_words(make: Callable[[], nn.Module], **settings: Any) -> Program:
    """A net that predicts words."""
    batches = [word_batch(seed, 24) for seed in range(2)]
    return Program(**{"make": seeded(make), "batches": batches, "loss": word_loss, **settings})


def on_points(make: Callable[[], nn.Module], **settings: Any) -> Program:
    """A net that gives one value to each point."""
    batches = [points(seed, 24) for seed in range(2)]
    return Program(**{"make": seeded(make), "batches": batches, "loss": square_loss, **settings})


def count_targets(batch: Batch) -> float:
    """What has to be predicted."""
    return float((batch["targets"] != -100).sum())


def masked_batch(seed: int, rows: int = 24) -> dict[str, torch.Tensor]:
    """Rows with 0 to 5 targets, the last four with none; the first row has all."""
    batch = word_batch(seed, rows)
    lengths = torch.randint(0, 6, (rows, 1), generator=torch.Generator().manual_seed(seed))
    lengths[0], lengths[-4:] = 5, 0
    batch["targets"] = batch["targets"].masked_fill(torch.arange(5) >= lengths, -100)
    return batch


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, and learn faster than the rest."""
    matrices = [each for each in parameters if each.ndim > 1]
    others = [each for each in parameters if each.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1, "lr": 2e-2}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


UNITS = (
    *("", "tied", "twice", "recurrent", "checkpointed", "checkpoint of several", "frozen", "frozen middle"),
    *("unused output", "no gradient", "in place", "positions", "checkpointed reentrant"),
)

WITH_WORDS = on_words(words_with_kept_norm, keep=("norm",), rounds_by_hand=True)

WORDS: Mapping[str, Program] = {
    "words": WITH_WORDS,
    "words, by targets": replace(
        WITH_WORDS, batches=[masked_batch(0), masked_batch(1)], loss_weight=count_targets, optimizer=sgd
    ),
    "words, other counts": replace(
        WITH_WORDS,
        batches=[word_batch(seed, rows) for seed, rows in enumerate([24, 40, 25, 30, 48])],
        counts=[1, 4, 1, 3, 4],
    ),
    "decoder": DECODER,
    "decoder, float32": replace(DECODER, make=lambda: decoder(dtype=torch.float32)),
    "decoder with dropout": replace(DECODER, make=lambda: decoder(0.2), draws=True),
    **{f"units {kind}".strip(): on_words(net(kind), noise=(".in_proj_bias",)) for kind in UNITS},
    **{f"aside, {kind}": on_words(make, loss=ways.loss_with_aside) for kind, make in ways.ASIDES.items()},
    "reader": on_words(ways.reader),
    "sharing": on_words(ways.sharing),
    "experts": on_words(ways.experts, rules={"head": "vocab"}),
    "translation": on_words(ways.translation, optimizer=sgd, has_order=False),
    "translation, again": on_words(ways.translation_again, optimizer=sgd, has_order=False),
    "clamped weights": on_words(lambda: ways.Writer("clamped")),
    "momentum of weights": on_words(lambda: ways.Writer("momentum")),
}

POINTS: Mapping[str, Program] = {
    "curve": Program(make=curve, batches=[curve_batch(seed, 32) for seed in range(3)], loss=curve_loss),
    "one weight": on_points(
        lambda: nn.Linear(1, 1),
        batches=[{"input": p["x"], "y": p["y"]} for p in (points(seed, 24, width=1) for seed in range(3))],
    ),
    "odd shapes": on_points(shapes.odd_shapes, make_plain=shapes.row_major, rounds_by_hand=True),
    "odd shapes, channels last": on_points(shapes.channels_last, make_plain=shapes.row_major, rounds_by_hand=True),
    "odd names": on_points(shapes.odd_names, optimizer=sgd),
    "branches": on_points(shapes.branches, batches=shapes.TURNS),
    "branches, momentum": on_points(shapes.branches, batches=shapes.TURNS, optimizer=sgd),
    "sparse gradients": on_points(shapes.lookup(sparse=True), make_plain=seeded(shapes.lookup(sparse=False))),
    **{
        f"{kind} batches": on_points(
            shapes.mixed, batches=shapes.beside(kind), rows={"odd": None}, rules={"map": "colwise_gather_output"}
        )
        for kind in shapes.ODD_BATCHES
    },
    "gradient penalty": on_points(ways.critic, loss=None, loss_with=ways.penalty),
    "force": on_points(ways.force),
    "inner step": on_points(ways.maml),
    "adapted in forward": on_points(lambda: ways.in_a_row(ways.Adapted)),
    "reads data": on_points(lambda: ways.in_a_row(ways.ReadsData)),
    "weight norm": on_points(lambda: ways.in_a_row(lambda: parametrizations.weight_norm(nn.Linear(4, 4)))),
    "spectral norm": on_points(lambda: ways.in_a_row(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)))),
    "pruned": on_points(
        lambda: ways.in_a_row(lambda: nn.Linear(4, 4), lambda each: prune.l1_unstructured(each, "weight", amount=0.5))
    ),
    "batch norm": on_points(kept_state.normed(nn.BatchNorm1d)),
    "batch norm of all ranks": on_points(
        kept_state.normed(nn.SyncBatchNorm),
        make_plain=seeded(kept_state.normed(nn.BatchNorm1d)),
        of_whole_batches=True,
        noise=("first.bias",),
        relative=1e-9,
    ),
    "codebook": on_points(kept_state.codebook),
    "observed": on_points(kept_state.observed),
    "quantised while it trains": on_points(kept_state.quantised),
    "own generator": on_points(kept_state.own_generator),
    "dropout": Program(
        make=seeded(kept_state.drop_chain), batches=staged.VECTORS, loss=staged.square, stages=staged.CHAIN, draws=True
    ),
    "dropout of torch": Program(
        make=seeded(kept_state.drop_recurrent),
        batches=staged.SENTENCES,
        loss=staged.word_entropy,
        stages={"embed": 0, "memory": 1, "layer": 2, "out": 3},
        draws=True,
    ),
    "chain, other counts": replace(
        PIPELINE_PROGRAMS["chain"],
        batches=[staged.vectors(at, rows) for at, rows in enumerate([24, 40, 25, 30, 48])],
        counts=[1, 4, 2, 3, 1],
    ),
    "groups": replace(PIPELINE_PROGRAMS["chain"], optimizer=in_groups),
}

FLOWS: Mapping[str, Program] = {
    **{
        name: replace(program, batches=program.batches[:2]) if program.batches is staged.VECTORS else program
        for name, program in PIPELINE_PROGRAMS.items()
    },
    "collecting": replace(PIPELINE_PROGRAMS["collecting"], make_oracle=None, has_order=False),
    **{
        f"{name}, balanced": replace(PIPELINE_PROGRAMS[name], stages=None)
        for name in ("chain", "u-net", "multi-loss", "tied head")
    },
    "eight blocks, by globs": replace(
        PIPELINE_PROGRAMS["eight blocks"],
        num_stages=2,
        stages={"first": 0, "blocks.[0-3]": 0, "blocks.[4-7]": 1, "l*": 1},
    ),
}
"""Each has one way in which values flow between modules. `tests/engine/pipeline` runs them on stages."""

PROGRAMS: Mapping[str, Program] = {
    name: replace(program, name=name)
    for name, program in {**WORDS, **POINTS, **FLOWS, **CARRIED, **TRANSFORMERS}.items()
}


def program_named(name: str) -> Program:
    """A program of the table, and by its own name its variant in float64."""
    program = PROGRAMS[name.removesuffix(WIDE)]
    return program.in_float64() if name.endswith(WIDE) else program
