"""Full tensors out of what ranks hold: the right ones, in the model's order, on all ranks or one, in bounded memory."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, MismatchError, RewriteError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import Cut
from tests.checkpoint.fused_models import FUSING, LAYOUTS, Apart, engine_of, fused, model_of, plan_of, train, wholes
from tests.checkpoint.rewritten_tensors import CASES, shares_of
from tests.checkpoint.small_states import same, same_tensor

Full = list[tuple[str, torch.Tensor]]


def full_of_engine(layout: str, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[Full]]:
    """The whole state of a trained engine, and its full tensors as each rank gets them."""
    plan = plan_of(Apart, **LAYOUTS[layout])

    def run(channel: Channel) -> tuple[dict[Piece, torch.Tensor], Full]:
        engine = engine_of(Apart, plan, channel)
        train(engine, channel, range(2))
        return engine.state(), list(sw.full(engine, channel=channel, **arguments))

    results = sw.simulate(plan.mesh.size, run)
    return wholes(state for state, _ in results), [full for _, full in results]


def model_only(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("optimizer/")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_gives_what_the_plain_model_has_in_its_order(layout: str) -> None:
    state, by_rank = full_of_engine(layout)
    expected = model_only(state) | {"head.weight": state["embedding.weight"]}
    for full in by_rank:
        assert [name for name, _ in full] == list(model_of(Apart).state_dict())
        assert same(dict(full), expected)
    model_of(Apart).load_state_dict(dict(by_rank[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_a_rewrite_an_engine_gives_what_plain_torch_makes_of_it(layout: str) -> None:
    state, by_rank = full_of_engine(layout, rewrite=sw.Rewrite(FUSING))
    expected = fused(model_only(state))
    expected["logits.weight"] = expected["words.weight"]
    for full in by_rank:
        assert same(dict(full), {name: tensor.contiguous() for name, tensor in expected.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_state_comes_when_it_is_asked_for(layout: str) -> None:
    state, by_rank = full_of_engine(layout, rewrite=sw.Rewrite(FUSING), optimizer=True, to=0)
    expected = fused(state)
    expected["logits.weight"] = expected["words.weight"]
    assert same(dict(by_rank[0]), {name: tensor.contiguous() for name, tensor in expected.items()})
    assert all(full == [] for full in by_rank[1:])


@pytest.mark.parametrize("to", [0, 1, 2, "all"])
@pytest.mark.parametrize("how", ["rows", "columns", "runs"])
@pytest.mark.parametrize("name", CASES)
def test_every_form_of_any_pieces(name: str, how: Cut, to: Any) -> None:
    case = CASES[name]
    shares = shares_of(case.values(), how, 3)

    def run(channel: Channel) -> Full:
        return list(sw.full(shares[channel.rank], sw.Rewrite(case.text), to=to, channel=channel))

    expected = {name: tensor.contiguous() for name, tensor in case.plain(case.values()).items()}
    for rank, full in enumerate(sw.simulate(3, run)):
        assert same(dict(full), expected if to in ("all", rank) else {})


def test_plain_models_and_states_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(Apart)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for state in (TorchState(model, optimizer), model.state_dict()):
        full = list(sw.full(state))
        assert [name for name, _ in full] == list(model.state_dict())
        assert same(dict(full), dict(model.state_dict()))
        full[0][1].zero_()  # it is the caller's own
        assert model.get_parameter("embedding.weight").abs().sum() > 0
    assert list(sw.full({})) == []


def test_tensors_are_given_one_after_the_other_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones together; a large one comes in several windows."""
    monkeypatch.setattr("shardwise.checkpoint.full_tensors.WINDOW_BYTES", 4096)
    monkeypatch.setattr("shardwise.checkpoint.windows.WINDOW_BYTES", 4096)
    whole = {f"small.{at}": torch.randn(100) for at in range(30)} | {"large": torch.randn(70, 60)}
    shares = shares_of(whole, "runs", 3)

    def run(channel: Channel) -> int:
        alive: list[weakref.ref[torch.Tensor]] = []
        most = 0
        for name, tensor in sw.full(shares[channel.rank], channel=channel):
            assert same_tensor(tensor, whole[name])
            alive = [each for each in alive if each() is not None]
            most = max(most, sum(each.nbytes for ref in alive if (each := ref()) is not None))
            alive.append(weakref.ref(tensor))
        return most

    assert max(sw.simulate(3, run)) <= 400  # the one before, which the loop's own variable keeps


def test_names_alone_come_in_the_order_that_is_asked_for() -> None:
    whole = {name: torch.randn(3, 4) for name in "abc"}
    shares = shares_of(whole, "runs", 3)

    def run(channel: Channel) -> Full:
        return list(sw.full(shares[channel.rank], channel=channel, to=1, names=["c", "a"]))

    others, found, _ = sw.simulate(3, run)
    assert others == []
    assert [name for name, _ in found] == ["c", "a"]
    assert same(dict(found), {name: whole[name] for name in "ca"})


def stopping(channel: Channel, at: Mapping[int, int]) -> int:
    """Take full tensors, and stop after so many on some ranks."""
    whole = {
        f"t.{number}": torch.randn(2 << 20, generator=torch.Generator().manual_seed(number)) for number in range(4)
    }
    seen = 0
    for _ in sw.full(shares_of(whole, "runs", channel.size)[channel.rank], channel=channel):
        seen += 1
        if seen == at.get(channel.rank):
            break
    channel.exchange(b"", purpose="what comes next")  # all are still in step
    return seen


@pytest.mark.parametrize("number", [1, 3, 4])
def test_ranks_that_stop_at_the_same_tensor_go_on_together(number: int) -> None:
    assert sw.simulate(3, lambda channel: stopping(channel, dict.fromkeys(range(3), number))) == [number] * 3


def test_a_rank_that_stops_early_makes_the_others_raise_an_error() -> None:
    def run(channel: Channel) -> str:
        if channel.rank == 1:
            return str(stopping(channel, {1: 2}))
        with pytest.raises(CheckpointError) as caught:
            stopping(channel, {})
        channel.exchange(b"", purpose="what comes next")
        return str(caught.value)

    zero, one, two = sw.simulate(3, run)
    assert one == "2"
    assert zero == two
    assert zero.startswith("rank 1 stopped taking full tensors before the last one, and this rank goes on")


def test_nothing_happens_before_the_first_is_asked_for(tmp_path: Any) -> None:
    iterators: list[Iterator[Any]] = []
    iterators.append(sw.full([1]))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the state is a list"):
        next(iterators[0])
    sw.full({"a": torch.ones(1)}, to=3).close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"to": 2}, CheckpointError, 'to is 2; give "all", or one of the ranks 0 to 1'),
        ({"to": "one"}, CheckpointError, "to is 'one'; give"),
        ({"to": True}, CheckpointError, "to is True; give"),
        ({"names": ["a", "c"]}, CheckpointError, "names has 'c', which the ranks do not hold; they hold 1"),
        ({"optimizer": "x"}, CheckpointError, "optimizer is 'x'; give True or False"),
        ({"rewrite": "a -> b"}, CheckpointError, "rewrite is a str; give sw.Rewrite(text)"),
        ({"rewrite": sw.Rewrite("c -> b")}, RewriteError, "there is no tensor c"),
        ({"rewrite": sw.Rewrite("_ -> b")}, RewriteError, "b: the rewrite adds a tensor that keeps its current value"),
    ],
)
def test_what_cannot_be_given_is_refused_on_all_ranks_alike(
    arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    def run(channel: Channel) -> str:
        with pytest.raises(kind) as caught:
            list(sw.full({"a": torch.ones(1)}, channel=channel, **arguments))
        return str(caught.value)

    one, other = sw.simulate(2, run)
    assert one == other
    assert said in one


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def run(channel: Channel) -> None:
        with pytest.raises(MismatchError, match="rank 1 asks for full tensors with rewrite=None, to=0, optimizer=True"):
            list(sw.full({"a": torch.ones(1)}, channel=channel, to=0, optimizer=channel.rank == 1))

    sw.simulate(2, run)


def test_ranks_that_do_not_hold_whole_tensors_are_told() -> None:
    def run(channel: Channel) -> str:
        piece = Piece(name="w", dtype="float32", global_shape=(4,), offset=(channel.rank,), shape=(1,))
        with pytest.raises(CheckpointError) as caught:
            list(sw.full({piece: torch.ones(1)}, channel=channel))
        return str(caught.value)

    assert set(sw.simulate(2, run)) == {
        "the ranks together do not hold whole tensors: w: 2 of 4 elements are held by no piece, first (2,)"
    }


class _Planned:
    """Rows of a fused tensor, of which an engine's plan tells that tensor parallelism cuts them."""

    def __init__(self, whole: torch.Tensor, rank: int) -> None:
        rows = whole.shape[0] // 2
        piece = Piece(
            name="gu", dtype="float32", global_shape=tuple(whole.shape), offset=(rank * rows, 0), shape=(rows, 2)
        )
        self._held = {piece: whole[rank * rows : (rank + 1) * rows].clone()}

    def state(self) -> dict[Piece, torch.Tensor]:
        return self._held

    def settings(self) -> dict[str, Any]:
        return {"plan": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"gu": "column"})).text()}


@pytest.mark.parametrize("optimizer", [False, True])
def test_the_degree_of_a_planned_layout_is_known_with_and_without_the_state_of_optimizers(optimizer: bool) -> None:
    whole = torch.arange(16.0).view(8, 2)

    def run(channel: Channel) -> dict[str, torch.Tensor]:
        state = _Planned(whole, channel.rank)
        return dict(sw.full(state, sw.Rewrite("gu -> g, u, fused_ffn, axis=0"), channel=channel, optimizer=optimizer))

    for found in sw.simulate(2, run):
        assert torch.equal(found["g"], whole[[0, 1, 4, 5]])
        assert torch.equal(found["u"], whole[[2, 3, 6, 7]])
