"""What a module gives whole is read by all ranks alike, what it leaves cut by each for itself, or it is refused."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.pipeline.oracle import adamw
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole


class Gated(nn.Module):
    """A whole value scales what each rank has of the hidden ones; nothing but `gate` makes it."""

    def __init__(self, *, is_read_twice: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6, bias=False)
        self.inner = nn.Linear(6, 4, bias=False)
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)
        self.is_read_twice = is_read_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.inner(torch.tanh(self.gate(x)))
        out: torch.Tensor = self.down(torch.tanh(self.up(x)) * scale[..., :1])
        return out + scale if self.is_read_twice else out


class Normed(nn.Module):
    """A norm before what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def run(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return out.square()


CUT = {"up": "column", "down": "row"}
WHOLE = "what '{}' gives is whole along tp, and {}each rank reads it for its own part"


def read_twice() -> nn.Module:
    return Gated(is_read_twice=True)


@pytest.mark.parametrize(
    ("make", "rules", "said"),
    [
        # No whole parameter is left that could show it.
        (Gated, {**CUT, "gate": "column", "inner": "row"}, WHOLE.format("inner", "")),
        (read_twice, {**CUT, "gate": "column", "inner": "row"}, WHOLE.format("inner", "also ")),
        (Gated, {**CUT, "inner": "sequence"}, WHOLE.format("inner", "")),
        (Gated, {**CUT, "inner": "rowwise_rep"}, WHOLE.format("inner", "")),
        (Gated, {**CUT, "inner": "colwise_rep"}, WHOLE.format("inner", "")),
        # Positions of one rank meet those of others in the sum of `down`, whose output is the same on all ranks.
        (Normed, {**CUT, "norm": "split"}, "what 'norm' takes is this rank's part along tp, and is read as if it were"),
        (Gated, {**CUT, "gate": "column", "inner": "row(scatter=1)"}, "what 'inner' leaves is this rank's part"),
    ],
)
def test_what_is_read_in_another_way_is_refused(
    make: Callable[[], nn.Module], rules: Mapping[str, str], said: str
) -> None:
    def run_parts(model: nn.Module) -> torch.Tensor:
        if rules.get("inner") != "row(scatter=1)":
            return run(model)
        x = torch.ones(2, 6, 4, dtype=torch.float64)
        out: torch.Tensor = model.down(torch.tanh(model.up(model.inner(model.gate(x)))))  # type: ignore[operator]
        return out

    with pytest.raises(ModelError) as caught:
        compute_cut(make, rules, 2, run_parts, is_completed=True)
    assert said in str(caught.value)
    if said.startswith("what 'inner' gives"):
        assert "before 'down' brings them together" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (Gated, CUT),
        (Normed, {**CUT, "norm": "sequence"}),
        (Normed, {"norm": "split", "up": "column(gather=1)", "down": "row"}),
    ],
)
def test_what_is_read_as_it_is_given_is_right(make: Callable[[], nn.Module], rules: Mapping[str, str]) -> None:
    got = compute_cut(make, rules, 2, run, is_completed=True)
    assert_close(got, compute_whole(make, run))


def test_a_value_read_beside_columns_names_the_module_that_sums_them() -> None:
    with pytest.raises(ModelError, match=r"made with 'gate.weight', 'inner.weight' .*, before 'down' brings them tog"):
        compute_cut(read_twice, CUT, 2, run, is_completed=True)


def test_a_value_that_is_misread_on_another_stage_is_refused() -> None:
    stages = {"gate": 0, "inner": 0, "up": 1, "down": 1}
    plan = sw.Plan(
        mesh=sw.Mesh(pp=2, tp=2),
        pipeline=sw.Pipeline(stages=stages),
        tensor=sw.Tensor(rules={**CUT, "gate": "column", "inner": "row"}),
    )

    def train(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            Gated(), plan, optimizer=adamw, loss=lambda output, _: output.square().mean(), channel=channel
        )
        engine.step({"x": torch.ones(2, 6, 4)})

    with pytest.raises(ModelError, match="what 'inner' gives is whole along tp"):
        sw.simulate(4, train)
