"""Under whatever layout and in whatever form a state is saved, it loads under any other as the plain program's own.

The oracle is one process: a model and an optimizer of torch after two updates. An engine of one layout takes this state
over and gives it in a form. An engine of another layout takes that. Now it has the plain values under the plain names,
bit for bit, and its next update is that of an engine that took the plain state without a detour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, TorchState
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.plan.specs import Partition
from tests.checkpoint.layouts import (
    LAYOUTS,
    Whole,
    adamw,
    assembled,
    engine_of,
    layout,
    masters_of,
    odd,
    same_bits,
    state_of,
    train,
)
from tests.covering import covering
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import word_batch, word_loss
from tests.oracle.saved_forms import FORMS
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = list(LAYOUTS)
QUICK = [
    *("one", "three-whole-bf16", "four-replicas", "stages-four-x-two-whole", "stage2-three-whole-bf16"),
    *("stage3-replicas-bf16", "tensor-two-parts-x-two", "tensor-three-x-two-stage3", "all"),
]
"""All kinds are among them. `make stress` has the others, each with sources of all."""
TARGETS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.stress) for name in NAMES]
SHIFTS = dict(zip(FORMS, (1, 3, 0, 5, 8, 10, 12, 13, 15, 14, 16), strict=True))


def source_of(target: str, shift: int) -> str:
    """Which layout gives what this one takes: another one in most forms, and each gives each form once."""
    ring = QUICK if target in QUICK else NAMES
    return ring[(ring.index(target) + shift) % len(ring)]


def engine_under(name: str, channel: sw.Channel, model: torch.nn.Module) -> sw.Engine:
    """With the random numbers of every other engine here."""
    return sw.parallelize(model, LAYOUTS[name], optimizer=adamw, loss=word_loss, seed=0, channel=channel)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The program of one process."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, seed: int = 0) -> "Plain":
        model = odd(seed)
        return cls(model=model, optimizer=adamw(list(model.parameters())))

    @property
    def state(self) -> TorchState:
        return TorchState(self.model, self.optimizer)

    def values(self) -> Whole:
        return {piece.name: tensor.detach().clone() for piece, tensor in self.state.state().items()}

    def train(self, updates: range) -> list[float]:
        losses = []
        for update in updates:
            torch.manual_seed(update)
            batch = word_batch(update, 28)
            loss = word_loss(self.model(batch["words"]), batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@dataclass(frozen=True, kw_only=True)
class Saves:
    plain: Whole
    taken: Callable[[str, sw.Channel], sw.Engine]
    """An engine of a layout that took the plain state."""
    saved: Callable[[str], Path]
    """The folder with all forms that a layout has given."""
    gone_on: Callable[[str], tuple[list[float], ...]]
    """The next losses of an engine that took the plain state, by rank."""
    next_losses: list[float]
    """The same of the plain program."""


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    plain = Plain.of()
    plain.train(range(2))
    plain.optimizer.param_groups[1]["lr"] = 2e-3  # as a schedule does
    path = tmp_path_factory.mktemp("plain")
    sw.save(path, plain.state, extra={"at": 2}, step=2)

    def taken(name: str, channel: sw.Channel) -> sw.Engine:
        engine = engine_under(name, channel, odd(4))
        sw.load(path, engine, channel=channel)
        return engine

    @cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")

        def run(channel: sw.Channel) -> None:
            engine = taken(name, channel)
            for form, each in FORMS.items():
                each.give(engine, folder / form, channel)

        sw.simulate(LAYOUTS[name].mesh.size, run)
        for form, each in FORMS.items():
            each.finished(folder / form).rename(folder / f"{form} in the end")
        return folder

    @cache
    def gone_on(name: str) -> tuple[list[float], ...]:
        return tuple(sw.simulate(LAYOUTS[name].mesh.size, lambda channel: train(taken(name, channel), channel, [2])))

    values = plain.values()
    return Saves(plain=values, taken=taken, saved=saved, gone_on=gone_on, next_losses=plain.train(range(2, 4)))


def expected_of(plain: Whole, source: str, form: str) -> Whole:
    """What a form has of the plain values."""
    if not FORMS[form].weights_only:
        return plain
    weights = {name: each for name, each in plain.items() if not name.startswith("optimizer/")}
    if LAYOUTS[source].precision.compute is None:
        return weights
    parameters = {name for name, each in odd().named_parameters() if each.is_floating_point()}
    rounded = [name for name in weights if name in parameters and not name.startswith("norm.")]  # a batch norm stays
    return weights | {name: weights[name].bfloat16().float() for name in rounded}


def differences(got: Whole, expected: Whole) -> list[str]:
    """Names whose bits differ; nobody holds what has no elements."""
    held = {name for name, each in expected.items() if each.numel()}
    return [name for name in held if name not in got or not same_bits(got[name], expected[name].to(got[name].dtype))]


@torch.no_grad()
def spoil(engine: sw.Engine) -> None:
    """So that nothing is right because it was before."""
    for tensor in engine.state().values():
        tensor.fill_(3)


@pytest.mark.parametrize("target", TARGETS)
def test_a_layout_takes_what_others_gave_and_trains_on(target: str, saves: Saves) -> None:
    paths = {form: saves.saved(source_of(target, SHIFTS[form])) / f"{form} in the end" for form in FORMS}
    expected_losses = saves.gone_on(target)

    def run(channel: sw.Channel) -> dict[str, tuple[dict[sw.Piece, torch.Tensor], list[float]]]:
        engine = engine_under(target, channel, odd(5))
        taken = {}
        for form, path in paths.items():
            if FORMS[form].is_foreign:
                engine = engine_under(target, channel, odd(5))
            else:
                spoil(engine)
            FORMS[form].take(path, engine, channel)
            state = state_of(engine)
            taken[form] = state, [] if FORMS[form].weights_only else train(engine, channel, [2])
        return taken

    ranks = sw.simulate(LAYOUTS[target].mesh.size, run)
    for form in FORMS:
        got = masters_of(assembled(each[form][0] for each in ranks))
        source = source_of(target, SHIFTS[form])
        assert differences(got, expected_of(saves.plain, source, form)) == [], f"{form} of {source}"
        if not FORMS[form].weights_only:
            assert tuple(each[form][1] for each in ranks) == expected_losses, f"{form} of {source}"


@pytest.mark.parametrize(("form", "source"), [(form, QUICK[1 + at % 8]) for at, form in enumerate(FORMS)])
def test_the_plain_program_takes_what_layouts_gave_and_trains_on(form: str, source: str, saves: Saves) -> None:
    path = saves.saved(source) / f"{form} in the end"
    again = Plain.of(7)
    state: Any = again.model.state_dict() if FORMS[form].weights_only else again.state
    FORMS[form].take(path, state, sw.default_channel())
    assert differences(again.values(), expected_of(saves.plain, source, form)) == []
    if not FORMS[form].weights_only:
        assert again.train(range(2, 4)) == saves.next_losses
    if form in ("pieces", "whole", "in the background", "converted"):
        assert checkpoint.verify(path).good
        catalogue = checkpoint.open(path)
        assert catalogue.extra == {"at": 2}
        held = masters_of({name: catalogue.read(name) for name in catalogue.tensors})
        assert differences(held, saves.plain) == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_layout_takes_the_weights_that_another_streams(target: str, saves: Saves) -> None:
    """On other ranks, or on the same ones. An engine that takes them trains on like one that was built with them."""
    source = source_of(target, 7)
    givers = range(LAYOUTS[source].mesh.size)
    first = len(givers) if NAMES.index(target) % 4 else 0
    takers = range(first, first + LAYOUTS[target].mesh.size)

    def run(world: sw.Channel) -> tuple[dict[sw.Piece, torch.Tensor], list[float]]:
        given = taken = None
        if world.rank in givers:
            given = saves.taken(source, world.over(givers))
        if world.rank in takers:
            taken = engine_under(target, world.over(takers), odd(5))
        recorded = sw.Recorded(world)
        report = sw.stream(given, taken, channel=recorded, delta=True)
        assert {call.operation for call in recorded.calls} <= {"exchange", "send", "receive"}, "nothing is gathered"
        again = sw.stream(given, taken, channel=world, delta=True, last=report)
        assert (again.skipped_blocks, again.digest) == (again.num_blocks, report.digest)
        state = {} if taken is None else state_of(taken)
        return state, [] if taken is None else train(taken, taken.channel, [2])

    def built(channel: sw.Channel) -> list[float]:
        model = odd()
        model.load_state_dict(
            {name: each for name, each in expected.items() if name in model.state_dict()}, strict=False
        )
        return train(engine_under(target, channel, model), channel, [2])

    expected = expected_of(saves.plain, source, "full")
    ranks = sw.simulate(max(givers.stop, takers.stop), run)
    got = masters_of(assembled(state for state, _ in ranks))
    assert differences(got, expected) == [], source
    assert [losses for _, losses in ranks if losses] == sw.simulate(len(takers), built)


def refused(
    folder: Path,
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = adamw,
    change: Callable[[torch.nn.Module], object] = lambda model: None,
) -> None:
    """An engine of two ranks takes the plain state, and is of another optimizer, or of a model that was changed."""
    plain = Plain.of()
    plain.train(range(1))
    sw.save(folder, plain.state)

    def load(channel: sw.Channel) -> None:
        model = odd()
        change(model)
        engine = sw.parallelize(model, LAYOUTS["two-slice"], optimizer=optimizer, loss=word_loss, channel=channel)
        sw.load(folder, engine, channel=channel)

    raise same_error_everywhere(2, load)


def wider(model: Any) -> None:
    model.up, model.down = torch.nn.Linear(7, 20), torch.nn.Linear(20, 7)


NOT = Refusals(
    "oracle.loads",
    {
        "another optimizer": lambda folder: refused(
            folder, optimizer=lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)
        ),
        "one group for two": lambda folder: refused(folder, optimizer=lambda given: torch.optim.AdamW(given, lr=0.1)),
        "other sizes": lambda folder: refused(folder, change=wider),
        "a parameter more": lambda folder: refused(
            folder, change=lambda model: model.register_parameter("more", torch.nn.Parameter(torch.ones(2)))
        ),
        "a buffer less": lambda folder: refused(
            folder, change=lambda model: setattr(model, "norm", torch.nn.BatchNorm1d(7, track_running_stats=False))
        ),
    },
)


@pytest.mark.parametrize("case", NOT)
def test_what_does_not_fit_is_refused_by_all_ranks_in_words(case: str) -> None:
    NOT.check(case)


WAYS = covering(
    (None, "bfloat16"), (0, 1, 3), ("slice", "whole"), ("pieces", "whole"), (1, 4), ("at once", "later"), strength=2
)


@pytest.mark.parametrize(("compute", "stage", "partition", "files", "k", "when"), WAYS)
def test_a_run_that_restarts_goes_on_to_the_bits_of_the_one_that_went_on(
    compute: str | None, stage: int, partition: Partition, files: FileLayout, k: int, when: str, tmp_path: Path
) -> None:
    plan = layout(1, 2, stage, partition, 500, compute=compute, microbatches=k)

    def uninterrupted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel)
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        train(engine, channel, range(2))
        schedule.step()
        with AsyncSaver(tmp_path, layout=files, channel=channel) as saver:
            if when == "later":
                saver.save(engine, extra={"at": 2})
            else:
                sw.save(tmp_path, engine, extra={"at": 2}, layout=files, channel=channel)
            losses = train(engine, channel, range(2, 5))
        sw.load(tmp_path, engine, channel=channel)  # undoes what it has learnt since
        assert train(engine, channel, range(2, 5)) == losses
        return losses

    def restarted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel, seed=3)
        if stage < 3:
            engine.model.get_parameter("up.weight").detach().fill_(3.0)  # which the engine has not noticed yet
        assert sw.load(tmp_path, engine, channel=channel) == {"at": 2}
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5e-2, 1.5e-3]
        return train(engine, channel, range(2, 5))

    expected = sw.simulate(2, uninterrupted)
    assert sw.simulate(2, restarted) == expected
    assert len(set(expected[0])) == 3, "the losses move, so that equal ones say something"
