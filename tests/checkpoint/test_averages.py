"""Averages of checkpoints of any formats: the bits of a plain loop, and refusals with all differences at once."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.errors import CheckpointError
from tests.checkpoint.cut_tensors import save_pieces, tensors_of
from tests.checkpoint.rewritten_tensors import shares_of
from tests.checkpoint.small_states import same, same_tensor
from tests.refusals import Refusals

State = dict[str, torch.Tensor]


DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float64, "e": torch.complex64}


def state_of(seed: int) -> State:
    numbers = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(7, 5, generator=numbers, dtype=torch.complex64 if dtype.is_complex else None).to(dtype) * 3
        for name, dtype in DTYPES.items()
    }
    state["a"][0, 0] = -0.0
    state["b"][0, 0] = torch.inf
    return state | {"counts": torch.tensor([1, 2, 3]), "flag": torch.tensor(True), "none": torch.zeros(0, 3)}


WRITERS: dict[str, Callable[[Path, State], object]] = {
    "whole": sw.save,
    "pieces": lambda path, state: save_pieces(path, shares_of(state, "runs", 2)),
    "hub": lambda path, state: save_file(state, path),
    "torch": lambda path, state: torch.save(state, path),
}
ENDINGS = {"hub": ".safetensors", "torch": ".pt"}


def loop(states: Sequence[State], weights: Sequence[float], accumulate: torch.dtype) -> State:
    """The mean as a user would write it."""
    made = dict(states[0])
    for name in DTYPES.keys() & made.keys():
        dtype = DTYPES[name]
        wide = accumulate.to_complex() if dtype.is_complex else accumulate
        total = states[0][name].to(wide) * weights[0]
        for state, weight in zip(states[1:], weights[1:], strict=True):
            total = total + state[name].to(wide) * weight
        made[name] = (total / sum(weights)).to(dtype)
    return made


@pytest.mark.parametrize(
    ("first", "weights", "accumulate"),
    [(0, None, "float64"), (1, (1.0, 0.3, -0.1), "float64"), (2, (3.0, 1.0, 0.7), "float32"), (3, None, "float64")],
)
def test_the_average_of_any_formats_has_the_bits_of_a_plain_loop(
    first: int, weights: Sequence[float] | None, accumulate: Literal["float32", "float64"], tmp_path: Path
) -> None:
    states = [state_of(seed) for seed in range(3)]
    if accumulate == "float32":  # sums of what is wider would be rounded, and are refused
        states = [{name: each for name, each in state.items() if name != "d"} for state in states]
    paths = []
    for at, state in enumerate(states):
        name = [*WRITERS][(first + at) % 4]
        paths.append(tmp_path / f"{at}{ENDINGS.get(name, '')}")
        WRITERS[name](paths[-1], state)
    report = checkpoint.average(paths, tmp_path / "out", weights=weights, accumulate=accumulate)
    expected = loop(states, weights or (1, 1, 1), getattr(torch, accumulate))
    assert same(tensors_of(tmp_path / "out"), expected)
    assert (report.num_averaged, report.num_equal) == (len(expected) - 2, 2)
    assert checkpoint.open(tmp_path / "out").extra["average"]["weights"] == list(weights or (1, 1, 1))
    assert checkpoint.verify(tmp_path / "out").good


COUNTED = [
    {
        "w": torch.full((2,), float(at)),
        "bn.0.count": torch.tensor(at),
        "bn.1.count": torch.tensor(at // 2),
        "eight": torch.full((2,), 1.0 + at // 2).to(torch.float8_e4m3fn),
    }
    for at in range(3)
]


def averaged(states: Sequence[State], **arguments: Any) -> Any:
    def call(folder: Path) -> object:
        for at, state in enumerate(states):
            sw.save(folder / str(at), state)
        try:
            return checkpoint.average([folder / str(at) for at in range(len(states))], folder / "out", **arguments)
        finally:
            assert not (folder / "out").exists()

    return call


@pytest.mark.parametrize("near", [(), (0,), (2, 4)], ids=str)
def test_far_sources_are_read_in_turn_by_the_threads_of_one(tmp_path: Path, near: tuple[int, ...]) -> None:
    before, threads = set(threading.enumerate()), list[int]()

    class Far(checkpoint.LocalStore):
        parallel_reads = 4

        def open(self, name: str) -> Any:
            begun = [each for each in threading.enumerate() if each not in before]  # other tests may have left some
            threads.append(sum(each.name.startswith("shardwise-read") for each in begun))
            return super().open(name)

    states, sources = [state_of(seed) for seed in range(6)], []
    for number, state in enumerate(states):
        sw.save(tmp_path / f"{number}", state)
        sources.append((checkpoint.LocalStore if number in near else Far)(tmp_path / f"{number}"))
    checkpoint.average(sources, tmp_path / "mean", accumulate="float64")
    assert same(tensors_of(tmp_path / "mean"), loop(states, [1.0] * 6, torch.float64))
    assert 0 < max(threads) <= 2 * Far.parallel_reads, "what is copied, and what is compared before"


def test_whole_numbers_may_come_from_the_first(tmp_path: Path) -> None:
    for at, state in enumerate(COUNTED):
        sw.save(tmp_path / str(at), state)
    paths = [tmp_path / str(at) for at in range(3)]
    report = checkpoint.average(paths, tmp_path / "out", from_first=["bn.*.count", "eight"])
    assert sorted(report.from_first) == ["bn.0.count", "bn.1.count", "eight"]
    found = checkpoint.open(tmp_path / "out")
    assert (found.read("w").tolist(), found.read("bn.1.count").item()) == ([1, 1], 0)


W, V = torch.zeros(2, 2), torch.ones(2, 2)
TIED: list[State] = [{"head": W, "wte": W}, {"wte": V, "head": V}, {"wte": W, "head": V}]
REFUSED = Refusals(
    "checkpoint.averages",
    {
        "all differences": averaged(
            [
                {"w": torch.zeros(2, 3), "x": torch.zeros(2), "y": torch.zeros(1)},
                {"w": torch.zeros(3, 2), "x": torch.zeros(2).half(), "z": torch.zeros(1)},
            ]
        ),
        "whole numbers that differ": averaged(COUNTED),
        "a name that is none of them": averaged(COUNTED, from_first=["bn.2.count"]),
        "sums that would be rounded": averaged([state_of(0), state_of(1)], accumulate="float32"),
        "tied in the first": averaged([TIED[0], TIED[2]]),
        "tied in the second": averaged([TIED[2], TIED[0]]),
        "state for files of Hugging Face": averaged(TIED[:2], to="hf", optimizer=True),
        "arguments": averaged(TIED[:2], weights=[1], accumulate="float16", dtype="float32", from_first="x"),
        **{f"weights {weights}": averaged(TIED[:2], weights=weights) for weights in ([1, -1], [1, float("nan")], "ab")},
        "one alone": averaged(TIED[:1]),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_average_is_refused(case: str) -> None:
    REFUSED.check(case)


def trained(seed: int, path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(seed + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    sw.save(path, TorchState(model, optimizer), extra={"step": seed}, step=seed)
    found = checkpoint.open(path)
    return {name: found.read(name) for name in found.tensors}


def test_the_state_of_optimizers_is_left_out_or_averaged(tmp_path: Path) -> None:
    paths = [tmp_path / str(seed) for seed in range(2)]
    states = [trained(seed, path) for seed, path in enumerate(paths)]
    report = checkpoint.average(paths, tmp_path / "model")
    assert set(report.left_out) == {name for name in states[0] if name.startswith("optimizer/")}
    contents = checkpoint.open(tmp_path / "model").contents
    assert not any(name.startswith("optimizer/") for name in contents.tensors)
    assert (contents.step, "step" in contents.extra, dict(contents.settings)) == (None, False, {})
    checkpoint.average(paths, tmp_path / "all", optimizer=True)
    found = checkpoint.open(tmp_path / "all")
    for name, tensor in states[0].items():
        expected = ((tensor.double() + states[1][name].double()) / 2).to(tensor.dtype)
        assert same_tensor(found.read(name), expected), name
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    sw.load(tmp_path / "all", TorchState(model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_masters_are_averaged_into_files_of_another_dtype(tmp_path: Path) -> None:
    masters = [torch.randn(6), torch.randn(6)]
    for at, master in enumerate(masters):
        sw.save(tmp_path / str(at), {"w": master.bfloat16(), "optimizer/w/master": master})
    checkpoint.average([tmp_path / "0", tmp_path / "1"], tmp_path / "hf", to="hf", dtype="float32")
    expected = ((masters[0].double() + masters[1].double()) / 2).float()
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {"w": expected})


def test_tied_tensors_are_averaged_once_and_stay_tied(tmp_path: Path) -> None:
    for at in (0, 1):
        sw.save(tmp_path / str(at), TIED[at])
    assert checkpoint.average([tmp_path / "0", tmp_path / "1"], tmp_path / "out").num_tensors == 1
    found = checkpoint.open(tmp_path / "out")
    assert len(found.contents.aliases) == 1
    assert found.read("wte").tolist() == found.read("head").tolist() == [[0.5, 0.5], [0.5, 0.5]]
