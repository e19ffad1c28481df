"""From layout to layout: every element of every tensor and of every state arrives, exactly."""

from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.engine.tensor.tensor_decision import portion_of
from tests.checkpoint.layouts import LAYOUTS, Whole, assembled, engine_of, odd, portions_of, train

Saved = tuple[Path, Whole]
Saves = Callable[[str], Saved]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """One save per layout, after an update; every other one has whole tensors in its files."""

    @cache
    def save(name: str) -> Saved:
        plan = LAYOUTS[name]
        path = tmp_path_factory.mktemp("saves") / name
        file_layout: FileLayout = "whole" if list(LAYOUTS).index(name) % 2 else "pieces"

        def run(channel: sw.Channel) -> dict[sw.Piece, torch.Tensor]:
            engine = engine_of(plan, channel)
            train(engine, channel, [0])
            sw.save(path, engine, extra={"name": name}, layout=file_layout, channel=channel)
            return state_of(engine)

        return path, assembled(sw.simulate(plan.mesh.size, run))

    return save


def kind_of(name: str) -> str:
    plan = LAYOUTS[name]
    return "tp" if plan.mesh.tp > 1 else f"pp {plan.mesh.pp > 1}, stage {plan.sharding.stage}"


def pairs_of_every_kind_with_every_other() -> list[tuple[str, str]]:
    """Source and target: the layouts of a kind take turns, so that each is a source and a target."""
    kinds: dict[str, list[str]] = {}
    for name in LAYOUTS:
        kinds.setdefault(kind_of(name), []).append(name)
    sources = {kind: cycle(names) for kind, names in kinds.items()}
    found = [
        (next(sources[kind]), target)
        for targets in kinds.values()
        for _, kind, target in zip(range(max(len(kinds), len(targets))), cycle(kinds), cycle(targets), strict=False)
    ]
    return found + [(source, "one") for source in LAYOUTS if source not in {used for used, _ in found}]


PAIRS = pairs_of_every_kind_with_every_other()


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_layout_loads_what_others_saved(target: str, saved: Saves) -> None:
    plan = LAYOUTS[target]
    saves = {source: saved(source) for source, its_target in PAIRS if its_target == target}

    def run(channel: sw.Channel) -> list[tuple[dict[sw.Piece, torch.Tensor], Whole]]:
        engine = engine_of(plan, channel, seed=5)
        loaded = []
        for source, (path, _) in saves.items():
            spoil(engine)  # so that nothing is right because the source before had it too
            assert sw.load(path, engine, channel=channel) == {"name": source}
            loaded.append((state_of(engine), working_copies(engine)))
        return loaded

    ranks = sw.simulate(plan.mesh.size, run)
    portions = [portions_of(plan, rank) for rank in range(plan.mesh.size)]
    for (source, (_, expected)), results in zip(saves.items(), zip(*ranks, strict=True), strict=True):
        masters = masters_of(expected)
        got = masters_of(assembled(state for state, _ in results))
        assert got.keys() == masters.keys(), source
        for name, tensor in got.items():
            assert tensor.dtype == masters[name].dtype or not tensor.numel(), name
            assert same_bits(tensor, masters[name]), f"{name} of {source}"
        for (_, values), cut in zip(results, portions, strict=True):
            for name, value in values.items():
                first = "embedding.weight" if name == "head.weight" else name
                master = masters[first].view(value.shape if first not in cut else cut[first].global_shape)
                local = master if first not in cut else portion_of(master, cut[first])
                assert torch.equal(value, local.to(value.dtype)), f"{name} of {source}"


def test_the_pairs_have_every_layout_as_both_and_every_kind_with_every_other() -> None:
    kinds = {kind_of(name) for name in LAYOUTS}
    assert {(kind_of(source), kind_of(target)) for source, target in PAIRS} == set(product(kinds, kinds))
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(LAYOUTS)
    assert sum(source == target for source, target in PAIRS) < 10


def state_of(engine: sw.Engine) -> dict[sw.Piece, torch.Tensor]:
    return {piece: tensor.clone() for piece, tensor in engine.state().items()}


@torch.no_grad()
def spoil(engine: sw.Engine) -> None:
    for tensor in engine.state().values():
        tensor.fill_(3)


def working_copies(engine: sw.Engine) -> Whole:
    """What this rank computes with: not what is of another stage, nor what stage 3 gathers only for a while."""
    if engine.plan.sharding.stage == 3:
        return {}
    state = engine.model.state_dict(keep_vars=True)  # without, parts are refused
    return {name: each.detach().clone() for name, each in state.items() if not each.is_meta}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def masters_of(whole: Whole) -> Whole:
    """A state under the names that every precision has: a master under its parameter's, instead of the working copy."""
    master = "/master"
    named = {name: tensor for name, tensor in whole.items() if not name.endswith(master)}
    return named | {
        name.removeprefix("optimizer/").removesuffix(master): tensor
        for name, tensor in whole.items()
        if name.endswith(master)
    }


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_a_plain_model(source: str, saved: Saves) -> None:
    path, expected = saved(source)
    model = odd(7)
    report = sw.checkpoint.load(path, model.state_dict()).report
    assert not report.missing
    assert not report.unexpected
    masters = masters_of(expected)
    for name, value in model.state_dict().items():
        master = masters["embedding.weight" if name == "head.weight" else name]
        assert torch.equal(value.reshape(-1), master), name


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_save_verifies_and_its_catalogue_reads_the_same(source: str, saved: Saves) -> None:
    path, expected = saved(source)
    assert sw.checkpoint.verify(path).findings == ()
    catalogue = sw.checkpoint.open(path)
    assert set(catalogue.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(catalogue.read(name).reshape(-1), tensor), name
        assert torch.equal(catalogue.read(name, verify=False).reshape(-1), tensor), name
