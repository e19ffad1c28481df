"""Which gradients are summed along tp is read from the graph, also where it is cut into stages, or refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError
from tests.engine.formed import formed, linear, one_after_another
from tests.engine.tensor.cut_models import Rules, assert_cut_is_right, compute
from tests.oracle.batches import NUM_WORDS, word_batch, word_loss
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import Program, plan_of, seeded
from tests.refusals import Refusals

WORDS: dict[str, Any] = {"embedding": partial(nn.Embedding, NUM_WORDS, 4), "head": linear(4, NUM_WORDS)}
NORM, HEAD_NORM = partial(nn.LayerNorm, 4), partial(nn.LayerNorm, 2)


def heads(net: Any, x: torch.Tensor) -> Any:
    """Two heads, and a norm that they share."""
    made = net.head_norm(net.q(net.norm(x)).unflatten(-1, (-1, 2)))
    return x + net.o(torch.tanh(made).flatten(-2))


HEADS = formed(heads, norm=NORM, q=linear(4, 4), head_norm=HEAD_NORM, o=linear(4, 4))


def two_layers(net: Any, words: torch.Tensor) -> Any:
    """Each on a stage."""
    return net.head(net.norm(one_after_another(net.layers, net.embedding(words))))


def layered(way: Callable[..., Any] = two_layers, *prepare: Any, **parts: Any) -> type[nn.Module]:
    layers = lambda: nn.ModuleList([HEADS(), HEADS()])  # noqa: E731
    return formed(way, *prepare, **WORDS, layers=layers, norm=NORM, **parts)


def tie_norms(net: Any) -> None:
    """Both layers have one norm of heads."""
    for name in ("weight", "bias"):
        setattr(net.layers[1].head_norm, name, getattr(net.layers[0].head_norm, name))


def apart(net: Any, words: torch.Tensor) -> Any:
    """What is made of heads crosses to another stage, where they are put together: its gradient comes back own."""
    x = net.norm(net.embedding(words))
    made = net.head_norm(net.q(x).unflatten(-1, (-1, 2)))
    return net.head(x + net.o(torch.tanh(net.last_norm(made)).flatten(-2)))


def both(net: Any, words: torch.Tensor) -> Any:
    """What the first stage gives is read by all ranks, and by each rank for its own outputs of `q`."""
    x = net.embedding(words)
    return net.head(x + net.o(net.q(x) * x[..., :2]))


def twice(net: Any, words: torch.Tensor) -> Any:
    """One weight is that of a norm of heads on the first stage, and scales what all ranks have on the second."""
    return net.scale(two_layers(net, words)[..., :2])


PAIR = {"q": linear(4, 4), "o": linear(4, 4)}
APART = formed(apart, **WORDS, **PAIR, norm=NORM, head_norm=HEAD_NORM, last_norm=HEAD_NORM)
TWICE = layered(twice, lambda net: setattr(net.scale, "weight", net.layers[0].head_norm.weight), scale=HEAD_NORM)
RULES = {"layers.*.q": "column(unit=2)", "layers.*.o": "row(unit=2)"}
RULES_APART = {"q": "column(unit=2)", "o": "row(unit=2)"}
STAGES = {"embedding": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
FOUR = {"embedding": 0, "layers.0": 1, "layers.1": 2, "norm": 3, "head": 3}
IN_A_ROW = ["embedding", "norm", "q", "head_norm", "last_norm", "o", "head"]


def program(make: type[nn.Module], rules: Rules, stages: dict[str, int]) -> Program:
    batches = [word_batch(seed, 4) for seed in range(2)]
    size = 1 + max(stages.values())
    return Program(make=seeded(make), batches=batches, stages=stages, num_stages=size, rules=rules, loss=word_loss)


NET, TIED = program(layered(), RULES, STAGES), program(layered(two_layers, tie_norms), RULES, FOUR)
PLANS: dict[str, tuple[Program, dict[str, Any]]] = {
    "one stage": (NET, {"mesh": "tp=2", "k": 2}),
    "two stages": (NET, {"mesh": "pp=2,tp=2", "k": 2}),
    "a tie on one stage": (TIED, {"mesh": "tp=2", "k": 2}),
    "a tie of two stages": (TIED, {"mesh": "pp=2,tp=2"}),
    "a tie of stages of a rank": (TIED, {"mesh": "pp=2,tp=2", "k": 2, "schedule": "interleaved"}),
    **{
        f"cut at {name}": (
            program(APART, RULES_APART, {each: int(each in IN_A_ROW[at:]) for each in IN_A_ROW}),
            {"mesh": "pp=2,tp=2"},
        )
        for at, name in enumerate(IN_A_ROW[2:6], start=2)
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_norms_of_heads_are_summed_wherever_the_graph_is_cut(name: str) -> None:
    case, settings = PLANS[name]
    assert_trains_like_one_process(case, plan_of(case, **settings))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_gradients_are_told_through_compiled_modules() -> None:
    def run(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(word_batch(0, 2)["words"]).square()
        return out

    compiled = layered(two_layers, lambda net: net.layers[0].compile(backend="aot_eager"))
    assert_cut_is_right(compiled, RULES, run)


# -- what a module gives whole is read by all ranks alike, what it leaves cut by each for itself


def gated(net: Any, x: torch.Tensor, *, is_read_twice: bool = False) -> Any:
    """A whole value scales what each rank has of the hidden ones; nothing but `gate` makes it."""
    scale = net.inner(torch.tanh(net.gate(x)))
    out = net.down(torch.tanh(net.up(x)) * scale[..., :1])
    return out + scale if is_read_twice else out


def read_twice(net: Any, x: torch.Tensor) -> Any:
    return gated(net, x, is_read_twice=True)


def in_a_row(net: Any, x: torch.Tensor) -> Any:
    return net.down(torch.tanh(net.up(net.inner(net.gate(x)))))


GATES = {
    **{"gate": linear(4, 6, bias=False), "inner": linear(6, 4, bias=False)},
    **{"up": linear(4, 8, bias=False), "down": linear(8, 4, bias=False)},
}
GATED, READ_TWICE = formed(gated, **GATES), formed(read_twice, **GATES)
NORMED = formed(lambda net, x: net.down(torch.tanh(net.up(net.norm(x)))), norm=NORM, up=linear(4, 8), down=linear(8, 4))
CUT = {"up": "column", "down": "row"}


def run(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return out.square()


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (GATED, CUT),
        (NORMED, {**CUT, "norm": "sequence"}),
        (NORMED, {"norm": "split", "up": "column(gather=1)", "down": "row"}),
    ],
)
def test_what_is_read_as_it_is_given_is_right(make: type[nn.Module], rules: Rules) -> None:
    assert_cut_is_right(make, rules, run)


def misread(make: type[nn.Module], **rules: str) -> Callable[[], object]:
    return lambda: compute(make, run, 2, {**CUT, **rules})


def in_step(make: type[nn.Module], rules: Rules, stages: dict[str, int], batch: Any) -> Callable[[], object]:
    """On two stages."""
    case = Program(
        make=seeded(make),
        batches=[],
        stages=stages,
        num_stages=2,
        rules=rules,
        loss=lambda output, _: output.square().mean(),
    )

    return lambda: sw.simulate(4, lambda channel: case.engine(plan_of(case, "pp=2,tp=2"), channel).step(batch))


REFUSED = Refusals(
    "engine.misread_values",
    {
        # No whole parameter is left that could show it.
        "whole, by rows": misread(GATED, gate="column", inner="row"),
        "whole, by rows, and read twice": misread(READ_TWICE, gate="column", inner="row"),
        "whole, by a sequence": misread(GATED, inner="sequence"),
        "whole, by rows that are given": misread(GATED, inner="rowwise_rep"),
        "whole, by columns that are gathered": misread(GATED, inner="colwise_rep"),
        "whole, beside columns": misread(READ_TWICE),
        # Positions of one rank meet those of others in the sum of `down`, whose output is the same on all ranks.
        "a part, by a split": misread(NORMED, norm="split"),
        "a part, by rows": misread(formed(in_a_row, **GATES), gate="column", inner="row(scatter=1)"),
        "on another stage": in_step(
            GATED,
            {**CUT, "gate": "column", "inner": "row"},
            {"gate": 0, "inner": 0, "up": 1, "down": 1},
            {"x": torch.ones(2, 6, 4)},
        ),
        "in two ways on another stage": in_step(
            formed(both, **WORDS, **PAIR),
            RULES_APART,
            {"embedding": 0, "q": 1, "o": 1, "head": 1},
            word_batch(0, 4),
        ),
        "a weight in two ways": in_step(TWICE, RULES, {**STAGES, "scale": 1}, word_batch(0, 4)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_sum_makes_right_is_refused(case: str) -> None:
    REFUSED.check(case)


# -- losses that differ between ranks


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("rules", "factor"),
    [({"2": "column"}, 1.0), ({"0": "column", "2": "row"}, 1 + 2**-22)],
    ids=["parts that are taken for the whole", "last bits"],
)
def test_a_loss_that_differs_between_ranks_is_refused_on_all_before_an_update(
    rules: Rules, factor: float, call: str
) -> None:
    """factor: times the loss of the last rank."""

    def train(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
            sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=rules)),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss=lambda output, batch: output.square().mean() * (factor if channel.rank == 1 else 1.0),
            channel=channel,
        )
        held = {piece: tensor.clone() for piece, tensor in engine.state().items()}
        with pytest.raises(
            MismatchError, match=r"rank 0 and rank 1 are peers along tp .* tensor\.rules: .* sw\.verify"
        ):
            getattr(engine, call)({"x": torch.arange(8.0).view(2, 4)})
        assert all(torch.equal(tensor, held[piece]) for piece, tensor in engine.state().items())

    sw.simulate(2, train)
