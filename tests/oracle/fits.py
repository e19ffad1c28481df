"""Which layouts fit a program, which of them are tried, and what is refused in which words."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import shardwise as sw
from tests.oracle.layouts import LAYOUTS, OF_PARTS, OF_STAGES
from tests.oracle.of_transformers import CARRIED, TRANSFORMERS
from tests.oracle.programs import FLOWS, PROGRAMS

UNFIT: Mapping[tuple[str, ...], tuple[str, ...]] = {
    # fewer than two modules, or four, that can be placed on stages
    ("one weight", "inner step", "odd shapes*"): ("stages",),
    ("curve", "branches*", "* batches", "* norm", "pruned", "adapted*", "reads data"): ("four stages",),
    ("batch norm*", "own generator", "sparse *", "*ed weights", "momentum of weights"): ("four stages",),
    ("custom function*", "packed sequences", "filled*", "recomputed", "parcels"): ("four stages",),
    ("quantised*", "feedback over three", "eight blocks, by globs"): ("four stages",),
    # stages would have to hand on what they cannot
    ("cs? batches", "bsr batches", "nested batches", "gradient penalty", "force", "clamped weights"): ("stages",),
    ("aside*", "units checkpointed reentrant", "codebook", "observed", "odd names", "odd shapes"): ("stages",),
    # ranks go through units in orders of their own, or write to what is gathered
    ("branches*", "turning*", "selecting", "sometimes", "ignored"): ("stage 3", "four stages"),
    ("momentum of weights", "clamped weights"): ("stage 3", "run again"),
    # what is run again twice counts twice
    ("units checkpoint*",): ("run again",),
    # one process would have to cast inside of them as engines do
    ("momentum of weights", "clamped weights", "quantised*", "odd shapes*", "sparse gradients"): ("bfloat16",),
    ("gradient penalty", "observed", "force", "batch norm*", "codebook", "own generator", "recurrent*"): ("bfloat16",),
    ("compiled*",): ("data",),
}
"""By globs of programs the kinds of layouts that they are not for; `NOT` has examples with the words."""

NOT = {
    ("one weight", "two stages"): "2 stages asked, but the model has only 0 modules that can be placed",
    ("branches", "four stages"): "4 stages asked, but the model has only 3 modules that can be placed",
    ("odd shapes", "run again"): 'activations.checkpoint: "blocks" asked, but no block of the model repeats',
    ("momentum of weights", "stage 3"): "a forward wrote to parameter 'slow.weight'.*for the time of that forward",
    # the next forward writes before the backward, as it would in a plain loop that goes on so
    ("momentum of weights", "two stages, all forwards first"): "modified by an inplace operation",
    ("csr batches", "two stages"): "entry 'odd' is a torch.sparse_csr tensor, which pipeline stages cannot describe",
    ("gradient penalty", "two stages"): r"asks for the graph of a value \(grad\)",
    ("force", "stages x data"): r"asks for the graph of a value \(grad\)",
    (
        "spectral norm",
        "stages x stage 2, bfloat16",
    ): r"\(_SpectralNorm\) mixes dtypes under precision.compute='bfloat16'",
    ("observed", "two stages"): "writes values of a stage to a buffer of a module of all ranks",
    ("units checkpointed reentrant", "two stages"): "CheckpointFunction is called on values of a stage",
    ("aside, multiplied", "two stages"): "has no attribute 'aside'",
    # a module between stages gives a view of its parameter, which is gathered for that call alone
    ("perceiver", "stages x stage 3"): r"asks for the memory of a value \(untyped_storage\)",
    ("branches", "stage 3"): "(?s)calls of ranks 0, 1 that meet differ.*unit 'never'",
    ("turning", "stage 3, kept gathered"): "(?s)calls of ranks 0, 1 that meet differ.*parameters of unit 'blocks",
}
"""What is refused, by a part of its words."""

IN_FLOAT64 = ("decoder", "decoder with dropout", "batch norm of all ranks")
TIED = ("words", "words, by targets", "words, other counts", "decoder, float32", "units tied", "tied head", "sharing")

WITH_BLOCKS = ("units*", "decoder*", "aside*", "sharing", "translation*", "* norm", "pruned", "adapted*", "reads data")
"""Programs with blocks that repeat, which layouts run again."""


def kinds_of(settings: Mapping[str, object]) -> set[str]:
    """What a program has to be fit for."""
    mesh = sw.Mesh.parse(str(settings.get("mesh", "single")))
    chunks = 2 if settings.get("schedule") == "interleaved" else 1
    is_wide = settings.get("chunks") == 3
    found = {
        "stages" if mesh.pp > 1 else "data": True,
        "four stages": mesh.pp * chunks > 2,
        "six stages": is_wide,
        "stage 3": settings.get("stage") == 3,
        "run again": "activations" in settings,
        "bfloat16": "precision" in settings,
    }
    return {kind for kind, has in found.items() if has}


def fitting(name: str) -> list[str]:
    """The layouts under which a program trains."""
    program = PROGRAMS[name]
    unfit = {kind for globs, kinds in UNFIT.items() for glob in globs if fnmatchcase(name, glob) for kind in kinds}
    if not any(fnmatchcase(name, glob) for glob in WITH_BLOCKS):
        unfit |= {"run again"}
    if name in CARRIED or name in TRANSFORMERS or name in FLOWS:
        # One process would have to cast inside of them as engines do.
        unfit |= {"bfloat16"}
    if name not in ("eight blocks", "llama", "gpt2", "bert"):
        unfit |= {"six stages"}
    found = []
    for layout, settings in LAYOUTS.items():
        mesh = sw.Mesh.parse(settings.get("mesh", "single"))
        in_half = "precision" in settings
        if (mesh.tp > 1 and program.rules is None) or (name, layout) in NOT:
            continue
        if in_half and (name in IN_FLOAT64 or (mesh.pp > 1 and (name in TIED or not program.has_order))):
            continue  # another order of sums, and roundings that are as large
        if not kinds_of(settings) & unfit:
            found.append(layout)
    return found


def chosen(turns: Iterable[int]) -> list[tuple[str, str]]:
    """For each program the layouts of these turns: every second one has stages, of programs for stages the first."""
    pairs = []
    for at, name in enumerate(PROGRAMS):
        fit = fitting(name)
        of_stages = [layout for layout in fit if layout in OF_STAGES]
        for turn in turns:
            is_of_stages = turn % 2 == (0 if name in FLOWS else 1)
            among = of_stages if of_stages and is_of_stages else fit
            if turn == 0 and (name in CARRIED or name in TRANSFORMERS or "compiled" in name):
                continue  # they take a second or two
            pairs.append((name, among[(5 * at + 11 * turn) % len(among)]))
    of_tp = [each for each in OF_PARTS if 0 in turns]
    pairs += [("decoder", layout) for layout in of_tp]
    pairs += [("decoder with dropout", layout) for layout in of_tp[:1]]
    pairs += [(name, list(OF_PARTS)[at % len(OF_PARTS)]) for at, name in enumerate(CARRIED) if not of_tp]
    return list(dict.fromkeys(pairs))
