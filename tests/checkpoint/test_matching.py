"""What does not fit is told at once, alike on all ranks, before anything is written; what is let pass is reported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LoadReport, TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import save_pieces
from tests.checkpoint.rewritten_tensors import shares_of
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import Whole, same
from tests.checkpoint.stored_values import save_dcp
from tests.covering import covering
from tests.engine.refusals import same_error_everywhere
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def alike(path: Path, states: list[Any], **arguments: Any) -> None:
    """A load by as many ranks as there are states. The error is that of all ranks, and no tensor has changed."""
    held = [each for state in states if isinstance(state, dict) for each in state.values()]
    plain = [each for each in held if isinstance(each, torch.Tensor) and not (each.is_sparse or each.is_meta)]
    before = [each.clone() for each in plain]
    error = same_error_everywhere(
        len(states), lambda channel: sw.load(path, states[channel.rank], channel=channel, **arguments)
    )
    assert all(torch.equal(each, old) for each, old in zip(plain, before, strict=True))
    raise error


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


@pytest.mark.parametrize(("strict", "cast", "verify"), [(True, True, True), (False, False, True), (True, False, False)])
def test_each_freedom_is_its_own(strict: bool, cast: bool, verify: bool, tmp_path: Path) -> None:
    state = saved(tmp_path)
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for target, allowed in (
        ({**blank, "a": torch.zeros(2, 3, dtype=torch.float16)}, cast),
        ({name: each for name, each in blank.items() if name != "d"}, not strict),
        ({**blank, "a": torch.zeros(2, 4)}, False),
    ):
        if not allowed:
            with pytest.raises(CheckpointError):
                alike(tmp_path, [target], strict=strict, cast=cast, verify=verify)
            continue
        checkpoint.load(tmp_path, target, strict=strict, cast=cast, verify=verify)
        assert same(target, {name: state[name].to(each.dtype) for name, each in target.items()})


class Tied(nn.Module):
    """Three names of one parameter, or of three."""

    def __init__(self, seed: int, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(31, 10)
        self.out = nn.Linear(10, 31, bias=False)
        self.third = nn.Linear(10, 31)
        if tied:
            self.out.weight = self.third.weight = self.embed.weight


@pytest.mark.parametrize("source_is_object", [True, False])
@pytest.mark.parametrize("target_is_object", [True, False])
def test_ties_load_into_tied_and_untied_models(source_is_object: bool, target_is_object: bool, tmp_path: Path) -> None:
    def state_of(model: nn.Module, is_object: bool) -> Any:
        return TorchState(model) if is_object else model.state_dict()

    source = Tied(0)
    checkpoint.save(tmp_path, state_of(source, source_is_object))
    assert list(checkpoint.open(tmp_path).tensors) == ["embed.weight", "third.bias"]
    assert torch.equal(checkpoint.open(tmp_path).read("out.weight"), source.out.weight)
    for tied in (True, False):
        target = Tied(9, tied=tied)
        report = report_of(tmp_path, state_of(target, target_is_object))
        assert (report.missing, report.unexpected) == ((), ())
        assert same(target.state_dict(), source.state_dict())


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
        with pytest.raises(CheckpointError) as caught:
            alike(tmp_path, [state])
        assert all(each in str(caught.value) for each in found)
        assert same(moments(target, trained), before)
        report = report_of(tmp_path, state, strict=False)
        assert report.missing or report.unexpected
    else:
        checkpoint.load(tmp_path, state)
    for name, moment in moments(target, trained).items():
        if name in expected:
            assert torch.equal(moment, expected[name]), name
            assert torch.equal(target.get_parameter(name), source.get_parameter(name))


def seven(rank: int) -> dict[str, torch.Tensor]:
    tensors = {
        "a": torch.full((3, 2), 7.0),
        "b": torch.full((4,), 7, dtype=torch.int32),
        "new": torch.full((2,), 7.0),
        "c": torch.full((3,), 7.0).bfloat16(),
    }
    return {**tensors, "only here": torch.full((1,), 7.0)} if rank == 1 else tensors


def loading(*states: Any, of: Any = None, **arguments: Any) -> Any:
    """A load by as many ranks as there are states, of a save of `of`."""

    def call(folder: Path) -> None:
        if of is None:
            saved(folder)
        else:
            checkpoint.save(folder, of)
        alike(folder, list(states), **arguments)

    return call


def saving(held: Any, **arguments: Any) -> Any:
    """A save by two ranks; `held` and the arguments: what each rank has of them."""

    def call(folder: Path) -> None:
        def run(channel: Channel) -> None:
            given = {key: each(channel.rank) for key, each in arguments.items()}
            sw.save(folder, held(channel.rank), channel=channel, **given)

        error = same_error_everywhere(2, run)
        assert list(folder.iterdir()) == []
        raise error

    return call


def trained_pair() -> tuple[Any, Any]:
    source, target = Named("ab"), Named("abc")
    target.trained()
    return TorchState(source, source.trained()), TorchState(target, torch.optim.SGD(target.parameters(), momentum=0.9))


def piece_of(offset: int, size: int) -> dict[Piece, torch.Tensor]:
    piece = Piece(name="w", dtype="float32", global_shape=(4,), offset=(offset,), shape=(size,))
    return {piece: torch.ones(size)}


ONE = torch.ones(2)
ADAM, SGD = trained_pair()
GOOD: Any = {"a": torch.zeros(1)}
ODD: dict[str, Any] = {
    "a module": torch.nn.Linear(1, 1),
    "a list": [torch.ones(1)],
    "a number": {"a": 1.5},
    "a number as a name": {3: torch.ones(1)},
    "a sparse tensor": {"a": torch.ones(1).to_sparse()},
    "a tensor on meta": {"a": torch.ones(1, device="meta")},
}
REFUSED = Refusals(
    "checkpoint.matching",
    {
        "all findings of all ranks": loading(*map(seven, range(3))),
        "a larger target": loading(
            torch.nn.Linear(4, 5).state_dict(), of=torch.nn.Linear(4, 3).state_dict(), strict=False, cast=True
        ),
        "what one rank does not want": loading(
            {"a": torch.zeros(4)},
            {"b": torch.zeros(3)},
            of={each: torch.zeros(4 if each == "a" else 3) for each in "abc"},
        ),
        "settings beside tensors": loading(SGD, of=ADAM),
        **{f"a target that is {kind}": loading(GOOD, odd, GOOD, of={"a": torch.ones(1)}) for kind, odd in ODD.items()},
        "a gap between the ranks": saving(lambda rank: piece_of(2 * rank, 2 - rank)),
        "elements that two ranks have": saving(lambda rank: piece_of(rank, 3)),
        "ranks that tie under other names": saving(
            lambda rank: dict.fromkeys(["a", "b"] if rank == 0 else ["b", "a"], ONE)
        ),
        "ranks that tie and do not": saving(lambda rank: {"a": ONE, "b": ONE if rank == 0 else torch.ones(2)}),
        "extra of one rank": saving(
            lambda rank: {"a": torch.ones(1)}, extra=lambda rank: {"at": torch.ones(1) if rank else 1}
        ),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_alike_on_all_ranks(case: str) -> None:
    REFUSED.check(case)


# Tied models load what writers saved under each name of a tensor, if all copies are equal to the bit


def apart(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in Tied(seed).state_dict().items()}


def put(folder: Path, kind: str, state: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint by a writer that does not look for ties."""
    folder = folder / kind
    if kind == "dcp":
        save_dcp(folder, state)
    elif kind == "safetensors":
        folder.mkdir()
        safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    elif kind == "ours":
        sw.save(folder, dict(state))
    else:
        save_pieces(folder, shares_of(state, "rows", 3))
    return folder


KINDS = ["dcp", "safetensors", "ours", "ours by three"]


def load(path: Path, size: int, **options: object) -> tuple[list[Tied], list[str]]:
    models = [Tied(9) for _ in range(size)]
    errors: list[str] = []

    def run(channel: Channel) -> None:
        model = models[channel.rank]
        state = TorchState(model) if channel.size == 3 else model.state_dict()
        try:
            sw.load(path, state, channel=channel, **options)  # type: ignore[arg-type]
        except ShardwiseError as error:
            errors.append(str(error))

    sw.simulate(size, run)
    assert len(errors) in (0, size)
    return models, errors


PLACES = [None, (0, 0), (17, 3), (30, 9)]
"""Where copies differ, if they do; several windows, which ranks share, have them."""


@pytest.mark.parametrize(("kind", "size", "at"), covering(KINDS, (1, 2, 3), PLACES, strength=2))
def test_equal_copies_load_into_one_parameter_and_one_element_refuses_on_all_ranks_with_two_ways_out(
    kind: str, size: int, at: tuple[int, int] | None, tmp_path: Path
) -> None:
    state = apart()
    state["out.weight"][0, 0] = state["embed.weight"][0, 0] = state["third.weight"][0, 0] = 0.0
    if at is not None:
        state["out.weight"][at] = -0.0 if at == (0, 0) else 7.0  # -0.0 differs by its bits alone
    path = put(tmp_path, kind, state)
    with small_limits(512):
        models, errors = load(path, size)
    if at is None:
        assert not errors
        assert all(same(dict(model.state_dict()), state) for model in models)
        return
    untouched = Tied(9).state_dict()
    assert len(errors) == size
    assert len(set(errors)) == 1
    assert "out.weight: unexpected. The target ties it to embed.weight, but in the checkpoint the two have" in errors[0]
    assert 'strict=False, or drop it with a rewrite, sw.Rewrite("out.weight -> _")' in errors[0]
    assert "third" not in errors[0]
    assert all(torch.equal(each, untouched[name]) for model in models for name, each in model.state_dict().items())
    for options in ({"strict": False}, {"rewrite": sw.Rewrite("out.weight -> _")}):
        models, errors = load(path, size, **options)
        assert not errors
        assert all(torch.equal(model.embed.weight, state["embed.weight"]) for model in models)


def test_ranks_share_the_comparison_of_many_small_copies(tmp_path: Path) -> None:
    names = [f"{name}.{at}" for at in range(8) for name in ("a", "b")]
    path = put(tmp_path, "safetensors", {name: torch.ones(25) for name in names})
    read = [0, 0]

    def run(channel: Channel) -> None:
        tied = [torch.zeros(25) for _ in range(8)]
        target = {name: tied[int(name[2:])] for name in names}
        read[channel.rank] = sw.load(path, target, channel=channel).report.read_bytes
        assert all(each.eq(1).all() for each in tied)

    sw.simulate(2, run)
    wanted, pair = 8 * 25 * 4, 2 * 25 * 4
    assert sum(read) == wanted + 8 * pair
    assert min(read) >= 4 * pair


@pytest.mark.parametrize("cut", [torch.zeros(31, 9), torch.zeros(31, 10, dtype=torch.float64)])
def test_copies_of_other_shapes_or_dtypes_are_refused(cut: torch.Tensor, tmp_path: Path) -> None:
    path = put(tmp_path, "safetensors", {**apart(), "out.weight": cut})
    _, [error] = load(path, 1)
    assert "out.weight: unexpected" in error
    assert "the two are of different shapes or dtypes. Ignore it with strict=False" in error


@pytest.mark.parametrize("equal", [True, False])
def test_copies_are_compared_as_a_rewrite_makes_them(equal: bool, tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in apart().items()}
    state["model.out.weight"] = state["model.out.weight"].T.contiguous()
    if not equal:
        state["model.out.weight"][9, 30] += 1
    path = put(tmp_path, "dcp", state)
    others = [f"model.{name} -> {name}" for name in apart() if name != "out.weight"]
    rewrite = sw.Rewrite("\n".join(["model.out.weight^T -> out.weight", *others]))
    models, errors = load(path, 2, rewrite=rewrite)
    assert bool(errors) == (not equal)
    if equal:
        assert all(torch.equal(model.embed.weight, apart()["embed.weight"]) for model in models)
    else:
        assert "the two have different values" in errors[0]


def test_copies_with_equal_checksums_are_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, "ours", apart())
    target = Tied(9).state_dict()
    report = sw.load(path, target).report
    assert report.read_bytes == 31 * 10 * 4 + 31 * 4
