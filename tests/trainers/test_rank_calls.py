"""What accelerate's Accelerator says of processes, in both adapters: of the data ranks, by any call, tree and plan."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
from accelerate.state import PartialState
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.hf.rank_accelerator import ArgumentsState, PlanAccelerator
from shardwise.trainers.data_ranks import DataRanks
from tests.accelerate.accelerate_loops import settings_of_threads
from tests.contracts.adapter_cases import refused_on_all
from tests.refusals import Refusals

PLANS = {
    "one rank": sw.Plan(),
    "dp 3": sw.Plan(mesh=sw.Mesh(dp_replicate=3)),
    "pp 2 x dp 2": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2)),
    "dp 2 x tp 2": sw.Plan(mesh=sw.Mesh(dp_replicate=2, tp=2)),
}


def of_accelerate(plan: sw.Plan, channel: sw.Channel) -> Any:
    return Accelerator(cpu=True, plan=plan, channel=channel)


def of_transformers(plan: sw.Plan, channel: sw.Channel) -> Any:
    accelerator: Any = accelerate.Accelerator(cpu=True)
    PlanAccelerator.take_over(accelerator, DataRanks(plan, channel))
    return accelerator


ADAPTERS = {"accelerate": of_accelerate, "transformers": of_transformers}


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def on_ranks(adapter: str, plan: str, ask: Callable[[Any], Any]) -> list[tuple[int, Any]]:
    """The data rank of each rank, and what it found."""
    made = PLANS[plan]

    def run(channel: sw.Channel) -> tuple[int, Any]:
        return made.mesh.data_rank(channel.rank), ask(ADAPTERS[adapter](made, channel))

    with settings_of_threads():
        return sw.simulate(made.mesh.size, run)


both = pytest.mark.parametrize("adapter", ADAPTERS)
each_plan = pytest.mark.parametrize("plan", PLANS)

# A value of each data rank ----------------------------------------------------------------------------------------

LEAVES: dict[str, Callable[[int], torch.Tensor]] = {
    "float32": lambda rank: torch.tensor([[1.5 + rank, -2.0 * rank]]),
    "float64, of many digits": lambda rank: torch.tensor([1.0 + 2.0**-40 * (rank + 1)], dtype=torch.float64),
    "int64, of many digits": lambda rank: torch.tensor([2**53 + 1 + 2 * rank, -rank]),
    "bool": lambda rank: torch.tensor([rank == 0, True, False]),
    "a number": lambda rank: torch.tensor(float(rank)),
    "not a number": lambda rank: torch.tensor([float("nan") if rank == 0 else 1.0, 2.0]),
    "no elements": lambda rank: torch.zeros(0, 3),
    "not contiguous": lambda rank: (torch.arange(6.0) * rank).view(2, 3).t(),
}
TREES: dict[str, Callable[[torch.Tensor], Any]] = {
    "alone": lambda leaf: leaf,
    "nested": lambda leaf: {"a": [leaf, (leaf * 2 if leaf.dtype != torch.bool else leaf,)], "b": Pair(leaf, leaf)},
}


def expected_of(how: str, parts: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(parts)
    if how in ("max", "min"):
        return stacked.amax(0) if how == "max" else stacked.amin(0)
    is_bool = stacked.dtype == torch.bool
    total = stacked.sum(0, dtype=torch.int64 if is_bool else stacked.dtype)
    return total if how == "sum" else total / len(parts)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for each in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves_of(each)]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    for one, other in zip(leaves_of(found), leaves_of(expected), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@both
@pytest.mark.parametrize("plan", [pytest.param("dp 3", marks=pytest.mark.quick), "pp 2 x dp 2"])
def test_reductions_are_those_of_the_values_of_data_ranks(adapter: str, plan: str) -> None:
    cases = [(how, leaf, tree) for how in ("sum", "mean", "max", "min") for leaf in LEAVES for tree in TREES]

    def ask(accelerator: Any) -> list[Any]:
        rank = accelerator.process_index
        found = [accelerator.reduce(TREES[tree](LEAVES[leaf](rank)), how) for how, leaf, tree in cases]
        return [*found, accelerator.reduce(torch.ones(1), scale=3.0), accelerator.reduce(torch.ones(2), "none")]

    count = PLANS[plan].mesh.num_data_ranks
    for _, (*found, scaled, left) in on_ranks(adapter, plan, ask):
        assert scaled.item() == count  # `scale` counts on TPUs alone
        assert left.tolist() == [1, 1]
        for one, (how, leaf, tree) in zip(found, cases, strict=True):
            trees = [TREES[tree](LEAVES[leaf](rank)) for rank in range(count)]
            together = zip(*map(leaves_of, trees), strict=True)
            for got, parts in zip(leaves_of(one), together, strict=True):
                assert_same(got, expected_of(how, list(parts)))
            assert type(one) is type(trees[0])


@both
@each_plan
def test_uneven_tensors_are_padded_and_gathered_over_data_ranks(adapter: str, plan: str) -> None:
    def own(rank: int) -> dict[str, Any]:
        return {"rows": torch.full((rank + 1, 2), rank), "columns": [torch.full((1, rank + 1), float(rank))]}

    def ask(accelerator: Any) -> Any:
        rank = accelerator.process_index
        rows = accelerator.gather(own(rank)["rows"])
        padded = accelerator.pad_across_processes(own(rank), dim=-1, pad_index=-1)
        first = accelerator.pad_across_processes(torch.ones(rank + 1), pad_first=True)
        flat = accelerator.pad_across_processes(torch.ones(2), dim=1)
        named = accelerator.gather_for_metrics([f"text {rank}", rank])
        return rows, padded, accelerator.gather(padded["columns"]), first, flat, named

    count = PLANS[plan].mesh.num_data_ranks
    for rank, (rows, padded, columns, first, flat, named) in on_ranks(adapter, plan, ask):
        assert rows.tolist() == [[each, each] for each in range(count) for _ in range(each + 1)]
        assert padded["rows"].shape == (rank + 1, 2)
        row = [float(rank)] * (rank + 1) + [-1.0] * (count - rank - 1)
        assert padded["columns"][0].tolist() == [row]
        assert columns[0].shape == (count, count)
        assert first.tolist() == [0.0] * (count - rank - 1) + [1.0] * (rank + 1)
        assert flat.tolist() == [1, 1]
        assert named == [each for other in range(count) for each in (f"text {other}", other)]


@both
@each_plan
def test_inputs_are_split_between_data_ranks(adapter: str, plan: str) -> None:
    given: dict[str, Any] = {"texts": ["a", "b", "c", "d", "e"], "rows": torch.arange(5)}

    def ask(accelerator: Any) -> Any:
        found = []
        for owner in (accelerator, ArgumentsState(PartialState(), accelerator.ranks)):
            with owner.split_between_processes({**given}) as part, owner.split_between_processes(["x"]) as short:
                found.append((part, short))
        with accelerator.split_between_processes({**given}, apply_padding=True) as padded:
            return *found, padded

    count = PLANS[plan].mesh.num_data_ranks
    sizes = [5 // count + (rank < 5 % count) for rank in range(count)]
    for rank, (*found, padded) in on_ranks(adapter, plan, ask):
        numbers = list(range(5))[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        for part, short in found:
            assert part["texts"] == [given["texts"][each] for each in numbers]
            assert part["rows"].tolist() == numbers
            assert short == (["x"] if rank == 0 else [])
        filled = numbers + [4] * (sizes[0] - len(numbers))
        assert padded["rows"].tolist() == filled
        assert padded["texts"] == [given["texts"][each] for each in filled]


# Who does it --------------------------------------------------------------------------------------------------------


def who_runs(accelerator: Any) -> dict[str, bool]:
    """Whether this rank does what each decorator and property gives to one process."""
    ran: dict[str, bool] = {}
    last = accelerator.num_processes - 1

    def note(name: str, decorate: Callable[[Any], Any]) -> None:
        ran[name] = False
        decorate(lambda: ran.update({name: True}))()

    note("on_main_process", accelerator.on_main_process)
    note("on_local_main_process", accelerator.on_local_main_process)
    note("on_last_process", accelerator.on_last_process)
    note("on_process", accelerator.on_process(process_index=last))
    note("on_process, at once", lambda function: accelerator.on_process(function, process_index=0))
    note("on_local_process", accelerator.on_local_process(local_process_index=0))
    for name in ("is_main_process", "is_local_main_process", "is_last_process"):
        ran[name] = getattr(accelerator, name)
        ran[f"state.{name}"] = getattr(accelerator.state, name)
    return ran


@both
@each_plan
def test_what_one_process_does_one_rank_does(adapter: str, plan: str) -> None:
    ranks, found = zip(*on_ranks(adapter, plan, who_runs), strict=True)
    for name in found[0]:
        assert sum(ran[name] for ran in found) == 1, name
    assert ranks[[ran["on_last_process"] for ran in found].index(True)] == max(ranks)
    assert [ran["on_process"] for ran in found] == [ran["is_last_process"] for ran in found]


@both
def test_the_main_process_goes_first(adapter: str, tmp_path: Path) -> None:
    def ask(accelerator: Any) -> bool:
        seen = []
        for name in ("main_process_first", "local_main_process_first"):
            first: AbstractContextManager[None] = getattr(accelerator, name)()
            with first:
                seen.append((tmp_path / name).exists())
                if accelerator.is_main_process:
                    (tmp_path / name).touch()
        return seen == [not accelerator.is_main_process] * 2

    assert all(right for _, right in on_ranks(adapter, "pp 2 x dp 2", ask))


@both
def test_files_trackers_and_lines_are_written_once(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves: list[int] = []
    logs: list[Any] = []

    class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, main_process_only = "list", False, False
        tracker = None

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            logs.append(values)

    def ask(accelerator: Any) -> None:
        accelerator.log_with = [Tracker()]
        accelerator.init_trackers("it")
        accelerator.log({"loss": 1.0})
        accelerator.print("a line")
        accelerator.save({"rank": torch.tensor(accelerator.process_index)}, tmp_path / "saved.pt")
        saves.append(accelerator.should_save_model)
        with accelerator.profile(accelerate.ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "t"))):
            torch.ones(1).sum()
        accelerator.wait_for_everyone()
        if accelerator.is_last_process:
            accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()

    on_ranks(adapter, "dp 2 x tp 2", ask)
    assert logs == [{"loss": 1.0}]
    assert capsys.readouterr().out == "a line\n"
    assert sum(saves) == 1
    assert torch.load(tmp_path / "saved.pt")["rank"] == 0
    traces = sorted((tmp_path / "t").iterdir())
    assert [each.name for each in traces] == [f"profile_{rank}.json" for rank in range(4)]
    assert all(json.loads(each.read_text()) for each in traces)


@both
def test_rows_that_a_loader_gave_twice_are_dropped(adapter: str) -> None:
    def ask(accelerator: Any) -> Any:
        loader = accelerator.prepare_data_loader(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
        # Ranks see 2 + 2 rows, then 2 + 1: the loader of accelerate fills up what is missing.
        found = [accelerator.gather_for_metrics(batch).tolist() for (batch,) in loader]
        return [each for one in found for each in one]

    for _, found in on_ranks(adapter, "dp 2 x tp 2", ask):
        assert sorted(found) == list(range(7))


# What is refused ----------------------------------------------------------------------------------------------------


def reduce_of_unlike_shapes(accelerator: Any) -> None:
    accelerator.reduce(torch.ones(1 + accelerator.process_index), "sum")


def uneven_inputs(accelerator: Any) -> None:
    with accelerator.join_uneven_inputs([], even_batches=False):
        pass


CALLS: dict[str, Callable[[Any], Any]] = {
    "an unknown reduction": lambda accelerator: accelerator.reduce(torch.ones(1), "median"),
    "unlike shapes": reduce_of_unlike_shapes,
    "uneven inputs": uneven_inputs,
}


def refused(adapter: str, ask: Callable[[Any], Any]) -> None:
    plan = PLANS["pp 2 x dp 2"]
    with settings_of_threads():
        refused_on_all(plan, lambda channel: ask(ADAPTERS[adapter](plan, channel)))


REFUSED = Refusals(
    "trainers.rank_calls",
    {
        **{f"{name}, {adapter}": partial(refused, adapter, ask) for name, ask in CALLS.items() for adapter in ADAPTERS},
        "objects that no rank may unpickle": partial(
            refused, "accelerate", lambda accelerator: accelerator.gather_for_metrics([sw.Plan()])
        ),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_cannot_do_together_is_refused_alike(case: str) -> None:
    REFUSED.check(case)
