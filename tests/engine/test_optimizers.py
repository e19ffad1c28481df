"""Any torch optimizer, unchanged: what it does to slices and to whole parameters is what it does in one process."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.inventory import take_inventory
from shardwise.engine.optimizer_trials import is_elementwise, work_of_wholes
from shardwise.engine.optimizers import can_skip_on_device, skipping
from shardwise.errors import OptimizerError
from tests.engine.models import (
    curve,
    curve_batch,
    curve_loss,
    loss_of_words,
    word_batch,
    word_loss,
    words,
)
from tests.engine.oracle import Optimizers, RankOrder, Trained, share_of, train_in_one_process, values_of
from tests.engine.ranks import assert_same_bits, largest_difference, train_on_ranks

BOUND = 8 * 2.0**-23
"""Eight ulps of a value between 1 and 2: what other orders of summation make in a few updates."""
BATCHES = [word_batch(seed, 24) for seed in range(3)]

NOT_OPTIMIZERS = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base class, and what is refused below."""
NEED_WHOLE = {"Adafactor", "Muon"}
ALL: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in NOT_OPTIMIZERS
}
LAYOUTS = {
    "slice": sw.Sharding(bucket_bytes=600),
    "whole": sw.Sharding(partition="whole", bucket_bytes=600),
    "stage 0": sw.Sharding(stage=0),
}


class Matrices(nn.Module):
    """Matrices only, as Muon wants them: tall, wide and nearly square."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 13, bias=False)
        self.second = nn.Linear(13, 5, bias=False)
        self.third = nn.Linear(5, 11, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(nn.functional.one_hot(words, 11).to(self.first.weight.dtype)))
        out: torch.Tensor = self.third(torch.tanh(self.second(hidden)))
        return out


def matrices() -> Matrices:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Matrices()


def plan_of(ranks: int, sharding: sw.Sharding, *, k: int = 2, clip: float | None = None) -> sw.Plan:
    return sw.Plan(mesh=sw.Mesh(dp_shard=ranks), sharding=sharding, merge=sw.Merge(microbatches=k), clip_grad_norm=clip)


def assert_equals_one_process(
    make_model: Callable[[], nn.Module], optimizer: Optimizers, *, ranks: int, sharding: sw.Sharding
) -> None:
    got = train_on_ranks(make_model, plan_of(ranks, sharding), BATCHES, optimizer=optimizer, loss=word_loss)
    oracle = RankOrder(
        model=make_model(), make_optimizer=optimizer, loss_of=loss_of_words, num_ranks=ranks, num_microbatches=2
    )
    assert_same_bits(got, oracle.train(BATCHES))


def test_these_are_the_optimizers_of_torch() -> None:
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam", "Adafactor", "Muon"} <= set(ALL)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_every_torch_optimizer_does_what_it_does_in_one_process(name: str, ranks: int, layout: str) -> None:
    make_model = matrices if name == "Muon" else words
    assert_equals_one_process(
        make_model, lambda parameters: ALL[name](parameters, lr=0.01), ranks=ranks, sharding=LAYOUTS[layout]
    )


@pytest.mark.parametrize(("ranks", "layout"), [(2, "whole"), (4, "whole"), (4, "slice")])
@pytest.mark.parametrize("name", sorted(NEED_WHOLE))
def test_optimizers_of_whole_matrices_run_on_any_number_of_owners(name: str, ranks: int, layout: str) -> None:
    """With three matrices, a fourth rank owns nothing."""
    assert_equals_one_process(
        matrices,
        lambda parameters: ALL[name](parameters, lr=0.01, weight_decay=0.1),
        ranks=ranks,
        sharding=LAYOUTS[layout],
    )


@pytest.mark.parametrize("layout", ["slice", "whole"])
@pytest.mark.parametrize("name", sorted(ALL.keys() - NEED_WHOLE))
def test_a_rank_that_owns_nothing_takes_part_with_every_optimizer(name: str, layout: str) -> None:
    batches = [curve_batch(seed, 16) for seed in range(2)]

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ALL[name](parameters, lr=0.01)

    sharding = sw.Sharding(partition="whole") if layout == "whole" else sw.Sharding()
    got = train_on_ranks(curve, plan_of(8, sharding, k=1), batches, optimizer=optimizer, loss=curve_loss)
    oracle = RankOrder(
        model=curve(),
        make_optimizer=optimizer,
        loss_of=lambda model, batch: curve_loss(model(batch["x"]), batch),
        num_ranks=8,
    )
    assert_same_bits(got, oracle.train(batches))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("sharding", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_optimizers_that_need_closures_or_sparse_gradients_are_refused(name: str, sharding: sw.Sharding) -> None:
    with pytest.raises(sw.ShardwiseError, match=rf"{name}.*(closure|sparse gradients)"):
        train_on_ranks(
            curve, plan_of(2, sharding), [], optimizer=lambda each: getattr(torch.optim, name)(each), loss=curve_loss
        )


VARIANTS: dict[str, Optimizers] = {
    "foreach": lambda each: torch.optim.AdamW(each, lr=0.01, foreach=True),
    "foreach sgd": lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "fused": lambda each: torch.optim.AdamW(each, lr=0.01, fused=True),
    "fused sgd": lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9, fused=True),
    "fused adagrad": lambda each: torch.optim.Adagrad(each, lr=0.01, fused=True),
    "lr in a tensor": lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.01)),
    "amsgrad": lambda each: torch.optim.Adam(each, lr=0.01, amsgrad=True, weight_decay=0.1),
    "maximize": lambda each: torch.optim.SGD(each, lr=0.01, maximize=True, dampening=0.1, momentum=0.5),
    "centered": lambda each: torch.optim.RMSprop(each, lr=0.01, centered=True, momentum=0.9),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_optimizers_run_on_slices(variant: str, ranks: int) -> None:
    assert_equals_one_process(words, VARIANTS[variant], ranks=ranks, sharding=LAYOUTS["slice"])


class Lion(torch.optim.Optimizer):
    """What a user brings along (Chen et al., 2023, arXiv:2302.06675): element by element; one setting is a function."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        def shape(values: torch.Tensor) -> torch.Tensor:
            return values.sign()

        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "shape": shape})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    direction = group["shape"](momentum * first + parameter.grad * (1 - first))
                    parameter.sub_(direction, alpha=group["lr"])
                    momentum.mul_(second).add_(parameter.grad, alpha=1 - second)


class Normed(torch.optim.Optimizer):
    """Steps of a length that follows the norm of a parameter (as LAMB's), or of all of them; by a share of it."""

    def __init__(self, params: Iterable[Any], lr: float, of_all: bool, share: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.of_all = of_all
        self.share = share

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            norms = [float(parameter.norm()) for parameter in held]
            for parameter, norm in zip(held, norms, strict=True):
                assert parameter.grad is not None
                length = math.hypot(*norms) if self.of_all else norm
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - self.share + self.share * length))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_optimizer_of_somebody_else_runs_when_it_goes_element_by_element(ranks: int, layout: str) -> None:
    assert_equals_one_process(
        words, lambda parameters: Lion(parameters, lr=0.01), ranks=ranks, sharding=LAYOUTS[layout]
    )


def test_an_optimizer_that_looks_at_its_whole_parameter_gets_it_whole_under_slices() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Normed(parameters, lr=0.01, of_all=False)

    assert_equals_one_process(words, optimizer, ranks=2, sharding=LAYOUTS["slice"])


@pytest.mark.parametrize("share", [1, 1e-5])
def test_an_optimizer_that_hardly_looks_beyond_its_element_is_found_out(share: float) -> None:
    model = words()
    inventory = take_inventory(model, sw.Precision())
    of_one, of_all = (Normed(model.parameters(), lr=0.01, of_all=of_all, share=share) for of_all in (False, True))
    assert work_of_wholes([of_one], inventory, torch.device("cpu")).keys() == inventory.parameters.keys()
    with pytest.raises(OptimizerError, match="Normed cannot update parameters one by one"):
        work_of_wholes([of_all], inventory, torch.device("cpu"))


def test_the_trial_leaves_no_trace_in_the_optimizer() -> None:
    """An optimizer built before, with a scheduler in warm-up at 0, a hook, and a container of its own."""
    model = words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    before = torch.get_rng_state()

    def run(channel: sw.Channel) -> None:
        sw.parallelize(model, plan_of(1, LAYOUTS["slice"]), optimizer=optimizer, loss=word_loss, channel=channel)

    work_of_wholes([optimizer], take_inventory(model, sw.Precision()), torch.device("cpu"))
    sw.simulate(1, run)
    assert not calls
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(before, torch.get_rng_state())


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for vectors and scalars; another learning rate for the embedding; names along."""
    named = dict(model.named_parameters())
    embedding = {"embedding.weight": named.pop("embedding.weight")}
    matrices = {name: each for name, each in named.items() if each.ndim > 1}
    rest = {name: each for name, each in named.items() if each.ndim <= 1}
    return [
        {"params": list(matrices.items()), "weight_decay": 0.3},
        {"params": list(rest.items()), "weight_decay": 0.0},
        {"params": list(embedding.items()), "lr": 0.002, "weight_decay": 0.1},
    ]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "lambda": lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: (step + 1) / 4),
    "one cycle": lambda each: torch.optim.lr_scheduler.OneCycleLR(each, max_lr=[0.01, 0.02, 0.03], total_steps=6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_and_schedulers_made_before_go_on_working(schedule: str, ranks: int, layout: str) -> None:
    batches = [word_batch(seed, 24) for seed in range(4)]
    plain = words()
    optimizer = torch.optim.AdamW(in_groups(plain), lr=0.01)
    scheduler = SCHEDULES[schedule](optimizer)
    rates = []
    for batch in batches:
        train_in_one_process(plain, optimizer, [batch], loss=word_loss, num_microbatches=ranks)
        rates.append(scheduler.get_last_lr())
        scheduler.step()

    def run(channel: sw.Channel) -> Trained:
        model = words()
        optimizer = torch.optim.AdamW(in_groups(model), lr=0.01)
        scheduler = SCHEDULES[schedule](optimizer)
        groups = optimizer.param_groups
        engine = sw.parallelize(
            model, plan_of(ranks, LAYOUTS[layout], k=1), optimizer=optimizer, loss=word_loss, channel=channel
        )
        assert engine.optimizer is optimizer
        assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
        assert all(len(group["params"]) == len(group["param_names"]) for group in groups)
        for at, batch in enumerate(batches):
            assert [group["lr"] for group in optimizer.param_groups] == rates[at]
            engine.step(share_of(batch, channel.rank, channel.size))
            scheduler.step()
        return Trained(parameters=values_of(model))

    for trained in sw.simulate(ranks, run):
        # One microbatch per rank: gradients are added in one order here and there.
        assert_same_bits(trained, Trained(parameters=values_of(plain)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam", "ASGD", "Muon", "Adafactor"])
def test_state_that_is_there_already_goes_on(name: str, ranks: int, layout: str) -> None:
    """Two updates in one process, then two more on ranks."""
    make_model = matrices if name == "Muon" else words
    batches = [word_batch(seed, 24) for seed in range(4)]
    settings: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "Muon") else {}

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optimizer = ALL[name](model.parameters(), lr=0.01, **settings)
        train_in_one_process(model, optimizer, batches[:2], loss=word_loss, num_microbatches=ranks)
        return model, optimizer

    def run(channel: sw.Channel) -> Trained:
        model, optimizer = begin()
        plan = plan_of(ranks, LAYOUTS[layout], k=1)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=word_loss, channel=channel)
        for batch in batches[2:]:
            engine.step(share_of(batch, channel.rank, channel.size))
        return Trained(parameters=values_of(model))

    model, optimizer = begin()
    expected = train_in_one_process(model, optimizer, batches[2:], loss=word_loss, num_microbatches=ranks)
    for trained in sw.simulate(ranks, run):
        assert_same_bits(trained, expected)


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [each for each in parameters if each.ndim == 2]
    rest = [each for each in parameters if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("layout", ["whole", "stage 0"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_muon_takes_the_matrices_and_adamw_the_rest(ranks: int, layout: str, compute: str) -> None:
    """In float32 against one process; in bfloat16 all layouts against one rank with as many microbatches."""
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), sharding=LAYOUTS[layout], precision=sw.Precision(compute=compute))
    got = train_on_ranks(words, plan, BATCHES, optimizer=muon_and_adamw, loss=word_loss)
    if compute == "bfloat16":
        alone = sw.Plan(merge=sw.Merge(microbatches=ranks), precision=plan.precision)
        assert_same_bits(got, train_on_ranks(words, alone, BATCHES, optimizer=muon_and_adamw, loss=word_loss))
        return
    model = words()
    optimizers = muon_and_adamw(list(model.parameters()))
    for batch in BATCHES:
        model.zero_grad()
        for rank in range(ranks):
            (loss_of_words(model, share_of(batch, rank, ranks)) / ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
    bound = 1e-3 if ranks == 3 else BOUND
    assert largest_difference(got, Trained(parameters=values_of(model))) <= bound


def test_two_optimizers_have_no_single_one() -> None:
    def run(channel: sw.Channel) -> None:
        plan = plan_of(2, LAYOUTS["whole"])
        engine = sw.parallelize(words(), plan, optimizer=muon_and_adamw, loss=word_loss, channel=channel)
        assert [type(each).__name__ for each in engine.optimizers] == ["Muon", "AdamW"]
        with pytest.raises(sw.ShardwiseError, match=r"2 optimizers; use engine\.optimizers"):
            _ = engine.optimizer

    sw.simulate(2, run)


def test_the_state_of_a_slice_is_all_that_a_rank_holds() -> None:
    def run(channel: sw.Channel) -> int:
        plan = plan_of(3, LAYOUTS["slice"])
        engine = sw.parallelize(
            words(), plan, optimizer=lambda each: torch.optim.Adam(each, lr=0.01), loss=word_loss, channel=channel
        )
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        return sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())

    held = sw.simulate(3, run)
    used = [each for name, each in words().named_parameters() if not name.startswith("unused")]
    assert sum(held) == sum(each.numel() for each in used)
    assert max(held) < sum(held) / 2


@pytest.mark.parametrize("layout", ["slice", "whole"])
def test_an_optimizer_that_looks_at_other_parameters_is_refused_on_owners_of_some(layout: str) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Normed(parameters, lr=0.01, of_all=True)

    with pytest.raises(sw.ShardwiseError, match=r"Normed cannot update parameters one by one.*stage=0"):
        train_on_ranks(words, plan_of(2, LAYOUTS[layout]), BATCHES, optimizer=optimizer, loss=word_loss)
    assert_equals_one_process(words, optimizer, ranks=2, sharding=LAYOUTS["stage 0"])


# Before torch 2.12 Adagrad takes no flag.
FUSED = [torch.optim.AdamW, torch.optim.SGD, *([torch.optim.Adagrad] if torch.__version__ >= "2.12" else [])]


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_leaves_out_a_step_by_a_flag(kind: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = kind([parameter], lr=0.1, fused=True)  # type: ignore[call-arg]
    assert can_skip_on_device([optimizer])
    found = []
    for flag in (0.0, 1.0, 0.0):
        parameter.grad = torch.full((5,), math.nan if flag else 0.5)
        with skipping([optimizer], torch.tensor(flag)):
            optimizer.step()
        found.append((parameter.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])))
    assert str(found[0]) == str(found[1]) != str(found[2])
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()


def test_optimizers_that_the_host_has_to_skip() -> None:
    model = nn.Linear(3, 2)
    plain, fused = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), fused=True)
    assert not can_skip_on_device([plain])
    assert not can_skip_on_device([fused, plain])
    assert can_skip_on_device([fused])
    engine = sw.parallelize(model, sw.Plan(), optimizer=plain, loss=lambda output, batch: output.sum())
    assert not can_skip_on_device(engine.optimizers), "what makes GradScaler call a step that is refused is no promise"
    fused.param_groups[0]["fused"] = False  # a load sets it
    assert not can_skip_on_device([fused])
    with skipping([plain], None):
        assert "found_inf" not in vars(plain)


@pytest.mark.parametrize("foreach", [False, True])
def test_the_optimizers_of_torch_that_are_elementwise_are_known_as_such(foreach: bool) -> None:
    """Whole parameters would train as well, and cut nothing evenly."""
    whole = {"Adafactor", "Muon"}
    left_out = {"LBFGS", "SparseAdam"}  # a closure, and gradients of another layout
    kinds = [
        each for each in vars(torch.optim).values() if isinstance(each, type) and each is not torch.optim.Optimizer
    ]
    assert len(kinds) > 10
    for kind in kinds:
        if kind.__name__ not in whole | left_out:
            optimizer = kind([nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(3))], lr=0.1, foreach=foreach)
            assert is_elementwise(optimizer, optimizer.param_groups[0], torch.device("cpu")), kind
    for settings in ({"amsgrad": True}, {"fused": True}, {"weight_decay": 0.1, "maximize": True}):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(5, 3))], **settings)
        assert is_elementwise(optimizer, optimizer.param_groups[0], torch.device("cpu")), settings
