"""Backwards that run in another thread, as they do on accelerators, change no bit."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.randomness import KeyedRandom
from shardwise.errors import ModelError
from tests.engine.expected import points, sgd, square_loss

SHARED = nn.Dropout(0.25)
"""A layer that all models have, and so all simulated ranks: as activations that a library makes once."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Switches to backwards in a thread of their own; one inside of another stays in it, as in a device's thread."""
    run_backward: Any = torch.autograd.graph._engine_run_backward
    num_runs = 0

    def run_elsewhere(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_runs
        # Asked of autograd: inside of another the thread may be that of a device, which must not wait for a new one.
        if torch._C._current_graph_task_id() != -1:
            return run_backward(*args, **kwargs)
        num_runs += 1
        results: list[Any] = []
        errors: list[BaseException] = []
        num_threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(num_threads)
            try:
                results.append(run_backward(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    def switch(on: bool) -> None:
        for module in (torch.autograd.graph, torch.autograd):
            monkeypatch.setattr(module, "_engine_run_backward", run_elsewhere if on else run_backward)

    yield switch
    assert num_runs, "no backward ran elsewhere"


class Draws(nn.Module):
    """Draws by a layer of its own, by one that is shared, and by a function."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout, self.shared = nn.Dropout(0.5), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shared(self.down(self.dropout(torch.tanh(self.up(x)))))
        return nn.functional.dropout(x, 0.1, self.training)


class Block(nn.Module):
    """`way`: how its activations are computed again."""

    def __init__(self, way: str, shared: nn.Module) -> None:
        super().__init__()
        self.draws, self.way = Draws(shared), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.draws, x, self.way)


def run(module: nn.Module, x: torch.Tensor, way: str) -> torch.Tensor:
    """Run the module, so that its backward computes it again."""
    out: torch.Tensor
    match way:
        case "reentrant":
            out = checkpoint(module, x, use_reentrant=True)
        case "checkpointed":
            out = checkpoint(module, x, use_reentrant=False)
        case "nested":
            out = checkpoint(lambda x: checkpoint(module, x, use_reentrant=False) + 0, x, use_reentrant=False)
        case "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                out = checkpoint(module, x, use_reentrant=False).float()
        case _:
            out = module(x)
    return out


class Net(nn.Module):
    """Blocks that are computed again as a whole (`around`), or inside of them."""

    def __init__(self, way: str, *, around: bool = False, shared: nn.Module = SHARED) -> None:
        super().__init__()
        self.way = way if around else "plain"
        self.layers = nn.ModuleList(Block("plain" if around else way, shared) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = run(layer, x, self.way)
        out: torch.Tensor = self.head(x)
        return out


class Hooked(Net):
    """Hooks of the user's see gradients, and change them."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.head.weight.register_hook(lambda gradient: gradient * 2)
        self.get_submodule("layers.1.draws.up").register_full_backward_hook(halved)


def halved(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(each * 0.5 for each in gradients)


def penalised(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Runs a backward of its own inside of the loss."""
    (slope,) = torch.autograd.grad(output.square().sum(), batch["x"], create_graph=True)
    loss: torch.Tensor = square_loss(output, batch) + 0.1 * slope.square().mean()
    return loss


Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]


def trained(
    plan: sw.Plan, way: str = "plain", *, make: Callable[[str], nn.Module] = Net, loss: Any = square_loss
) -> Trained:
    """Losses, norms and parameters of rank 0, after three updates with eight rows on all data ranks together."""

    def run(channel: sw.Channel) -> Trained:
        torch.manual_seed(0)
        engine = sw.parallelize(make(way), plan, optimizer=sgd, loss=loss, channel=channel, seed=3)
        ranks = plan.mesh.dp_shard
        rows = slice(*(8 * (plan.mesh.coordinates(channel.rank)["dp_shard"] + at) // ranks for at in (0, 1)))
        reports = [engine.step({name: value[rows] for name, value in points(step, 8).items()}) for step in range(3)]
        values = dict(sw.full(engine, channel=channel))
        return [each.loss for each in reports], [each.grad_norm for each in reports], values

    return sw.simulate(plan.mesh.size, run)[0]


def assert_alike(got: Trained, expected: Trained, *, norms: bool = True) -> None:
    assert got[0] == expected[0]
    assert not norms or got[1] == expected[1]
    assert all(torch.equal(value, expected[2][name]) for name, value in got[2].items())


def plan_of(k: int = 1, stage: int = 1, schedule: str = "1f1b", **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        merge=sw.Merge(microbatches=k),
        sharding=sw.Sharding(stage=stage),
        pipeline=sw.Pipeline(schedule=schedule),
        tensor=sw.Tensor(rules={"layers.*.up": "colwise_gather_output"} if "tp" in mesh else None),
    )


WAYS = ("plain", "checkpointed", "reentrant", "nested")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_recomputation_elsewhere_draws_the_masks_of_the_forward(
    elsewhere: Callable[[bool], None], stage: int, way: str
) -> None:
    """Two data ranks with a microbatch each add like one process with two microbatches."""
    expected = trained(plan_of(2), "plain")
    elsewhere(True)
    assert_alike(trained(plan_of(2, stage), way), expected)
    for around in (True, False):
        got = trained(plan_of(1, stage, dp_shard=2), way, make=partial(Net, around=around))
        assert_alike(got, expected, norms=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (2, "interleaved"), (3, "fthenb")])
def test_stages_recompute_elsewhere(elsewhere: Callable[[bool], None], pp: int, schedule: str, way: str) -> None:
    expected = trained(plan_of(3), "plain")
    elsewhere(True)
    assert_alike(trained(plan_of(3, schedule=schedule, pp=pp), way), expected)


ALONE = partial(Net, shared=nn.Dropout(0.25))


@pytest.mark.parametrize(
    ("plan", "way", "make", "loss"),
    [
        (plan_of(2, tp=2), "checkpointed", Net, square_loss),
        (plan_of(2, 3, dp_shard=2, tp=2), "nested", Net, square_loss),
        (plan_of(2, 3, dp_shard=2), "checkpointed", Hooked, square_loss),
        (plan_of(2, pp=2), "reentrant", Hooked, square_loss),
        (plan_of(2, 3, dp_shard=2), "autocast", Net, square_loss),
        (plan_of(2, pp=2), "autocast", Net, square_loss),
        (plan_of(2, schedule="interleaved", pp=2), "autocast", Net, square_loss),
        (plan_of(2), "checkpointed", ALONE, penalised),
    ],
)
def test_nothing_else_depends_on_the_thread(
    elsewhere: Callable[[bool], None], plan: sw.Plan, way: str, make: Callable[[str], nn.Module], loss: Any
) -> None:
    expected = trained(plan, way, make=make, loss=loss)
    elsewhere(True)
    assert_alike(trained(plan, way, make=make, loss=loss), expected)


def test_a_backward_in_the_loss_through_a_layer_that_engines_share_is_refused(
    elsewhere: Callable[[bool], None],
) -> None:
    elsewhere(True)
    with pytest.raises(ModelError, match="a Dropout that several engines of this process share is recomputed"):
        trained(plan_of(2, 2, dp_shard=2), "checkpointed", loss=penalised)


def test_a_backward_of_another_engine_draws_nothing_from_a_stream_that_waits(
    elsewhere: Callable[[bool], None],
) -> None:
    """Two engines have one layer, as simulated ranks may; one of them is in the middle of a microbatch."""
    mine, other = (nn.Sequential(nn.Linear(64, 64), SHARED, nn.Dropout(0.5)) for _ in range(2))
    random, others_random = (KeyedRandom(each, torch.device("cpu"), 1) for each in (mine, other))
    elsewhere(True)
    x = torch.ones(64)
    with random.stream(0, 0):
        expected = mine(x).detach(), torch.rand(3)
    with random.stream(0, 0):
        drawn = mine(x)
        waiting = torch.get_rng_state()
        with others_random.stream(0, 0):
            root = checkpoint(other, x, use_reentrant=False).sum()
            with others_random.in_backward_of([root]):
                root.backward()
        assert torch.equal(torch.get_rng_state(), waiting)
        assert torch.equal(drawn, expected[0])
        assert torch.equal(torch.rand(3), expected[1])
