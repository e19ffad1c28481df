"""What does not fit is told at once, alike on all ranks, before anything is written; what is let pass is reported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LoadReport, TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.small_states import Whole, same


def refusal(path: Path, states: list[Any], tensors: list[Whole], **arguments: Any) -> str:
    """The error that all ranks get; none of the tensors has changed."""
    before = [{name: tensor.clone() for name, tensor in each.items()} for each in tensors]
    errors = []

    def run(channel: Channel) -> None:
        with pytest.raises(CheckpointError) as caught:
            sw.load(path, states[channel.rank], channel=channel, **arguments)
        errors.append(str(caught.value))

    sw.simulate(len(states), run)
    assert len(errors) == len(states)
    assert len(set(errors)) == 1
    assert all(same(each, old) for each, old in zip(tensors, before, strict=True))
    return errors[0]


def report_of(path: Path, state: Any, **arguments: Any) -> LoadReport:
    return checkpoint.load(path, state, **arguments).report


def saved(path: Path) -> Whole:
    state = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.arange(4),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "d": torch.ones(5),
        "optimizer/a/exp_avg": torch.ones(2, 3),
    }
    checkpoint.save(path, state)
    return state


def test_all_findings_come_at_once_and_alike_on_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path)

    def target(rank: int) -> Whole:
        tensors = {
            "a": torch.full((3, 2), 7.0),
            "b": torch.full((4,), 7, dtype=torch.int32),
            "new": torch.full((2,), 7.0),
            "c": torch.full((3,), 7.0).bfloat16(),
        }
        return {**tensors, "only here": torch.full((1,), 7.0)} if rank == 1 else tensors

    states = [target(rank) for rank in range(3)]
    text = refusal(tmp_path, states, states)
    for said in (
        "a: shape [3, 2] in the target, [2, 3] in the checkpoint",
        "b: dtype int32 in the target, int64 in the checkpoint; allow it with cast=True, or keep the saved dtypes "
        "(precision.master)",
        "new: missing; the checkpoint has no tensor for it",
        "only here: missing; the checkpoint has no tensor for it",
        "d: unexpected; the target has no place for it",
    ):
        assert text.count(said) == 1
    assert "optimizer" not in text
    assert str(tmp_path / "save-00000001") in text


def test_what_is_let_pass_is_reported_and_the_rest_is_loaded(tmp_path: Path) -> None:
    state = saved(tmp_path)
    target = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.float64),
        "c": torch.zeros(3),
        "new": torch.full((2,), 7.0),
    }
    report = report_of(tmp_path, target, strict=False, cast=True)
    assert report.missing == ("new: missing; the checkpoint has no tensor for it",)
    assert report.unexpected == ("d: unexpected; the target has no place for it",)
    assert report.casts == (
        "b: dtype float64 in the target, int64 in the checkpoint",
        "c: dtype float32 in the target, bfloat16 in the checkpoint",
    )
    assert same(
        target, {"a": state["a"], "b": state["b"].double(), "c": state["c"].float(), "new": torch.full((2,), 7.0)}
    )
    assert report.num_tensors == 3
    assert report.verified


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("strict", "cast"), [(True, True), (False, False), (True, False)])
def test_each_freedom_is_its_own(strict: bool, cast: bool, verify: bool, tmp_path: Path) -> None:
    state = saved(tmp_path)
    other_dtype: Whole = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    other_dtype["a"] = torch.zeros(2, 3, dtype=torch.float16)
    fewer: Whole = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "d"}
    wrong_shape: Whole = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    wrong_shape["a"] = torch.zeros(2, 4)
    for target, allowed in ((other_dtype, cast), (fewer, not strict), (wrong_shape, False)):
        if allowed:
            checkpoint.load(tmp_path, target, strict=strict, cast=cast, verify=verify)
            assert same(target, {name: state[name].to(each.dtype) for name, each in target.items()})
        else:
            refusal(tmp_path, [target], [target], strict=strict, cast=cast, verify=verify)


def test_elements_that_are_in_no_piece_are_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an incomplete save would have them, which `save` never makes."""
    monkeypatch.setattr("shardwise.checkpoint.arrangement.check_cover", lambda pieces: [])
    monkeypatch.setattr("shardwise.checkpoint.inspection.check_cover", lambda pieces: [])
    piece = Piece(name="w", dtype="float32", global_shape=(4, 2), shape=(3, 2))
    state: Any = {piece: torch.ones(3, 2), "other": torch.ones(2)}
    checkpoint.save(tmp_path, state)
    target = {"w": torch.zeros(4, 2), "other": torch.zeros(2)}
    text = refusal(tmp_path, [target, target], [target])
    assert "w[0:4, 0:2]: 2 of 8 elements are in no piece of w that the checkpoint has; it is incomplete" in text
    rows = Piece(name="w", dtype="float32", global_shape=(4, 2), shape=(2, 2))
    part = torch.zeros(2, 2)
    checkpoint.load(tmp_path, {rows: part}, strict=False)
    assert torch.equal(part, torch.ones(2, 2))


def test_states_that_do_not_make_up_whole_tensors_are_not_saved(tmp_path: Path) -> None:
    def gap(rank: int) -> Mapping[Piece, torch.Tensor]:
        piece = Piece(name="w", dtype="float32", global_shape=(4,), offset=(2 * rank,), shape=(2 - rank,))
        return {piece: torch.ones(2 - rank)}

    def overlap(rank: int) -> Mapping[Piece, torch.Tensor]:
        return {Piece(name="w", dtype="float32", global_shape=(4,), offset=(rank,), shape=(3,)): torch.ones(3)}

    for held in (gap, overlap):
        errors: list[str] = []

        def run(channel: Channel, held: Any = held, errors: list[str] = errors) -> None:
            with pytest.raises(CheckpointError, match="the ranks together do not hold whole tensors: w") as caught:
                sw.save(tmp_path, held(channel.rank), channel=channel)
            errors.append(str(caught.value))

        sw.simulate(2, run)
        assert len(errors) == 2
        assert len(set(errors)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_larger_target_is_a_finding_of_shape(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(4, 3).state_dict())
    larger = nn.Linear(4, 5).state_dict()
    text = refusal(tmp_path, [larger], [larger], strict=False, cast=True)
    assert "weight: shape [5, 4] in the target, [3, 4] in the checkpoint" in text
    assert "bias: shape [5] in the target, [3] in the checkpoint" in text


class Pair(nn.Module):
    """Two layers that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        if tied:
            self.two.weight = self.one.weight


@pytest.mark.parametrize("source_is_object", [True, False])
@pytest.mark.parametrize("target_is_object", [True, False])
def test_ties_load_into_tied_and_untied_models(source_is_object: bool, target_is_object: bool, tmp_path: Path) -> None:
    def state_of(model: nn.Module, is_object: bool) -> Any:
        return TorchState(model) if is_object else model.state_dict()

    source = Pair(tied=True)
    checkpoint.save(tmp_path, state_of(source, source_is_object))
    assert list(checkpoint.open(tmp_path).tensors) == ["one.weight"]
    assert torch.equal(checkpoint.open(tmp_path).read("two.weight"), source.two.weight)
    for tied in (True, False):
        target = Pair(tied=tied)
        report = report_of(tmp_path, state_of(target, target_is_object))
        assert (report.missing, report.unexpected) == ((), ())
        assert torch.equal(target.one.weight, source.one.weight)
        assert torch.equal(target.two.weight, source.one.weight)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("target_is_object", [True, False])
def test_two_tensors_do_not_silently_become_one(target_is_object: bool, equal: bool, tmp_path: Path) -> None:
    """They do where they are equal to the bit; else the user decides."""
    source = Pair(tied=False)
    if equal:
        source.two.load_state_dict(source.one.state_dict())
    checkpoint.save(tmp_path, source.state_dict())
    target = Pair(tied=True)
    state = TorchState(target) if target_is_object else target.state_dict()
    if equal:
        assert report_of(tmp_path, state).unexpected == ()
    else:
        text = refusal(tmp_path, [state], [target.state_dict()])
        assert "two.weight: unexpected. The target ties it to one.weight, but in the checkpoint the two have" in text
    report = report_of(tmp_path, state, strict=False)
    assert len(report.unexpected) == 1
    assert torch.equal(target.two.weight, source.one.weight)


def test_an_alias_alone_is_found_under_the_name_that_was_saved(tmp_path: Path) -> None:
    source = Pair(tied=True)
    checkpoint.save(tmp_path, source.state_dict())
    target = {"two.weight": torch.zeros(3, 3)}
    assert report_of(tmp_path, target).unexpected == ()
    assert torch.equal(target["two.weight"], source.one.weight)


def test_ranks_that_tie_differently_are_refused(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        tensor = torch.ones(2)
        names = ["a", "b"] if channel.rank == 0 else ["b", "a"]
        with pytest.raises(sw.ShardwiseError, match="are one tensor on some ranks, but rank 0 has two"):
            sw.save(tmp_path, dict.fromkeys(names, tensor), channel=channel)
        apart = {"a": tensor, "b": tensor if channel.rank == 0 else torch.ones(2)}
        with pytest.raises(sw.ShardwiseError, match="b and a are one tensor on some ranks, but rank 1 has two"):
            sw.save(tmp_path, apart, channel=channel)

    sw.simulate(2, run)
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_memory_with_other_values_are_not_ties(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    checkpoint.save(tmp_path, {"a": values, "b": values.conj(), "c": values[:1], "d": values.imag})
    catalogue = checkpoint.open(tmp_path)
    for name, expected in {"a": values, "b": values.conj(), "c": values[:1], "d": values.imag}.items():
        assert torch.equal(catalogue.read(name), expected)
    assert not catalogue.contents.aliases


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_parameter_and_its_master_stand_for_each_other_by_dtype(kind: torch.dtype, tmp_path: Path) -> None:
    """The own name goes first; else the one with the wanted dtype; a cast takes the master."""
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "optimizer/w/master": torch.full((3,), 1.001, dtype=kind)}
    checkpoint.save(tmp_path, state)
    for name, dtype, expected in (
        ("w", torch.bfloat16, state["w"]),
        ("optimizer/w/master", kind, state["optimizer/w/master"]),
        ("w", kind, state["w"] if kind == torch.bfloat16 else state["optimizer/w/master"]),
        ("w", torch.float64, state["optimizer/w/master"].double()),
    ):
        target = {name: torch.zeros(3, dtype=dtype)}
        report = report_of(tmp_path, target, cast=True)
        assert report.unexpected == ()
        assert torch.equal(target[name], expected), (name, dtype)


class Named(nn.Module):
    """Layers of one shape, by the names that are asked for."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(2, 2)))

    def trained(self, frozen: str = "") -> torch.optim.Optimizer:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(2, 2)
        optimizer.step()
        return optimizer


def moments(model: Named, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The first moment of every trained parameter, by its name."""
    return {
        name: optimizer.state[parameter]["exp_avg"].clone()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


@pytest.mark.parametrize(
    ("names", "frozen", "found"),
    [
        ("xabc", "", ["x: missing", "trained here, but were frozen in the checkpoint: 'x'; freeze them"]),
        ("bc", "", ["a: unexpected"]),
        ("abc", "a", ["a"]),
        ("cab", "", []),
        ("abc", "", []),
    ],
    ids=["added", "removed", "frozen", "reordered", "alike"],
)
def test_optimizer_state_goes_by_name_and_is_never_shifted(
    names: str, frozen: str, found: list[str], tmp_path: Path
) -> None:
    source = Named("abc")
    optimizer = source.trained()
    checkpoint.save(tmp_path, TorchState(source, optimizer))
    expected = moments(source, optimizer)
    target = Named(names)
    trained = target.trained(frozen)
    before = moments(target, trained)
    state = TorchState(target, trained)
    if found:
        text = refusal(tmp_path, [state], [target.state_dict()])
        for each in found:
            assert each in text
        assert same(moments(target, trained), before)
        report = report_of(tmp_path, state, strict=False)
        assert report.missing or report.unexpected
    else:
        checkpoint.load(tmp_path, state)
    for name, moment in moments(target, trained).items():
        if name in expected:
            assert torch.equal(moment, expected[name]), name
            assert torch.equal(target.get_parameter(name), source.get_parameter(name))


def test_settings_that_do_not_fit_are_findings_beside_the_others(tmp_path: Path) -> None:
    source = Named("ab")
    checkpoint.save(tmp_path, TorchState(source, source.trained()))
    target = Named("abc")
    target.trained()
    other = torch.optim.SGD(target.parameters(), lr=0.1, momentum=0.9)
    text = refusal(tmp_path, [TorchState(target, other)], [target.state_dict()])
    assert "c: missing" in text
    assert "AdamW" in text
    assert "SGD" in text


@pytest.mark.parametrize("verify", [True, False])
def test_several_ranks_that_want_different_things_have_one_verdict(verify: bool, tmp_path: Path) -> None:
    """What no rank wants is unexpected; what one wants is not."""
    checkpoint.save(tmp_path, {"a": torch.arange(4), "b": torch.arange(3), "c": torch.arange(2)})
    states = [{"a": torch.zeros(4, dtype=torch.int64)}, {"b": torch.zeros(3, dtype=torch.int64)}]
    text = refusal(tmp_path, states, states, verify=verify)
    assert "c: unexpected" in text
    assert "a: unexpected" not in text

    def run(channel: Channel) -> tuple[str, ...]:
        return sw.load(tmp_path, states[channel.rank], strict=False, verify=verify, channel=channel).report.unexpected

    assert sw.simulate(2, run) == [("c: unexpected; the target has no place for it",)] * 2
    assert torch.equal(states[0]["a"], torch.arange(4))
    assert torch.equal(states[1]["b"], torch.arange(3))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (nn.Linear(1, 1), "the target is a module; give its tensors"),
        ([torch.ones(1)], "the target is a list; give tensors by name or by Piece"),
        ({"a": 1.5}, "'a' is a float, not a tensor; JSON values go into extra"),
        ({3: torch.ones(1)}, "key 3 is a int; tensors are named by a string or a Piece"),
        ({"a": torch.ones(1).to_sparse()}, "'a' has layout torch.sparse_coo; dense"),
        ({"a": torch.ones(1, device="meta")}, "'a' is on the meta device and has no values"),
    ],
)
def test_targets_that_are_no_state_are_refused_on_all_ranks(state: Any, said: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(1)})
    good = {"a": torch.zeros(1)}
    assert said in refusal(tmp_path, [good, state, good], [good])


def test_arguments_that_only_one_rank_gives_wrong_refuse_on_all(tmp_path: Path) -> None:
    def run(channel: Channel) -> str:
        extra: dict[str, Any] = {"at": torch.ones(1)} if channel.rank else {"at": 1}
        with pytest.raises(CheckpointError) as caught:
            sw.save(tmp_path, {"a": torch.ones(1)}, extra=extra, channel=channel)
        return str(caught.value)

    one, other = sw.simulate(2, run)
    assert one == other == "rank 1: extra['at'] is a Tensor, which JSON cannot hold; save tensors as part of the state"
    assert list(tmp_path.iterdir()) == []
