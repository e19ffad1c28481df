"""Averages of checkpoints of any formats: the bits of a plain loop, and refusals with all differences at once."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.cli import main
from shardwise.errors import CheckpointError
from tests.checkpoint.cut_tensors import cut
from tests.checkpoint.memory_peaks import peaks_of
from tests.checkpoint.small_states import same, same_tensor

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


def as_save(path: Path, state: State) -> None:
    sw.save(path, state)


def as_pieces(path: Path, state: State) -> None:
    sw.simulate(2, lambda channel: sw.save(path, _share(state, channel.rank), channel=channel))


def _share(state: State, rank: int) -> dict[sw.Piece, torch.Tensor]:
    return {
        piece: part
        for name, each in state.items()
        if each.numel() > 1
        for piece, part in cut(name, each, "runs", 2)[rank].items()
    } | {
        sw.Piece(name=name, dtype=str(each.dtype).removeprefix("torch."), global_shape=tuple(each.shape)): each
        for name, each in state.items()
        if each.numel() <= 1
    }


def as_hub(path: Path, state: State) -> None:
    path.mkdir()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def as_torch(path: Path, state: State) -> None:
    torch.save(state, path)


FORMATS: Sequence[Callable[[Path, State], None]] = (as_save, as_pieces, as_hub, as_torch)


def loop(states: Sequence[State], weights: Sequence[float], accumulate: torch.dtype) -> State:
    """The mean as a user would write it."""
    made = dict(states[0])
    for name, dtype in DTYPES.items():
        wide = accumulate.to_complex() if dtype.is_complex else accumulate
        total = states[0][name].to(wide) * weights[0]
        for state, weight in zip(states[1:], weights[1:], strict=True):
            total = total + state[name].to(wide) * weight
        made[name] = (total / sum(weights)).to(dtype)
    return made


@pytest.mark.parametrize("weights", [None, (1.0, 0.3, -0.1)])
def test_the_average_of_any_formats_has_the_bits_of_a_plain_loop(
    weights: Sequence[float] | None, tmp_path: Path
) -> None:
    for first in range(len(FORMATS)):
        writers = [FORMATS[(first + at) % len(FORMATS)] for at in range(3)]
        states = [state_of(seed) for seed in range(3)]
        paths = [tmp_path / f"{first} {at}.pt" for at in range(3)]
        for write, path, state in zip(writers, paths, states, strict=True):
            write(path, state)
        report = checkpoint.average(paths, tmp_path / f"out {first}", weights=weights)
        expected = loop(states, weights or (1, 1, 1), torch.float64)
        found = checkpoint.open(tmp_path / f"out {first}")
        assert same({name: found.read(name) for name in found.tensors}, expected)
        assert (report.num_tensors, report.num_averaged, report.num_equal) == (8, 6, 2)
        assert found.contents.extra["average"]["weights"] == list(weights or (1, 1, 1))
        assert checkpoint.verify(tmp_path / f"out {first}").good


def test_sums_in_float32_have_the_bits_of_that_loop_and_hold_no_float64(tmp_path: Path) -> None:
    states = [state_of(seed) for seed in range(3)]
    paths = [tmp_path / str(at) for at in range(3)]
    for path, state in zip(paths, states, strict=True):
        sw.save(path, state)
    with pytest.raises(CheckpointError, match="accumulate is float32, to which d would be rounded before the sum"):
        checkpoint.average(paths, tmp_path / "out", accumulate="float32")
    assert not (tmp_path / "out").exists()
    for path, state in zip(paths, states, strict=True):
        sw.save(path, {name: each for name, each in state.items() if name != "d"})
    checkpoint.average(paths, tmp_path / "out", weights=[3, 1, 0.7], accumulate="float32")
    expected = loop(states, [3, 1, 0.7], torch.float32)
    assert torch.equal(checkpoint.open(tmp_path / "out").read("a"), expected["a"])
    assert not torch.equal(expected["a"], loop(states, [3, 1, 0.7], torch.float64)["a"])


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"w": torch.zeros(2, 3), "x": torch.zeros(2), "y": torch.zeros(1)})
    sw.save(tmp_path / "b", {"w": torch.zeros(3, 2), "x": torch.zeros(2).half(), "z": torch.zeros(1)})
    with pytest.raises(CheckpointError) as refused:
        checkpoint.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    a, b = (checkpoint.open(tmp_path / name).contents.location for name in "ab")
    assert refused.value.problems == (
        f"w has shape [2, 3] in {a} and [3, 2] in {b}",
        f"x has dtype float32 in {a} and float16 in {b}",
        f"y is in {a} and not in {b}",
        f"z is in {b} and not in {a}",
    )
    assert not (tmp_path / "out").exists()


def test_integers_are_equal_or_are_named(tmp_path: Path) -> None:
    for at, path in enumerate("abc"):
        state = {
            "w": torch.full((2,), float(at)),
            "bn.0.count": torch.tensor(at),
            "bn.1.count": torch.tensor(at // 2),
            "eight": torch.full((2,), 1.0 + at // 2).to(torch.float8_e4m3fn),
        }
        sw.save(tmp_path / path, state)
    paths = [tmp_path / path for path in "abc"]
    with pytest.raises(CheckpointError) as refused:
        checkpoint.average(paths, tmp_path / "out")
    assert [each.split(" is not as")[0] for each in refused.value.problems[:3]] == [
        f"bn.0.count (int64) in {', '.join(checkpoint.open(path).contents.location for path in paths[1:])}",
        f"bn.1.count (int64) in {checkpoint.open(paths[2]).contents.location}",
        f"eight (float8_e4m3fn) in {checkpoint.open(paths[2]).contents.location}",
    ]
    with pytest.raises(
        CheckpointError, match=r"from_first='bn.2.count' .* means none of the 3 tensors .* nearest is bn"
    ):
        checkpoint.average(paths, tmp_path / "out", from_first=["bn.2.count"])
    report = checkpoint.average(paths, tmp_path / "out", from_first=["bn.*.count", "eight"])
    assert sorted(report.from_first) == ["bn.0.count", "bn.1.count", "eight"]
    found = checkpoint.open(tmp_path / "out")
    assert found.read("w").tolist() == [1, 1]
    assert found.read("bn.1.count") == 0


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
    with pytest.raises(CheckpointError, match="files of Hugging Face, which hold no such state"):
        checkpoint.average(paths, tmp_path / "hf", to="hf", optimizer=True)


def test_masters_are_averaged_into_files_of_another_dtype(tmp_path: Path) -> None:
    masters = [torch.randn(6), torch.randn(6)]
    for at, master in enumerate(masters):
        sw.save(tmp_path / str(at), {"w": master.bfloat16(), "optimizer/w/master": master})
    checkpoint.average([tmp_path / "0", tmp_path / "1"], tmp_path / "hf", to="hf", dtype="float32")
    expected = ((masters[0].double() + masters[1].double()) / 2).float()
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {"w": expected})


def test_tied_tensors_are_averaged_once_and_stay_tied(tmp_path: Path) -> None:
    for at, name in enumerate("ab"):
        tensor = torch.full((2, 2), float(at))
        sw.save(tmp_path / name, {"wte": tensor, "head": tensor} if at else {"head": tensor, "wte": tensor})
    report = checkpoint.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert report.num_tensors == 1
    found = checkpoint.open(tmp_path / "out")
    assert len(found.contents.aliases) == 1
    assert found.read("wte").tolist() == found.read("head").tolist() == [[0.5, 0.5], [0.5, 0.5]]
    sw.save(tmp_path / "c", {"wte": torch.zeros(2, 2), "head": torch.ones(2, 2)})
    for order in ("ac", "ca"):
        with pytest.raises(CheckpointError, match=r"and tied in|are tied in"):
            checkpoint.average([tmp_path / name for name in order], tmp_path / "none")


def averages(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    for name in "ab":
        sw.save(folder / f"small {name}", {"w": torch.ones(1000)})
    checkpoint.average([folder / "small a", folder / "small b"], folder / "again")
    yield "what is loaded once"
    checkpoint.average(paths, folder / "average", weights=[3, *[1] * (len(paths) - 1)])
    yield "average"


def test_memory_is_bounded_however_many_and_large_the_checkpoints_are(tmp_path: Path) -> None:
    paths = [tmp_path / str(at) for at in range(5)]
    for path in paths:
        sw.save(path, {"w": torch.randn(4_500_000).bfloat16(), "x": torch.zeros(500_000, 2)})
    peaks = peaks_of(averages, paths, tmp_path, window_part=1)
    assert 32 < peaks["average"] < 96, peaks


def test_arguments_that_cannot_be_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        checkpoint.average(["a", "b"], tmp_path, weights=[1], accumulate="float16", dtype="float32", from_first="x")  # type: ignore[arg-type]
    assert len(refused.value.problems) == 4
    for weights in ([1, -1], [1, float("nan")], "ab"):
        with pytest.raises(CheckpointError):
            checkpoint.average(["a", "b"], tmp_path, weights=weights)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="of two checkpoints or more"):
        checkpoint.average(["a"], tmp_path)


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    for at, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), float(at))}, tmp_path / name / "model.safetensors")
    arguments = ["ckpt", "average", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*arguments, "--factors", "1,3", "--to", "hf"])
    assert done.exit_code == 0, done.output
    assert f"  3 x {tmp_path / 'b'}\n" in done.output
    assert "1 tensor, 8 B: 1 averaged in float64, 0 equal in all; not all verified" in done.output
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [0.75, 0.75]
    assert CliRunner().invoke(main, [*arguments, "--weights", "1,x"]).exit_code == 2
