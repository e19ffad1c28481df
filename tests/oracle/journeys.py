"""One journey for each of some plans: all that an engine does, whose numbers are the same in any place.

Steps of several numbers of microbatches, evaluation, prediction, generation, averages, a save and a load, a relayout.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel

WORDS, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)  # its factor rounds nothing: devices multiply in another order
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(states.detach().square().mean())  # type: ignore[operator]
        out: torch.Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(states)))))
        return states + out


class Tied(nn.Module):
    """A head that is the embedding, values that several later stages read, and loops that decide by values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first = states = self.embedding(words)
        for number, block in enumerate(self.blocks):
            states = block(states) + (first if number % 2 else 0)
        out: torch.Tensor = self.head(states)
        return out

    @torch.no_grad()
    def generate(self, words: torch.Tensor, *, most: int) -> torch.Tensor:
        while words.size(1) < most and int(words[:, -1].sum()) % 7:
            words = torch.cat([words, self(words)[:, -1:].argmax(-1)], 1)
        return words


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss = nn.functional.cross_entropy(output.float().flatten(0, 1), batch["next"].flatten())
    return {"loss": loss, "largest": output.detach().float().amax()}


def optimizer_of(name: str) -> Callable[[Iterable[nn.Parameter]], Any]:
    def made(parameters: Iterable[nn.Parameter]) -> Any:
        listed = list(parameters)
        if name in ("adamw", "fused"):
            return torch.optim.AdamW(listed, lr=1e-2, fused=name == "fused" or None)
        matrices = [each for each in listed if each.dim() == 2 and WORDS not in each.shape]
        return [
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.AdamW([each for each in listed if not any(each is one for one in matrices)], lr=1e-2),
        ]

    return made


def words_of(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, 7), generator=torch.Generator().manual_seed(seed))


def share(engine: sw.Engine[Tied], seed: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """On the host in every second step, and cut to another length in every third."""
    words = words_of(seed + 100 * engine.plan.mesh.data_rank(engine.channel.rank), rows)
    words = words[:, : 7 - seed % 3]
    device = engine.channel.device if seed % 2 else torch.device("cpu")
    return {"words": words[:, :-1].to(device), "next": words[:, 1:].to(device)}


def journey(channel: Channel, text: str, other: str, optimizer: str, folder: Path) -> list[Any]:
    """Numbers of each thing that an engine does, and its state at the end."""
    plan = sw.Plan.parse(text)
    torch.manual_seed(0)
    engine = sw.parallelize(Tied(), plan, optimizer=optimizer_of(optimizer), loss=loss_of, channel=channel)
    found: list[Any] = []

    def step(seed: int, k: int | None = None) -> None:
        report = engine.step(share(engine, seed), microbatches=k)
        found.append((report.loss, report.losses, report.grad_norm, report.skipped))

    for seed, k in enumerate([None, None, None, 1, None, 4, 4]):
        step(seed, k)
        if seed in (1, 4):
            found.append(engine.evaluate(share(engine, seed, 4)).losses)
            found.append(float(engine.predict({"words": words_of(seed)}).double().sum()))
    if plan.mesh.tp == 1:
        found.append(engine.generate(words_of(3, 2)[:, :3], seed=1, most=6).tolist())
    step(7)
    if plan.average is not None:
        with engine.averaged():
            found.append(engine.evaluate(share(engine, 8)).loss)
    with engine.whole():
        found.append([float(each.detach().double().sum()) for each in engine.model.parameters()])
    sw.save(folder / "save", engine)
    step(8)
    sw.load(folder / "save", engine)
    step(8)
    engine = sw.relayout(engine, sw.Plan.parse(other))
    step(9)
    step(10)
    ranks = sw.exchange({"rank": channel.rank, "words": words_of(channel.rank, 1 + channel.rank)}, channel=channel)
    found.append([each["words"].tolist() for each in ranks])
    found.append({name: each.cpu() for name, each in sw.full(engine, optimizer=True)})
    return found


def same(one: Any, other: Any) -> bool:
    """Whether all numbers are equal in every bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    return bool(one == other)


def plan_of(
    mesh: str, *, stage: Any = 1, k: int = 2, schedule: str = "1f1b", offload: Any = None, **more: Any
) -> sw.Plan:
    made = sw.Mesh.parse(mesh)
    rules = sw.Tensor(rules={"blocks.*.up": "column", "blocks.*.down": "row"}) if made.tp > 1 else sw.Tensor()
    return sw.Plan(
        mesh=made,
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 << 10, offload=offload),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(schedule=schedule),
        tensor=rules,
        **{"clip_grad_norm": 0.5} | more,
    )


HALF = sw.Precision(compute="bfloat16", keep=("*norm*",))

JOURNEYS: dict[str, tuple[sw.Plan, str, str]] = {
    "pp": (plan_of("pp=2"), "dp_shard=2", "adamw"),
    "pp, fthenb, k=4": (plan_of("pp=2", schedule="fthenb", k=4), "pp=2", "adamw"),
    "stage 2": (
        plan_of("dp_shard=2", stage=2, average=sw.Average(decay=0.5), precision=sw.Precision(loss_scale="dynamic")),
        "pp=2",
        "adamw",
    ),
    "stage 3": (plan_of("dp_shard=2", stage=3, precision=HALF), "pp=2", "adamw"),
    # Fused on the host in any case, and so on CPU ranks: fused kernels round in another order.
    "stage 3, parameters on the host": (plan_of("dp_shard=2", stage=3, offload="parameters"), "pp=2", "fused"),
    "masters on the host": (
        plan_of("dp_shard=2", precision=HALF, offload="state", average=sw.Average(decay=0.5)),
        "pp=2",
        "fused",
    ),
    "matrices": (plan_of("dp_shard=2"), "pp=2", "muon"),
    "pp and stage 3": (plan_of("pp=2,dp_shard=2", stage=3, k=3), "dp_shard=4", "adamw"),
    "pp and stage 3, interleaved": (
        plan_of("pp=2,dp_shard=2", stage=3, schedule="interleaved", k=4),
        "pp=2,dp_shard=2",
        "adamw",
    ),
    "pp and tp": (plan_of("pp=2,tp=2", precision=HALF), "pp=2,dp_shard=2", "adamw"),
    "tp and stage 3": (plan_of("tp=2,dp_shard=2", stage=3), "pp=2,tp=2", "adamw"),
}
