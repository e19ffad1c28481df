"""Putting styles on and taking them off; fake tensors; precision; refusals at run time."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.recorded import Recorded
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.styles import TensorParallel
from shardwise.engine.tensor.tp_collectives import TpCollectives
from shardwise.errors import ModelError
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole
from tests.engine.tensor.test_styles import SequenceModel, Tokens, linear_block, run, run_six


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_sum_is_rounded_once_and_equal_on_all_ranks(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = values.float()
    expected = (wide[0] + wide[1] + wide[2]).to(dtype)  # rank order

    def on_rank(channel: sw.Channel) -> torch.Tensor:
        return TpCollectives(channel, "test").all_reduce(values[channel.rank])

    for total in sw.simulate(3, on_rank):
        assert torch.equal(total, expected)


def test_what_moved_may_be_written_to_in_place() -> None:
    def on_rank(channel: sw.Channel) -> torch.Tensor:
        value = torch.ones(4, requires_grad=True)
        collectives = TpCollectives(channel, "test")
        ranges = [((0, 2),), ((2, 4),)]
        (collectives.all_reduce(value).add_(1) * 2).sum().backward()
        collectives.all_gather(collectives.scatter(value, 0, ranges).mul_(3), 0, ranges).mul_(5).sum().backward()
        assert value.grad is not None
        return value.grad

    assert all(torch.equal(each, torch.full((4,), 2.0 + 15.0)) for each in sw.simulate(2, on_rank))


def test_gradients_of_gradients_move_too() -> None:
    def on_rank(channel: sw.Channel) -> torch.Tensor:
        value = torch.tensor([2.0], requires_grad=True)
        collectives = TpCollectives(channel, "test")
        total = collectives.all_reduce(collectives.copy_to_ranks(value) ** 3 * (channel.rank + 1))  # 3 x^3
        (first,) = torch.autograd.grad(total.sum(), value, create_graph=True)
        (second,) = torch.autograd.grad(collectives.all_reduce(collectives.copy_to_ranks(first) * 0.5), value)
        return torch.stack([first.detach(), second])

    assert all(torch.equal(each, torch.tensor([[36.0], [36.0]])) for each in sw.simulate(2, on_rank))


@pytest.mark.parametrize(
    "rules",
    [
        {"block.up": "column", "block.down": "row", "embedding": "vocab", "head": "vocab"},
        {"*.up": "colwise_gather_output", "*.down": "rowwise_split_input", "embedding": "embedding_colwise"},
        {"block.norm": "sequence", "head": "vocab"},
    ],
)
def test_fake_tensors_do_not_travel_and_have_the_right_shape(rules: dict[str, str]) -> None:
    def on_rank(channel: sw.Channel) -> None:
        model = Tokens(linear_block())
        plan = plan_tensor(tensor_outline(model), rules, num_ranks=2)
        recorded = Recorded(channel)
        TensorParallel(model, plan, recorded)
        with FakeTensorMode():
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        full = f"{_name_of(model, module)}.{name}"
                        portion = plan.portions(channel.rank).get(full)
                        module._parameters[name] = nn.Parameter(
                            torch.empty(portion.shape if portion else parameter.shape)
                        )
            out = model(torch.empty(2, 5, dtype=torch.long))
        assert out.shape == (2, 5, 11)
        out.sum().backward()
        assert not recorded.calls

    sw.simulate(2, on_rank)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[wanted]


def test_modules_get_their_own_forwards_back() -> None:
    def on_rank(channel: sw.Channel) -> None:
        model = Tokens(linear_block())
        words = torch.tensor([[1, 2]])
        before = model(words)
        rules = {"block.up": "column", "head": "column"}
        TensorParallel(model, plan_tensor(tensor_outline(model), rules, num_ranks=2), channel)
        assert "forward" in vars(model.head)
        TensorParallel.take_off(model)
        assert all("forward" not in vars(module) for module in model.modules())
        assert all(not any("shardwise" in key for key in vars(module)) for module in model.modules())
        assert torch.equal(model(words), before)

    sw.simulate(2, on_rank)


def test_a_token_that_no_rank_has_is_refused_as_by_torch() -> None:
    def with_wrong_token(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(torch.tensor([[3, 11]]))
        return out

    with pytest.raises(IndexError, match="given tokens from 3 to 11; it has 11"):
        compute_cut(lambda: Tokens(linear_block()), {"embedding": "vocab"}, 2, with_wrong_token)


def test_positions_that_do_not_divide_are_refused() -> None:
    def run_seven(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(torch.zeros(2, 7, dtype=torch.long))
        return out

    with pytest.raises(ModelError, match=r"7 positions \(dim 1\) do not divide among 2 ranks"):
        compute_cut(SequenceModel, {"embedding": "vocab(scatter=1)", "*norm": "sequence_parallel"}, 2, run_seven)


def test_evaluation_moves_no_gradients() -> None:
    def evaluate(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            run_six(model)
        return run(model) if isinstance(model, Tokens) else run_six(model)

    rules = {"*.up": "column", "*.down": "row"}
    alone = compute_cut(SequenceModel, rules, 2, run_six)
    both = compute_cut(SequenceModel, rules, 2, evaluate)
    assert torch.equal(alone.output, both.output)
    # Two blocks: the outputs of both are summed once more, and no gradient of an input.
    assert len(both.calls[0]) - len(alone.calls[0]) == 2 * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_moves_the_same_again(use_reentrant: bool) -> None:
    def recomputed(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, SequenceModel)
        x = model.embedding(torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1)))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        out: torch.Tensor = model.head(model.norm(x)).square()
        return out

    rules = {"*.up": "column", "*.down": "row", "embedding": "vocab", "head": "vocab"}
    if use_reentrant:  # its graph is hidden: rules decide, and have to name what they decide on
        with pytest.raises(
            ModelError, match=r"'blocks.0.norm.weight'.* are whole along tp, .* a reentrant .* hides their gradients"
        ):
            compute_cut(SequenceModel, rules, 2, recomputed)
        rules["*norm"] = "replicate"
    assert_close(compute_cut(SequenceModel, rules, 2, recomputed), compute_whole(SequenceModel, run_six))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_compiled_module_moves_the_same() -> None:
    def make() -> nn.Module:
        model = SequenceModel()
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    rules = {"*.up": "column", "*.down": "row"}
    assert_close(compute_cut(make, rules, 2, run_six), compute_whole(SequenceModel, run_six))
