"""`rules="auto"` for models that carry no plan: what is inferred is right, and what is left whole has a reason."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.rehearsal import RehearsalError, rehearse
from shardwise.errors import PlanError
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.tensor import inferred_models as odd

WORDS = (torch.arange(24).view(4, 6) * 5 + torch.arange(4)[:, None]) % 11


def loss_of(output: object, batch: object) -> torch.Tensor:
    """Depends on all elements of what the model gives first."""
    first = output if isinstance(output, torch.Tensor) else output[0]  # type: ignore[index]
    weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype).view(first.shape)
    return (first * weights).square().mean()


def trained(
    make: Callable[[], nn.Module], num_ranks: int, *, rules: object = "auto"
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
    """Losses and parameters after two updates, inferred rules, and what is left whole."""

    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
        torch.manual_seed(0)
        model = make().double()
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=sw.Tensor(rules=rules if num_ranks > 1 else None)),  # type: ignore[arg-type]
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=loss_of,
            channel=channel,
            sample={"words": WORDS},
        )
        losses = [engine.step({"words": WORDS}).loss for _ in range(2)]
        values = {name: value.clone() for name, value in sw.full(engine)}
        values["losses"] = torch.tensor(losses, dtype=torch.float64)
        decision = engine.tensor_decision
        return values, dict(decision.inferred), dict(decision.left)

    first, *others = sw.simulate(num_ranks, run)
    for other in others:
        assert other[1:] == first[1:]
    return first


def assert_right(make: Callable[[], nn.Module], num_ranks: int = 2) -> tuple[dict[str, str], dict[str, str]]:
    """Two updates give what one process gives; the rules, and what is left whole."""
    values, rules, left = trained(make, num_ranks)
    expected, _, _ = trained(make, 1)
    for name, value in expected.items():
        assert torch.allclose(values[name], value, rtol=1e-9, atol=1e-9), name
    return rules, left


def around(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: odd.Around(block())


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (odd.Feed, {"block.up": "column(groups=24)", "block.down": "row(groups=24)"}),
        (
            odd.Scaled,
            {"block.scale": "column(dim=0, groups=24)", "block.shift": "column(dim=0, groups=24)"},
        ),
        (lambda: odd.Gated(is_interleaved=False), {"block.up": "column(parts=24+24, groups=24+24)"}),
        (lambda: odd.Gated(is_interleaved=True), {"block.up": "column(groups=24)"}),
        (
            lambda: odd.Gated(is_interleaved=False, is_constant=True),
            {"block": "heads(attributes=inner, groups=24)", "block.up": "column(parts=24+24, groups=24+24)"},
        ),
        (odd.TwoReaders, {"block.other": "row(groups=24)", "block.down": "row(groups=24)"}),
        (lambda: odd.Attention("phd"), {"block.qkv": "column(parts=16+16+16, groups=4+4+4)"}),
        (lambda: odd.Attention("hpd"), {"block.qkv": "column(groups=4)"}),
        (lambda: odd.Attention("hdp"), {"block.qkv": "column(groups=4)"}),
        (lambda: odd.Attention("phd", is_counted=True), {"block": "heads(attributes=num_heads, groups=4)"}),
        (odd.Absorbing, {"block": "heads(attributes=num_heads+num_kv_heads, groups=4)", "block.out": "row(groups=4)"}),
        (lambda: odd.Absorbing(2), {"block": "heads(attributes=num_heads+num_kv_heads, groups=2)"}),
    ],
)
def test_what_can_be_cut_is_cut_and_right(block: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    rules, _ = assert_right(around(block))
    assert expected.items() <= rules.items()
    assert {"embed": "vocab", "head": "vocab"}.items() <= rules.items()


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (odd.Centred, "'mean' over dim 2"),
        (odd.CentredInTraining, "is not its part of the whole"),
        (odd.Summed, "'cumsum' over dim 2"),
        (odd.Weighed, "'mul' with a whole value"),
        (odd.Reversed, "'flip' over dim 2"),
        (odd.Convolved, "'convolution', which is not followed"),
        (odd.ReadTwice, "'native_layer_norm' over dim 2"),
        (odd.GatedByWhole, "1 group of features"),
        (odd.WholeAdded, "1 group of features"),
        (lambda: odd.Absorbing(1), "for 2 ranks"),
        (odd.Sloped, "with a whole value"),
    ],
)
def test_what_cannot_be_cut_is_whole_for_a_reason(block: Callable[[], nn.Module], why: str) -> None:
    rules, left = assert_right(around(block))
    assert not any(name.startswith("block") for name in rules)
    assert any(why in reason for name, reason in left.items() if name.startswith("block")), left


def test_heads_that_do_not_divide_among_the_ranks_are_cut_unevenly() -> None:
    rules, _ = assert_right(around(odd.Absorbing), 3)
    assert rules["block.q"] == "column(groups=4)"


def test_ties_are_cut_alike_and_a_weight_that_is_read_by_hand_stays_whole() -> None:
    rules, _ = assert_right(odd.Tied)
    assert (rules["embed"], rules["head"]) == ("vocab", "vocab")
    rules, _ = assert_right(odd.ReadByHand)
    assert "embed" not in rules
    assert "block.up" in rules


def test_what_the_model_gives_beside_its_result_is_whole() -> None:
    rules, left = assert_right(odd.Shown)
    assert "up" not in rules
    assert left["up"] == "the model gives it"


def test_rules_of_ones_own_beat_what_is_inferred() -> None:
    make = around(odd.Feed)
    values, _, _ = trained(make, 2, rules={"*": "auto", "head": "replicate", "embed": "replicate"})
    expected, _, _ = trained(make, 1)
    assert all(torch.allclose(values[name], each, rtol=1e-9, atol=1e-9) for name, each in expected.items())


def test_rules_of_ones_own_that_break_what_is_inferred_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'block\.down' computes something else"):
        trained(around(odd.Feed), 2, rules={"*": "auto", "block.up": "replicate"})


def test_a_verification_compares_what_is_inferred_with_one_process() -> None:
    report = sw.verify(
        around(odd.Absorbing),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
        [{"words": WORDS}],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=loss_of,
    )
    assert report.verdict in ("equal", "rounding")
    assert report.steps[0].tallies


def test_without_a_sample_a_model_that_says_nothing_of_its_inputs_is_refused() -> None:
    def run(channel: sw.Channel) -> None:
        sw.parallelize(
            odd.Around(odd.Feed()),
            sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            channel=channel,
        )

    with pytest.raises(PlanError, match=r"on a batch: give parallelize\(\.\.\., sample=batch\)"):
        sw.simulate(2, run)


def test_weights_of_zeros_do_not_hide_what_is_wrong() -> None:
    def zeroed() -> nn.Module:
        block = odd.Absorbing()
        for each in (block.v, block.k, block.out):
            nn.init.zeros_(each.weight)
        return odd.Around(block)

    torch.manual_seed(0)
    model = zeroed().double()
    outline = tensor_outline(model)
    rules = {f"block.{name}": "column" for name in "qkv"} | {"block.out": "row"}
    with pytest.raises(RehearsalError, match="is not its part"):
        rehearse(model, outline, plan_tensor(outline, rules, num_ranks=2), lambda: model(WORDS))
    assert not model.block.v.weight.any()  # type: ignore[union-attr, operator]


def test_a_model_is_as_before_when_nothing_can_be_cut() -> None:
    models: list[nn.Sequential] = []

    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).train())
        sw.parallelize(
            models[-1],
            sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, _: output.sum(),
            channel=channel,
            sample={"input": torch.ones(2, 4)},
        )

    with pytest.raises(PlanError, match="finds nothing in it to cut"):
        sw.simulate(2, run)
    for model in models:
        assert model.training
        assert all("forward" not in vars(each) and not each._forward_hooks for each in model.modules())
