"""Rewrites between models that are cut along `tp`: degrees of fused tensors are those that the engines have.

Three models of one function. `Apart` has gate and up apart. `Packed` has them one after the other, [gate, up], whatever
the layout. `PerRank` has for each rank its gate and its up, as Megatron-LM and Paddle lay them out, so that the whole
tensor depends on the number of ranks: [gate 0, up 0, gate 1, up 1] for two.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.errors import RewriteError
from tests.checkpoint.layouts import Whole, assembled
from tests.oracle.batches import NUM_WORDS, share_of, word_batch, word_loss
from tests.oracle.program import adamw

HALF = 8


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 6)
        self.gate, self.up = nn.Linear(6, HALF), nn.Linear(6, HALF)
        self.down = nn.Linear(HALF, 6)
        self.head = nn.Linear(6, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        out: torch.Tensor = self.head(x + self.down(torch.sigmoid(self.gate(x)) * self.up(x)))
        return out


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 6)
        self.gate_up = nn.Linear(6, 2 * HALF)
        self.down = nn.Linear(HALF, 6)
        self.head = nn.Linear(6, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.head(x + self.down(torch.sigmoid(gate) * up))
        return out


KINDS: Mapping[str, tuple[type[nn.Module], dict[str, str]]] = {
    "apart": (Apart, {"gate": "column", "up": "column", "down": "row"}),
    "packed": (Fused, {"gate_up": "column(parts=2)", "down": "row"}),
    "per rank": (Fused, {"gate_up": "column", "down": "row"}),
}


def plan_of(kind: str, mesh: str, stage: int = 1, compute: str | None = None) -> sw.Plan:
    sizes = sw.Mesh.parse(mesh)
    return sw.Plan(
        mesh=sizes,
        sharding=sw.Sharding(stage=stage, bucket_bytes=300),
        precision=sw.Precision(compute=compute),
        # Parts that lie rank by rank are no cut of the whole parameter: as such they cannot be proved.
        tensor=sw.Tensor(rules=KINDS[kind][1] if sizes.tp > 1 else None, prove=kind != "per rank"),
    )


def engine_of(kind: str, plan: sw.Plan, channel: sw.Channel, seed: int = 0) -> sw.Engine:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind][0]().double()
    return sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)


WORDS = word_batch(3, 4)["words"]


def shown(engine: sw.Engine) -> tuple[torch.Tensor, dict[sw.Piece, torch.Tensor]]:
    """What it says of some words, and its state."""
    said = engine.predict({"words": WORDS}, lambda inputs: engine.model(inputs["words"]))
    return said, {piece: tensor.clone() for piece, tensor in engine.state().items()}


def save(path: Path, kind: str, mesh: str, *, files: FileLayout = "pieces") -> tuple[torch.Tensor, Whole]:
    plan = plan_of(kind, mesh)

    def run(channel: sw.Channel) -> tuple[torch.Tensor, dict[sw.Piece, torch.Tensor]]:
        engine = engine_of(kind, plan, channel)
        engine.step(share_of(word_batch(0, 12), plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks))
        sw.save(path, engine, layout=files, channel=channel)
        return shown(engine)

    said, states = zip(*sw.simulate(plan.mesh.size, run), strict=True)
    return said[0], assembled(states)


def load(path: Path, kind: str, mesh: str, rewrite: str, *, stage: int = 1) -> tuple[torch.Tensor, Whole]:
    plan = plan_of(kind, mesh, stage)

    def run(channel: sw.Channel) -> tuple[torch.Tensor, dict[sw.Piece, torch.Tensor]]:
        engine = engine_of(kind, plan, channel, seed=1)
        sw.load(path, engine, rewrite=sw.Rewrite(rewrite), channel=channel)
        return shown(engine)

    said, states = zip(*sw.simulate(plan.mesh.size, run), strict=True)
    return said[0], assembled(states)


def fused(state: Whole, num_ranks: int) -> Whole:
    """By hand: gate and up of each rank, one after the other."""
    made = {}
    for name, tensor in state.items():
        if "gate." not in name and "up." not in name:
            made[name] = tensor
        elif "gate." in name:
            up = state[name.replace("gate.", "up.")]
            # One number per tensor (the step) is that of both.
            parts = [each.chunk(num_ranks) for each in (tensor, up)]
            whole = torch.cat([part for pair in zip(*parts, strict=True) for part in pair])
            made[name.replace("gate.", "gate_up.")] = tensor if tensor.numel() == 1 else whole
    return made


def assert_same(got: Whole, wanted: Whole) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in got if not torch.equal(got[name], wanted[name])] == []


TOGETHER = """
gate.weight, up.weight -> gate_up.weight{how}, axis=0
gate.bias, up.bias -> gate_up.bias{how}, axis=0
"""
PLAIN = TOGETHER.format(how="")
FFN = TOGETHER.format(how=", fused_ffn")
THROUGH = """
gate.weight, up.weight -> t, fused_ffn, axis=0
t^T -> t
t -> gate_up.weight, permute='[]'
---
gate.bias, up.bias -> both, fused_ffn, axis=0
---
both -> t, reshape='[1,-1]'
t -> gate_up.bias, reshape='[16]'
"""
"""The same as `FFN`, through other names, shapes and rewrites."""
AGAIN = "gate_up.weight -> gate_up.weight, fused_ffn, axis=0\ngate_up.bias -> gate_up.bias, fused_ffn, axis=0"
ALONE = """
gate_up.weight -> gate.weight, up.weight{how}, axis=0
gate_up.bias -> gate.bias, up.bias{how}, axis=0
"""


Saves = Callable[[str, str], tuple[Path, torch.Tensor, Whole]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """One save for each model and mesh."""

    @cache
    def made(kind: str, mesh: str) -> tuple[Path, torch.Tensor, Whole]:
        path = tmp_path_factory.mktemp("saves")
        return path, *save(path, kind, mesh)

    return made


BOTH = ("single", "dp_shard=2,tp=2")


@pytest.mark.parametrize(
    ("kind", "mesh", "text", "num_ranks", "sources"),
    [
        ("packed", "tp=2", PLAIN, 1, BOTH),
        ("packed", "dp_shard=3,tp=2", FFN, 1, BOTH[1:]),
        ("packed", "tp=4", FFN, 1, BOTH[1:]),
        ("per rank", "single", FFN, 1, BOTH),
        ("per rank", "dp_shard=3,tp=4", FFN, 4, BOTH[1:]),
        ("per rank", "tp=2", THROUGH, 2, BOTH),
        ("per rank", "dp_shard=2,tp=4", THROUGH, 4, BOTH[:1]),
        ("packed", "tp=2", THROUGH, 1, BOTH),
    ],
)
def test_what_is_fused_has_the_degree_of_the_engine_that_loads(
    kind: str, mesh: str, text: str, num_ranks: int, sources: Sequence[str], saved: Saves
) -> None:
    for source in sources:
        path, said, state = saved("apart", source)
        again, got = load(path, kind, mesh, text, stage=3 if "dp" in mesh else 1)
        assert_same(got, fused(state, num_ranks))
        torch.testing.assert_close(again, said, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "mesh", "target", "target_mesh", "text"),
    [
        ("packed", "dp_shard=2,tp=2", "apart", "tp=4", ALONE.format(how="")),
        ("packed", "tp=4", "apart", "tp=2", ALONE.format(how=", fused_ffn")),
        ("per rank", "dp_shard=2,tp=2", "apart", "single", ALONE.format(how=", fused_ffn")),
        ("per rank", "tp=2", "per rank", "tp=4", AGAIN),
        ("per rank", "tp=4", "per rank", "dp_shard=2", AGAIN),
        ("per rank", "tp=4", "packed", "tp=2", AGAIN),
        ("packed", "tp=2", "per rank", "dp_shard=2,tp=2", AGAIN),
    ],
)
def test_what_was_fused_has_the_degree_of_the_engine_that_saved(
    kind: str, mesh: str, target: str, target_mesh: str, text: str, saved: Saves
) -> None:
    path, said, _ = saved(kind, mesh)
    again, _ = load(path, target, target_mesh, text)
    torch.testing.assert_close(again, said, rtol=1e-12, atol=1e-12)


def test_what_is_whole_in_the_files_of_ranks_along_tp_has_no_degree(tmp_path: Path) -> None:
    """Then the number of ranks for which it was fused is to be said."""
    said, _ = save(tmp_path, "per rank", "tp=2", files="whole")
    text = ALONE.format(how=", fused_ffn")
    with pytest.raises(RewriteError, match="Write src_tp="):
        load(tmp_path, "apart", "single", text)
    again, _ = load(tmp_path, "apart", "single", text.replace("fused_ffn", "fused_ffn, src_tp=2"))
    torch.testing.assert_close(again, said, rtol=1e-12, atol=1e-12)
