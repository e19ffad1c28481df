"""Any layout to any layout: every element of every tensor and of every state arrives, exactly."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.arrangement import FileLayout
from tests.checkpoint.layouts import LAYOUTS, Whole, assembled, engine_of, odd, train

Saved = tuple[Path, Whole]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Saved]:
    """One save per layout, after two updates; every other one has whole tensors in its files."""
    found: dict[str, Saved] = {}
    for number, (name, plan) in enumerate(LAYOUTS.items()):
        path = tmp_path_factory.mktemp("saves") / name
        file_layout: FileLayout = "whole" if number % 2 else "pieces"

        def run(
            channel: sw.Channel, plan: sw.Plan = plan, path: Path = path, file_layout: FileLayout = file_layout
        ) -> dict[sw.Piece, torch.Tensor]:
            engine = engine_of(plan, channel)
            train(engine, channel, range(2))
            sw.save(path, engine, extra={"name": path.name}, layout=file_layout, channel=channel)
            return {piece: tensor.clone() for piece, tensor in engine.state().items()}

        found[name] = path, assembled(sw.simulate(plan.mesh.size, run))
    return found


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_into_every_other(source: str, target: str, saved: Mapping[str, Saved]) -> None:
    path, expected = saved[source]
    plan = LAYOUTS[target]

    def run(channel: sw.Channel) -> tuple[dict[sw.Piece, torch.Tensor], Whole]:
        engine = engine_of(plan, channel, seed=5)
        assert sw.load(path, engine, channel=channel) == {"name": source}
        values = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        return {piece: tensor.clone() for piece, tensor in engine.state().items()}, values

    results = sw.simulate(plan.mesh.size, run)
    got = assembled(state for state, _ in results)
    masters = masters_of(expected)
    assert masters_of(got).keys() == masters.keys()
    for name, tensor in masters_of(got).items():
        assert tensor.dtype == masters[name].dtype or not tensor.numel(), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), masters[name].reshape(-1).view(torch.uint8)), name
    for _, values in results:  # working copies, on every rank
        for name, value in values.items():
            if value.is_meta:  # of another stage
                continue
            master = masters["embedding.weight" if name == "head.weight" else name]
            assert torch.equal(value.reshape(-1), master.to(value.dtype)), name


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
def test_every_layout_loads_into_a_plain_model(source: str, saved: Mapping[str, Saved]) -> None:
    path, expected = saved[source]
    model = odd(7)
    report = sw.checkpoint.load(path, model.state_dict()).report
    assert not report.missing
    assert not report.unexpected
    masters = masters_of(expected)
    for name, value in model.state_dict().items():
        master = masters["embedding.weight" if name == "head.weight" else name]
        assert torch.equal(value.reshape(-1), master), name


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_save_verifies_and_its_catalogue_reads_the_same(source: str, saved: Mapping[str, Saved]) -> None:
    path, expected = saved[source]
    assert sw.checkpoint.verify(path).findings == ()
    catalogue = sw.checkpoint.open(path)
    assert set(catalogue.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(catalogue.read(name).reshape(-1), tensor), name
        assert torch.equal(catalogue.read(name, verify=False).reshape(-1), tensor), name
