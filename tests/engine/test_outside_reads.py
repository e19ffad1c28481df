"""Stage 3: parameters that a forward reads outside of their module are gathered for that, and change no bit."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.expected import adamw
from tests.engine.models import word_loss
from tests.engine.oracle import Trained, share_of
from tests.engine.ranks import assert_same_bits
from tests.engine.sharded_nets import BATCHES, plan_of
from tests.engine.stages import assert_at_rest, gathering_of, train_sharded
from tests.engine.test_stage_sizes import sent_by

WIDTH = 6


class Scale(torch.autograd.Function):
    """Keeps a parameter for its backward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).flatten(0, -2).sum(0)


class Block(nn.Module):
    """May read what its neighbour has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, neighbour: "Block | None" = None) -> torch.Tensor:
        x = x + torch.tanh(self.up(self.norm(x)))
        if neighbour is not None:
            x = nn.functional.layer_norm(
                nn.functional.linear(x, neighbour.up.weight.T), (WIDTH,), neighbour.norm.weight, self.norm.bias
            )
        return x


class Net(nn.Module):
    """Blocks between an embedding and a head; `kind` says what is read from outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        if kind == "frozen":
            self.embedding.requires_grad_(False)
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedding = self.embedding.weight
        x = nn.functional.embedding(words, embedding) if self.kind == "functional" else self.embedding(words)
        x = self.norm(self.through_blocks(self.with_reads(x)))
        if self.kind == "autoencoder":
            x = nn.functional.linear(x, self.head.weight) @ self.head.weight
        if self.kind == "tied":
            return self.head(x) + x @ self.head.weight.T  # type: ignore[no-any-return]
        return nn.functional.linear(x, self.embedding.weight, self.head.bias)

    def with_reads(self, x: torch.Tensor) -> torch.Tensor:
        positions, norm = self.positions.weight, self.norm.weight
        match self.kind:
            case "slice":
                x = x + positions[1 : 1 + x.shape[1]]
            case "columns":
                x = x + nn.functional.linear(x, positions[:WIDTH, :WIDTH].T)
            case "expanded":
                x = x + positions[None, : x.shape[1]].expand(len(x), -1, -1)
            case "before its call":
                x = x * norm + self.head.bias.sum()
            case "no gradient":
                with torch.no_grad():
                    x = x * (1 + norm.square().mean())
                x = x + self.head.weight.detach()[:WIDTH].mean(0)
            case "view without gradient":
                with torch.no_grad():
                    row = positions[:1]
                x = x + row
            case "iterated":
                x = x + sum(row.tanh() for row in positions) + torch.stack(positions.unbind()[:1])
            case "function":
                x = Scale.apply(x, norm)  # type: ignore[no-untyped-call]
            case "listed":
                x = x + torch.cat([norm, positions[0], self.head.bias[:WIDTH]]).view(3, -1).sum(0)
        return x

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            if self.kind.startswith("checkpointed"):

                def reads(x: torch.Tensor, block: Any = block) -> torch.Tensor:
                    return block(x) + nn.functional.linear(block(x) @ self.positions.weight[:WIDTH], block.up.weight.T)  # type: ignore[no-any-return]

                x = checkpoint(reads, x, use_reentrant=self.kind != "checkpointed")
            else:
                x = block(x, other if self.kind == "neighbour" else None)
        return x


def net(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(kind)

    return make


def trained(kind: str, stage: int, *, loss: Any = word_loss, after: Any = lambda *_: None, **settings: Any) -> Trained:
    return train_sharded(net(kind), plan_of(stage, **settings), BATCHES, optimizer=adamw, loss=loss, after=after)


KINDS = (
    *(
        "",
        "tied",
        "frozen",
        "functional",
        "slice",
        "columns",
        "expanded",
        "before its call",
        "no gradient",
        "neighbour",
    ),
    *("view without gradient", "iterated", "function", "listed", "autoencoder"),
    *("checkpointed", "checkpointed reentrant"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_reads_outside_of_a_module_change_no_bit(kind: str) -> None:
    """Of stage 1 with one microbatch, and of stage 2 with several."""
    assert_alike(trained(kind, 3), trained(kind, 1))
    if kind != "checkpointed reentrant":  # which gives gradients several times in one backward: not for stage 2
        assert_alike(trained(kind, 3, k=3), trained(kind, 2, k=3))


OF_ONE_STAGE = ("function", "checkpointed", "checkpointed reentrant")
"""Refused between stages, whatever they read."""


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in OF_ONE_STAGE])
def test_reads_between_stages_change_no_bit_in_steps_and_evaluations(kind: str) -> None:
    def run(channel: sw.Channel, stage: int) -> list[float]:
        plan = sw.Plan(
            mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=stage), merge=sw.Merge(microbatches=2)
        )
        engine = sw.parallelize(net(kind)(), plan, optimizer=adamw, loss=word_loss, channel=channel)
        return [number for each in BATCHES for number in (engine.step(each).loss, engine.evaluate(each).loss)]

    assert sw.simulate(4, lambda channel: run(channel, 3)) == sw.simulate(4, lambda channel: run(channel, 2))


def assert_alike(got: Trained, expected: Trained) -> None:
    assert_same_bits(got, expected)
    assert (got.losses, got.grad_norms) == (expected.losses, expected.grad_norms)


@pytest.mark.parametrize("kind", ["slice", "neighbour", "checkpointed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"keep_gathered": True},
        {"partition": "whole"},
        {"units": ("blocks.*",)},
        {"units": (".", "blocks.*", "blocks.*.up")},
        {"precision": sw.Precision(compute="bfloat16", keep=("*norm*",))},
    ],
    ids=["kept", "whole", "blocks", "nested", "bfloat16"],
)
def test_reads_are_right_under_every_setting(kind: str, settings: dict[str, Any]) -> None:
    others = {key: value for key, value in settings.items() if key not in ("keep_gathered", "units")}
    assert_alike(trained(kind, 3, k=2, **settings), trained(kind, 2, k=2, **others))


def test_the_loss_may_read_all_parameters_and_gathers_one_unit_at_a_time() -> None:
    models: dict[int, nn.Module] = {}

    def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        model = models[int(batch["words"].shape[0])]
        return word_loss(output, batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())

    most: list[int] = []

    def run(channel: sw.Channel, stage: int) -> list[float]:
        rows = 4 + channel.rank  # tells the ranks apart
        model = models[rows] = net("")()
        engine = sw.parallelize(model, plan_of(stage), optimizer=adamw, loss=loss, channel=channel)
        batch = {name: value[:rows] for name, value in BATCHES[0].items()}
        losses = []
        for _ in range(3):
            losses += [engine.step(batch).loss, engine.evaluate(batch).loss]
        if stage == 3:
            gathering = gathering_of(engine)
            fill = gathering._fill

            def counted(unit: Any) -> None:
                fill(unit)
                most.append(len(gathering._resident))

            gathering._fill = counted  # type: ignore[method-assign]
            engine.step(batch)
            assert_at_rest(engine)
        return losses

    assert sw.simulate(2, lambda channel: run(channel, 3)) == sw.simulate(2, lambda channel: run(channel, 1))
    assert max(most) == 2, "the bias of the head beside the weight of the embedding"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["slice", "no gradient"])
def test_the_traffic_that_is_foretold_counts_reads(kind: str, keeps: bool, k: int) -> None:
    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        plan = plan_of(3, k=k, keep_gathered=keeps, bucket_bytes=1 << 20)
        engine = sw.parallelize(net(kind)(), plan, optimizer=adamw, loss=word_loss, channel=recorded)
        share = share_of(BATCHES[0], channel.rank, channel.size)
        engine.step(share)
        foretold = engine.traffic()
        recorded.clear()
        before = engine.counters.all_gathers
        engine.step(share)
        assert sent_by(recorded) == {"parameters": foretold.gather_bytes, "gradients": foretold.reduce_bytes}
        assert engine.counters.all_gathers - before == sum(each.operation == "all_gather" for each in recorded.calls)

    sw.simulate(2, run)


def test_microbatches_that_only_some_ranks_compute_may_read() -> None:
    batches = [{name: value.clone() for name, value in batch.items()} for batch in BATCHES]
    for batch in batches:
        batch["targets"][:4] = -100
        batch["targets"][20:] = -100

    def run(stage: int) -> Trained:
        return train_sharded(
            net("slice"),
            plan_of(stage, k=3),
            batches,
            optimizer=adamw,
            loss=word_loss,
            loss_weight=lambda batch: float((batch["targets"] != -100).sum()),
        )

    assert_alike(run(3), run(2))


@pytest.mark.parametrize("kind", ["slice", "checkpointed"])
def test_evaluations_and_predictions_read(kind: str) -> None:
    def run(channel: sw.Channel, stage: int) -> list[Any]:
        model: Any = net(kind)()
        engine = sw.parallelize(model, plan_of(stage), optimizer=adamw, loss=word_loss, channel=channel)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        loss = engine.evaluate(share_of(BATCHES[1], channel.rank, channel.size)).loss
        predicted = engine.predict(
            {"words": BATCHES[1]["words"][:2]},
            lambda inputs: model(inputs["words"]) @ model.embedding.weight,
        )
        assert stage == 1 or all(unit.num_uses == 0 for unit in gathering_of(engine).units)
        return [loss, predicted.tolist()]

    assert sw.simulate(2, lambda channel: run(channel, 3)) == sw.simulate(2, lambda channel: run(channel, 1))


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "through a view": lambda weight: weight[1:].mul_(0.5),
    "through a detached tensor": lambda weight: weight.detach().clamp_(-0.1, 0.1),
    "through its data": lambda weight: weight.data.mul_(0.5),
    "by a new storage": lambda weight: setattr(weight, "data", weight.detach() * 2),
    "through numpy": lambda weight: weight.requires_grad_(False).numpy(),
}


@pytest.mark.parametrize("way", WRITES)
def test_writes_and_what_reaches_memory_unseen_are_refused(way: str) -> None:
    class Writes(Net):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                WRITES[way](self.norm.weight)
            return super().forward(words)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(Writes("slice"), plan_of(3), optimizer=adamw, loss=word_loss, channel=channel, seed=1)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    torch.manual_seed(0)
    with pytest.raises(ModelError, match=r"'norm.weight'.* (the values are lost|after detach)"):
        sw.simulate(2, run)


class Readme(nn.Module):
    """The model of README's section on pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = start = self.embed(words)
        for block in self.blocks:
            states = states + torch.tanh(block(states))
        return nn.functional.linear(states + start, self.embed.weight)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "mesh", [sw.Mesh(dp_shard=2), sw.Mesh(pp=2, dp_shard=2), sw.Mesh(dp_shard=2, tp=2)], ids=["data", "pp", "tp"]
)
def test_the_model_of_the_readme_trains_under_stage_3(mesh: sw.Mesh, k: int) -> None:
    rules = {"blocks.*": "colwise_gather_output"} if mesh.tp > 1 else None

    def run(channel: sw.Channel, stage: int, schedule: str = "1f1b") -> list[float]:
        torch.manual_seed(0)
        plan = sw.Plan(
            mesh=mesh,
            merge=sw.Merge(microbatches=k),
            sharding=sw.Sharding(stage=stage),
            tensor=sw.Tensor(rules=rules),
            pipeline=sw.Pipeline(schedule=schedule),
        )
        engine = sw.parallelize(
            Readme(),
            plan,
            optimizer=adamw,
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch["words"].roll(1)),
            channel=channel,
        )
        first = 4 * plan.mesh.coordinates(channel.rank)["dp_shard"]
        words = torch.arange(first, first + 4) % 11
        return [engine.step({"words": words + step}).loss for step in range(3)]

    for schedule in ("1f1b", "interleaved") if mesh.pp > 1 else ("1f1b",):
        wanted = sw.simulate(mesh.size, partial(run, stage=2, schedule=schedule))
        assert sw.simulate(mesh.size, partial(run, stage=3, schedule=schedule)) == wanted


class Mapped(nn.Module):
    """Uses a map once for each row."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = (lambda row: self.map.weight @ row) if self.is_read else self.map
        mapped: torch.Tensor = torch.vmap(each)(x)
        return mapped


@pytest.mark.parametrize("is_read", [True, False])
def test_parameters_inside_of_a_transformation_change_no_bit(*, is_read: bool) -> None:
    def run(channel: sw.Channel, stage: int, **settings: Any) -> float:
        torch.manual_seed(0)
        plan, model = plan_of(stage, **settings), Mapped(is_read=is_read)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=lambda y, _: y.square().mean(), channel=channel)
        return [engine.step({"x": torch.ones(2, WIDTH)}).loss for _ in range(2)][-1]

    expected = sw.simulate(2, lambda channel: run(channel, 1))
    assert sw.simulate(2, lambda channel: run(channel, 3)) == expected
    assert sw.simulate(2, lambda channel: run(channel, 3, units=(".",))) == expected
