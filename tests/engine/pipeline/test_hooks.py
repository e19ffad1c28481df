"""Hooks around the forwards of placed modules: the bits of one process, whatever they set, change and draw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as every
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import shardwise as sw

WIDTH = 4

pytestmark = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(4))
        self.seen: list[Any] = []
        self.gate: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def linears(net: Any) -> list[Any]:
    return [block.linear for block in net.blocks]


def free(linear: Any) -> None:
    """Its weight becomes an attribute that somebody makes of another parameter."""
    weight = linear._parameters.pop("weight").detach()
    linear.register_parameter("weight_orig", nn.Parameter(weight))
    linear.weight = weight.clone()


def half(linear: Any, *_: Any) -> None:
    linear.weight = linear.weight_orig * 0.5


def set_by_hook(linear: Any) -> None:
    free(linear)
    linear.register_forward_pre_hook(half)


def set_by_keyword_hook(net: Any) -> None:
    for linear in linears(net):
        free(linear)
        linear.register_forward_pre_hook(lambda each, args, kwargs: half(each), with_kwargs=True)


def set_by_the_block(net: Any) -> None:
    for block in net.blocks:
        free(block.linear)
        block.register_forward_pre_hook(lambda each, args: half(each.linear))


def set_with_noise(net: Any) -> None:
    def noisy(each: Any, args: Any) -> None:
        each.weight = each.weight_orig + 0.1 * torch.randn_like(each.weight_orig)

    for linear in linears(net):
        free(linear)
        linear.register_forward_pre_hook(noisy)


def gated(net: Any) -> None:
    """One of an early stage sets what one of a late stage reads."""

    def gate(each: Any, args: Any, output: torch.Tensor) -> None:
        net.gate = torch.sigmoid(output.mean())

    net.blocks[0].register_forward_hook(gate)
    net.blocks[3].register_forward_pre_hook(lambda each, args: (args[0] * net.gate,))


def noted(net: Any) -> None:
    for block in net.blocks:
        block.register_forward_pre_hook(lambda each, args: net.seen.append(args[0].square().mean()))
        block.register_forward_hook(
            lambda each, args, output: net.seen.append(output.square().mean()), always_call=True
        )


def buffers_in_place(net: Any) -> None:
    for block in net.blocks:
        block.register_forward_pre_hook(lambda each, args: each.mean.mul_(0.9).add_(args[0].detach().mean(0) * 0.1))


def on_linears(do: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda net: [do(each) for each in linears(net)]


HOOKS: dict[str, Callable[[Any], object]] = {
    "prune": on_linears(lambda each: prune.l1_unstructured(each, "weight", amount=0.5)),
    "prune twice": on_linears(
        lambda each: prune.l1_unstructured(prune.random_unstructured(each, "weight", amount=0.5), "bias", amount=0.5)
    ),
    "weight norm, old": on_linears(weight_norm),
    "weight norm": on_linears(parametrizations.weight_norm),
    "spectral norm, old": on_linears(spectral_norm),
    "spectral norm": on_linears(parametrizations.spectral_norm),
    "orthogonal": on_linears(parametrizations.orthogonal),
    "own weights": on_linears(set_by_hook),
    "own weights by keyword": set_by_keyword_hook,
    "own weights of inner modules": set_by_the_block,
    "own weights with noise": set_with_noise,
    "inputs": lambda net: net.blocks[3].register_forward_pre_hook(lambda each, args: (args[0] + 1,)),
    "keywords": lambda net: net.blocks[1].register_forward_pre_hook(
        lambda each, args, kw: (args, {"scale": 0.25}), with_kwargs=True
    ),
    "outputs": lambda net: net.blocks[2].register_forward_hook(lambda each, args, output: output * 3),
    "outputs by keyword": lambda net: net.blocks[2].register_forward_hook(
        lambda each, args, kw, output: output * kw["scale"], with_kwargs=True
    ),
    "values of other stages": gated,
    "values that are kept": noted,
    "buffers": buffers_in_place,
    "of all modules": lambda net: None,
}


def trained(channel: sw.Channel, hook: Callable[[Any], object], plan: sw.Plan) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    net = Net()
    with torch.random.fork_rng(devices=[]):
        hook(net)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.stack([output.square().mean(), *net.seen]).sum()

    engine = sw.parallelize(
        net, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=loss, channel=channel
    )
    at, found = plan.mesh.data_rank(channel.rank), []
    for seed in range(3):
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        found.append(engine.step({"x": rows.chunk(plan.mesh.num_data_ranks)[at]}).loss)
        found.append(engine.evaluate({"x": torch.ones(2, WIDTH)}).loss)
    return found, {name: values.cpu() for name, values in sw.full(engine)}


BLOCKS = {f"blocks.{at}": at // 2 for at in range(4)}
PARTS = {f"blocks.{at}.linear": at // 2 for at in range(4)}


def of(mesh: str, stages: dict[str, int] | None = None, **more: Any) -> sw.Plan:
    k = 2 if mesh in ("pp=2", "pp=1") else 1
    return sw.Plan(
        mesh=sw.Mesh.parse(mesh), pipeline=sw.Pipeline(stages=stages), merge=sw.Merge(microbatches=k), **more
    )


PLANS: dict[str, tuple[sw.Plan, sw.Plan]] = {
    "blocks": (of("pp=2", BLOCKS), of("pp=1")),
    "parts": (of("pp=2", PARTS), of("pp=1")),
    "stage 3": (
        of("pp=2,dp_shard=2", PARTS, sharding=sw.Sharding(stage=3)),
        of("dp_shard=2", sharding=sw.Sharding(stage=3)),
    ),
}


WITHIN = ("weight norm", "spectral norm", "orthogonal", "buffers")
"""Not by parts: of a parametrised module the parametrisation is placed, and a buffer needs the stage of its module."""

CASES = [(name, layout) for name in HOOKS for layout in PLANS if layout == "blocks" or name not in WITHIN]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_hooks_of_placed_modules_give_the_bits_of_one_process(name: str, layout: str) -> None:
    plan, plain = PLANS[layout]
    hook, handles = HOOKS[name], []
    if name == "of all modules":
        handles = [
            every.register_module_forward_pre_hook(
                lambda each, args: (args[0] * 0.9,) if isinstance(each, nn.Linear) else None  # type: ignore[arg-type,unused-ignore]
            ),
            every.register_module_forward_hook(
                lambda each, args, output: output * 0.9 if isinstance(each, Inner) else None
            ),
        ]
    try:
        (expected, *_) = sw.simulate(plain.mesh.size, lambda channel: trained(channel, hook, plain))
        for losses, values in sw.simulate(plan.mesh.size, lambda channel: trained(channel, hook, plan)):
            assert losses == expected[0]
            assert values.keys() == expected[1].keys()
            assert all(torch.equal(each, expected[1][key]) for key, each in values.items())
    finally:
        for each in handles:
            each.remove()


def test_a_buffer_that_a_hook_puts_anew_is_refused_with_the_way_out() -> None:
    def hook(net: Any) -> None:
        def put(each: Any, args: Any) -> None:
            each.mean = each.mean * 0.9 + args[0].detach().mean(0)

        for block in net.blocks:
            block.register_forward_pre_hook(put)

    with pytest.raises(sw.ShardwiseError, match=r"'blocks.0' puts a value of a stage into the buffer 'mean'.*copy_"):
        sw.simulate(2, lambda channel: trained(channel, hook, of("pp=2", BLOCKS)))


def test_a_value_in_what_a_module_keeps_is_refused_with_its_module() -> None:
    def hook(net: Any) -> None:
        def put(each: Any, args: Any) -> None:
            each.kept = {"gain": args[0].detach().mean()}

        net.blocks[1].register_forward_pre_hook(put)
        net.blocks[1].forward = lambda x, scale: net.blocks[1].linear(x) * net.blocks[1].kept["gain"]

    with pytest.raises(sw.ShardwiseError, match=r"in 'blocks.1', got a value .* did not come .* by its arguments"):
        sw.simulate(2, lambda channel: trained(channel, hook, of("pp=2", BLOCKS)))


@torch.no_grad()
def doubled(_: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(2)


@torch.no_grad()
def doubled_input(_: nn.Module, args: Any, output: torch.Tensor) -> None:
    args[0].mul_(2)


@pytest.mark.parametrize("hook", [doubled, doubled_input, lambda _, args, output: output * 2])
def test_a_hook_inside_that_changes_what_the_module_computed_with_is_refused(hook: Callable[..., Any]) -> None:
    def put(net: Any) -> None:
        net.blocks[1].linear.register_forward_hook(hook)

    with pytest.raises(sw.ShardwiseError, match=r"a forward hook on 'blocks.1.linear', inside the placed module"):
        sw.simulate(2, lambda channel: trained(channel, put, of("pp=2", BLOCKS)))


def test_parameters_of_other_stages_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every call has to refuse them: in a generation with objects that modules change."""

    class Generating(Net):
        def generate(self, x: torch.Tensor, *, most: int) -> torch.Tensor:
            caches: list[dict[str, Any]] = [{} for _ in self.blocks]
            for _ in range(most):
                for block, cache in zip(self.blocks, caches, strict=True):
                    x = block(x, cache)
            return x

    class Caching(Inner):
        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    walks: list[nn.Module] = []
    walk = nn.Module.parameters

    def run(channel: sw.Channel) -> list[int]:
        net = Generating()
        net.blocks = nn.ModuleList(Caching() for _ in range(4))
        engine = sw.parallelize(
            net,
            of("pp=2", BLOCKS),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        counts = []
        for most in (2, 2, 12):
            walks.clear()
            engine.generate(torch.ones(2, WIDTH), most=most)
            counts.append(sum(each is net for each in walks))
        return counts

    def noting(self: nn.Module, recurse: bool = True) -> Any:
        walks.append(self)
        return walk(self, recurse)

    monkeypatch.setattr(nn.Module, "parameters", noting)
    for _, few, many in sw.simulate(2, run):
        assert many == few
