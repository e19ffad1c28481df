"""Programs as users write them, for the type checker alone: `make check` reads this file, and nothing runs it.

What is accepted has no comment. A line with `type: ignore` is refused, for the reason in its brackets: `mypy --strict`
reports the comment as unused where the line passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, assert_type

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.rewrite import TensorLike


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(rows)
        return out


class Rows(TypedDict):
    rows: torch.Tensor
    wanted: torch.Tensor


def of_dicts(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, batch["wanted"])


def of_mappings(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, batch["wanted"])


def of_anything(output: Any, batch: Mapping[str, object]) -> torch.Tensor:
    loss: torch.Tensor = output[0].sum()
    return loss


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


PLAN = sw.Plan(
    mesh=sw.Mesh(pp=2, dp_shard=2, tp=2),
    sharding=sw.Sharding(stage=2, owners="dp_shard"),
    merge=sw.Merge(microbatches=4),
    precision=sw.Precision(compute="bfloat16", keep=("*norm*",)),
    pipeline=sw.Pipeline(schedule="1f1b", stages={"up": 0}, balance="flops"),
    tensor=sw.Tensor(rules={"up": "column"}),
    clip_grad_norm=1,
    average=sw.Average(decay=0.999, every=2),
)


# Accepted --------------------------------------------------------------------------------------------------------


def trains(channel: sw.Channel) -> list[float]:
    model = Net()
    engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=of_dicts, loss_weight=lambda batch: len(batch["rows"]))
    assert_type(engine, sw.Engine[Net])
    assert_type(engine.model.up, nn.Linear)
    assert_type(sw.relayout(engine, sw.Plan()).model, Net)
    batch = {"rows": torch.ones(2, 4), "wanted": torch.ones(2, 8)}
    assert_type(engine.predict(batch, lambda inputs: inputs["rows"] * 2), torch.Tensor)
    assert_type(engine.predict(batch, lambda inputs: (inputs["rows"], 3)), tuple[torch.Tensor, int])
    assert_type(engine.predict(batch), Any)
    assert_type(engine.predict([batch], lambda inputs: inputs["rows"] * 2), list[torch.Tensor])
    engine.generate([{"rows": torch.ones(1, 4)}, None], seed=[1, 2])
    reference = sw.parallelize(Net().requires_grad_(False), PLAN, optimizer=None)
    assert_type(sw.stream(engine, reference, channel=channel), sw.checkpoint.StreamReport)
    assert_type(sw.exchange({"rewards": [0.5]}, channel=channel)[0], Any)
    assert_type(engine.generate(batch, seed=0, gather="once", max_new_tokens=4), Any)
    with engine.whole(rank0_only=True):
        assert_type(model.state_dict(), dict[str, Any])
    assert_type(engine.gradients(), dict[sw.Piece, torch.Tensor])
    named: Rows = {"rows": torch.ones(2, 4), "wanted": torch.ones(2, 8)}
    reports = [engine.step(batch), engine.step({**batch, "scale": 2.0}), engine.step(named, stop=lambda: True)]
    with engine.averaged():
        averaged = engine.evaluate(batch).loss
    return [report.loss for report in reports] + [engine.evaluate(batch).loss, averaged]


def takes_optimizers_and_losses_of_all_kinds(model: Net) -> None:
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.parallelize(model, PLAN, optimizer=built, loss=of_mappings)
    sw.parallelize(model, PLAN, optimizer=[built, built], loss=of_anything)
    sw.parallelize(model, PLAN, optimizer=torch.optim.AdamW)
    sw.parallelize(model, PLAN, optimizer=lambda parameters: (built,), loss=lambda output, batch: output.mean())
    entropy = sw.VocabularyCrossEntropy(model.up)
    sw.parallelize(model, PLAN, optimizer=adamw, loss=lambda output, batch: entropy(output, batch["wanted"]))


def dict_of_losses(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": of_dicts(output, batch)}


def of_pairs(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, batch[1])


LossOfUsers: TypeAlias = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def takes_batches_of_all_kinds(model: Net, of_users: LossOfUsers) -> dict[str, float]:
    sw.parallelize(model, PLAN, optimizer=adamw, loss=of_users)
    sw.parallelize(model, PLAN, optimizer=adamw, loss=dict_of_losses, rows={"rows": 1, "table": None})
    sw.parallelize(model, PLAN, optimizer=adamw, loss=lambda output, batch: {"loss": output.mean(), "size": 2.0})
    sw.verify(Net, PLAN, [], optimizer=adamw, loss=dict_of_losses)
    engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=of_pairs)
    pair = (torch.ones(2, 4), torch.ones(2, 8))
    engine.step(torch.ones(2, 4))
    losses = engine.step([pair, pair]).losses
    report = engine.evaluate(pair, metrics={"mean": lambda output, batch: output.mean(1)})
    return {**losses, **report.metrics}


def own_loop(parallelize: Callable[..., sw.Engine[Net]]) -> None:
    parallelize(Net(), optimizer=adamw, loss=of_dicts).step({"rows": torch.ones(2, 4)})


def runs_ranks() -> None:
    assert_type(sw.simulate(2, trains), list[list[float]])
    assert_type(sw.simulate(2, lambda channel: channel.rank), list[int])
    assert_type(sw.Recorded(sw.default_channel()).calls[0].bytes_sent, int)
    assert_type(sw.Plan.parse(PLAN.text()), sw.Plan)
    assert_type(
        sw.verify(Net, PLAN, [{"rows": torch.ones(2, 4)}], optimizer=adamw, loss=of_dicts).verdict == "equal", bool
    )
    assert_type(sw.verify_program(own_loop, PLAN, steps=1).verdict == "equal", bool)


class Counted:
    """A state of the user's own, which knows settings too."""

    def __init__(self) -> None:
        self.values = torch.zeros(3)
        self.count = 0

    def state(self) -> dict[sw.Piece, torch.Tensor]:
        return {sw.Piece(name="values", dtype="float32", global_shape=(3,)): self.values}

    def settings(self) -> dict[str, int]:
        return {"count": self.count}


def saves(engine: sw.Engine, model: nn.Module, folder: Path, store: sw.checkpoint.Store) -> None:
    scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    sw.save(folder, engine, extra={"scheduler": scheduler.state_dict(), "step": 3})
    loaded = sw.load(store, engine, verify="first")
    scheduler.load_state_dict(loaded["scheduler"])
    assert_type(loaded.report.read_bytes, int)
    for state in (Counted(), model.state_dict(), dict(model.named_parameters()), Counted().state()):
        sw.save("s3://bucket/run", state, layout="whole")
    sw.save(folder, sw.checkpoint.TorchState(model, *engine.optimizers))
    with sw.checkpoint.AsyncSaver(folder) as saver:
        assert_type(saver, sw.checkpoint.AsyncSaver)
        saver.save(engine, extra={"step": 3})
    assert_type(sw.checkpoint.open(folder).tensors["up.weight"].shape, tuple[int, ...])
    assert_type(sw.full(engine, to=0), Iterator[tuple[str, torch.Tensor]])


def rewrites(rewrite: sw.Rewrite, model: nn.Module) -> None:
    shapes = {"q": (4, 4), "step": (), "k": ((2, 4), "bfloat16")}
    assert_type((rewrite >> rewrite).check(shapes).outputs["qk"].shape, tuple[int, ...])
    rewrite.check({"q": torch.ones(2, 3), "k": [2, 3]}, model.state_dict())
    both: dict[str, TensorLike] = {"q": torch.ones(2, 3), "k": (2, 3)}
    rewrite.inverse(both, lossy="allow")


def moves(held: dict[sw.Piece, torch.Tensor], wanted: Sequence[sw.Piece], channel: sw.Channel) -> None:
    assert_type(sw.reshard(held, dict.fromkeys(wanted), channel), dict[sw.Piece, torch.Tensor])
    one, tensor = wanted[0], torch.ones(3)
    assert_type(sw.reshard_tensor(tensor, one, one, channel), torch.Tensor)
    assert_type(sw.reshard_tensor([tensor], [one], [one], channel), tuple[torch.Tensor, ...])
    report = sw.stream(held, None, channel=channel, rewrite=sw.Rewrite("a -> b"))
    assert_type(sw.stream(None, {"w": tensor}, channel=channel, last=report), sw.checkpoint.StreamReport)


# Refused ---------------------------------------------------------------------------------------------------------


def of_the_output_alone(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def refuses_losses(model: Net, loss: dict[str, torch.Tensor]) -> None:
    sw.parallelize(model, PLAN, optimizer=adamw, loss=loss)  # type: ignore[arg-type]
    sw.parallelize(model, PLAN, optimizer=adamw, loss=loss["loss"])  # type: ignore[arg-type]
    sw.parallelize(model, PLAN, optimizer=adamw, loss_weight=lambda batch: "rows")  # type: ignore[arg-type, return-value]
    sw.verify(Net, PLAN, [], optimizer=adamw, loss=loss)  # type: ignore[arg-type]
    sw.verify_program(PLAN, PLAN)  # type: ignore[arg-type]


def refuses_models_and_optimizers(model: Net) -> None:
    sw.parallelize(Net, PLAN, optimizer=adamw)  # type: ignore[type-var]
    sw.parallelize(model, PLAN.mesh, optimizer=adamw)  # type: ignore[arg-type]
    sw.parallelize(model, PLAN)  # type: ignore[call-arg]
    sw.parallelize(model, PLAN, optimizer=model.parameters())  # type: ignore[arg-type]
    sw.parallelize(model, PLAN, optimizer=lambda parameters: parameters)  # type: ignore[arg-type, return-value]


def refuses_names() -> None:
    sw.parallelise  # type: ignore[attr-defined]  # noqa: B018
    sw.checkpoint.store  # type: ignore[attr-defined]  # noqa: B018


def refuses_batches(engine: sw.Engine) -> None:
    engine.evaluate({"rows": torch.ones(2, 4)}, metrics=[len])  # type: ignore[arg-type]
    engine.step({"rows": torch.ones(2, 4)}, microbatches="4")  # type: ignore[arg-type]
    engine.predict({"rows": torch.ones(2, 4)}, lambda inputs: inputs.step())  # type: ignore[attr-defined]
    engine.generate({"rows": torch.ones(2, 4)}, gather="never")  # type: ignore[arg-type]
    sw.verify(Net, PLAN, {"rows": torch.ones(2, 4)}, optimizer=adamw)  # type: ignore[arg-type]


def refuses_plans() -> None:
    sw.Plan("pp=2")  # type: ignore[arg-type, call-arg]
    sw.Plan(mesh="pp=2")  # type: ignore[arg-type]
    sw.Plan(sharding=2)  # type: ignore[arg-type]
    sw.Plan(average=0.999)  # type: ignore[arg-type]
    sw.Mesh(dp=2)  # type: ignore[call-arg]
    sw.Mesh(tp="2")  # type: ignore[arg-type]
    sw.Sharding(partition="halves")  # type: ignore[arg-type]
    sw.Sharding(owners="tp")  # type: ignore[arg-type]
    sw.Merge(microbatches="4")  # type: ignore[arg-type]
    sw.Precision(compute=torch.bfloat16)  # type: ignore[arg-type]
    sw.Pipeline(balance="work")  # type: ignore[arg-type]
    sw.Pipeline(stages={"up": "first"})  # type: ignore[dict-item]
    sw.Tensor(rules=["up"])  # type: ignore[arg-type]
    sw.Tensor(rules="column")  # type: ignore[arg-type]
    PLAN.clip_grad_norm = 2.0  # type: ignore[misc]


def refuses_ranks(engine: sw.Engine) -> None:
    sw.simulate(2, Net().forward)  # type: ignore[arg-type]
    sw.simulate(2, trains(sw.default_channel()))  # type: ignore[arg-type]
    sw.relayout(engine, PLAN.mesh)  # type: ignore[arg-type]
    sw.relayout(engine.model, PLAN)  # type: ignore[arg-type]


def refuses_states(engine: sw.Engine, model: Net, rewrite: sw.Rewrite) -> None:
    sw.save("runs", model)  # type: ignore[arg-type]
    sw.save("runs", {"model": model})  # type: ignore[arg-type]
    sw.save("runs", engine, layout="rows")  # type: ignore[arg-type]
    sw.save("runs", engine, extra=3)  # type: ignore[arg-type]
    sw.save("runs", engine, rewrite="a -> b")  # type: ignore[arg-type]
    sw.load("runs", engine, verify="last")  # type: ignore[arg-type]
    sw.load(3, engine)  # type: ignore[arg-type]
    rewrite.check({"a": 5})  # type: ignore[dict-item]
    rewrite.check({"a": "float32"})  # type: ignore[dict-item]
    rewrite.inverse(lossy="yes")  # type: ignore[arg-type]
    sw.reshard({"a": torch.ones(2)}, {}, engine.channel)  # type: ignore[dict-item]
