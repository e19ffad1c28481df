"""Optimizers of whole matrices as users bring them, in the forms that their authors gave them, and what shows them.

They are written for these tests, with the traits that matter here: which shapes they look at, what they keep and where,
when they begin, and how they tell parameters apart. The oracle is the optimizer in one process, stepped on the
gradients that ranks report: that these are right is a matter of the layouts' own tests.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.plan.optimizer_entries import flat_state
from tests.checkpoint.layouts import assembled
from tests.engine.loops import plan_of, share
from tests.engine.packed_models import Codes
from tests.oracle.program import seeded


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz in bfloat16 (Jordan, 2024): conv weights as matrices."""
    x = matrix.flatten(1).bfloat16()
    tall = x.size(0) > x.size(1)
    x = (x.mT if tall else x) / (x.norm() + 1e-7)
    for _ in range(3):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    out: torch.Tensor = (x.mT if tall else x).view(matrix.shape).to(matrix.dtype)
    return out


def adam(state: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
    """The direction of Adam; the count is a number of Python."""
    if "step" not in state:
        state.update(step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 0.1)
    state["exp_avg_sq"].lerp_(gradient.square(), 0.05)
    mean = state["exp_avg"] / (1 - 0.9 ** state["step"])
    way: torch.Tensor = mean / ((state["exp_avg_sq"] / (1 - 0.95 ** state["step"])).sqrt() + 1e-8)
    return way


class Own(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by `way`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    way = self.way(group, parameter, parameter.grad, self.state[parameter])
                    if way is not None:
                        parameter.sub_(way, alpha=group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        """What a step does for a whole group."""

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        raise NotImplementedError


class Normed(Own):
    """Steps of a length that follows the norm of a parameter (as LAMB's), or of all of them; by a share of it."""

    def __init__(self, parameters: Any, lr: float, *, of_all: bool = False, share: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.of_all, self.share, self.norm = of_all, share, 0.0

    def begin(self, group: dict[str, Any]) -> None:
        if self.of_all:
            self.norm = math.hypot(*(float(each.norm()) for each in group["params"] if each.grad is not None))

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return gradient * (1 - self.share + self.share * (self.norm if self.of_all else float(parameter.norm())))


class AuxiliaryMuon(Own):
    """Muon with Adam inside (Jordan's muon.py): groups say which, by `use_muon`, and differ in their settings."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if not group["use_muon"]:
            return adam(state, gradient)
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        momentum.lerp_(gradient, 1 - group["momentum"])
        shape = max(1, parameter.size(-2) / parameter.size(-1)) ** 0.5
        return orthogonal(gradient.lerp(momentum, group["momentum"])) * shape


class Flagged(Own):
    """Notes in the state which parameters are matrices, when it is built (as Moonlight's Muon does)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.02})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["is_matrix"] = parameter.ndim > 1

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return orthogonal(gradient) if state["is_matrix"] else adam(state, gradient)


class Shampoo(Own):
    """Shampoo (Gupta et al., 2018, arXiv:1802.09568) with a late begin: factors in a list, a count made by steps.

    As in SOAP (Vyas et al., 2024, arXiv:2409.11321), long dims have [] for a factor, and gradients are let go at once.
    """

    def __init__(self, params: Any, lr: float, begin: int = 2, every: int = 2, longest: int = 20) -> None:
        super().__init__(params, {"lr": lr, "begin": begin, "every": every, "longest": longest})

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        self.state["of all"] = {"steps": group["step"]}  # type: ignore[index]

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        parameter.grad = None
        if not state:
            sizes = gradient.shape
            eyes: list[Any] = [torch.eye(n, dtype=gradient.dtype) if n <= group["longest"] else [] for n in sizes]
            state["factors"] = [1e-4 * each if len(each) else [] for each in eyes]
            state["roots"] = tuple(eyes)
            state["kept"] = {"clipped": 0, "shape": sizes, "best": None, "decay": 0.95}
        used = [at for at, each in enumerate(state["factors"]) if len(each)]
        for at in used:
            flat = gradient.movedim(at, 0).reshape(gradient.shape[at], -1)
            state["factors"][at].add_(flat @ flat.mT)
        if group["step"] >= group["begin"]:
            if group["step"] % group["every"] == 0:
                roots: list[Any] = [root_of(each, gradient.ndim) if len(each) else [] for each in state["factors"]]
                state["roots"] = tuple(roots)
            for at in used:
                moved = gradient.movedim(at, 0)
                gradient = (state["roots"][at] @ moved.reshape(len(moved), -1)).view(moved.shape).movedim(0, at)
        return gradient


def root_of(factor: torch.Tensor, dims: int) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(factor)
    root: torch.Tensor = (vectors * values.clamp(min=1e-6) ** (-1 / (2 * dims))) @ vectors.mT
    return root


class BlockMomentum(Own):
    """Momentum in int8 with a scale per block, in a tensor around them, of parameters that are not small."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        if parameter.numel() < 100:
            state["momentum"] = momentum = state.get("momentum", 0) * 0.9 + gradient
            return torch.as_tensor(momentum)
        blocks = gradient.reshape(-1, 20)
        if state:
            held = state["momentum"]
            blocks = blocks + 0.9 * held.codes.reshape(-1, 20) * held.scale
        scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        codes = (blocks / scale).round().to(torch.int8).view(parameter.shape)
        state["momentum"] = Codes(codes, scale, torch.float32)
        return (codes.reshape(-1, 20) * scale).view(parameter.shape)


class Sights(nn.Module):
    """A conv, matrices that are cut along tp, one with a long dim, vectors, one without a gradient, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.first = nn.Linear(36, 10, bias=False)
        self.mix = nn.Linear(10, 20)
        self.down = nn.Linear(10, 10, bias=False)
        self.unused = nn.Linear(3, 4, bias=False)
        self.fixed = nn.Linear(10, 10, bias=False).requires_grad_(False)
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(torch.tanh(self.conv(x)).flatten(1))
        gate, up = self.mix(hidden).chunk(2, -1)
        out: torch.Tensor = self.head(torch.tanh(self.fixed(hidden + self.down(torch.tanh(gate) * up))))
        return out


sights = seeded(Sights)
STAGES = {"conv": 0, "first": 0, "mix": 0, "down": 0, "unused": 1, "fixed": 1, "head": 1}
RULES = {"mix": "packed_colwise", "down": "row"}
"""`mix` is cut into two boxes on a rank; `first` and `unused` are whole on all ranks along tp."""
GROUPS = {"inner": ("mix", "down"), "outer": ("conv", "first", "head")}


def apart(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and what is none."""
    every = [each for each in model.parameters() if each.requires_grad]
    return [each for each in every if each.ndim > 1], [each for each in every if each.ndim < 2]


def auxiliary_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = apart(model)
    settings = {"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    return AuxiliaryMuon([{"params": others, "use_muon": False, "lr": 0.01, "weight_decay": 0.1}, settings])


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own; what is no matrix of a hidden layer goes to AdamW."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    inner = [each for name, each in named if each.ndim == 2 and "head" not in name]
    others = [each for name, each in named if each.ndim != 2 or "head" in name]
    return [torch.optim.Muon(inner, lr=0.02, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def in_8_bits(model: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit  # seconds, which to collect tests does not take

    made: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=100)
    return made


Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, Make] = {
    "auxiliary muon": auxiliary_muon,
    "flagged": lambda model: Flagged(each for each in model.parameters() if each.requires_grad),
    "shampoo": lambda model: Shampoo(model.parameters(), lr=0.05),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1),
    "bitsandbytes": in_8_bits,
    "blocks": lambda model: BlockMomentum(model.parameters()),
}


def batch_of(seed: int, rows: int = 14) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *size, generator=generator) for name, size in (("x", (1, 4, 5)), ("y", (5,)))}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (output.float() - batch["y"]).square().mean()


def layout(mesh: str, stage: int = 1, k: int = 1, *, sharding: Mapping[str, Any] = {}, **settings: Any) -> sw.Plan:
    return plan_of(mesh, stage, k, rules=RULES, stages=STAGES, sharding={"bucket_bytes": 400, **sharding}, **settings)


def engine_of(channel: sw.Channel, plan: sw.Plan, make: Make, **settings: Any) -> Any:
    model = sights()
    return sw.parallelize(model, plan, optimizer=make(model), loss=loss_of, channel=channel, **settings)


Pieces = dict[sw.Piece, torch.Tensor]
Seen = list[tuple[Pieces, Pieces]]
"""For each step gradients and the state after it, of one rank."""


def stepped(engine: Any, seed: int, *, spoiled: bool = False, **settings: Any) -> tuple[Pieces, Pieces]:
    """One update on this rank's share of a batch."""
    given = share(engine, batch_of(seed))
    engine.step({**given, "y": given["y"] * math.inf} if spoiled else given, **settings)
    gradients, state = engine.gradients(), engine.state()
    return (
        {piece: each.detach().cpu().clone() for piece, each in gradients.items()},
        {piece: each.detach().cpu().clone() for piece, each in state.items()},
    )


class Plain:
    """The optimizers in one process, stepped on the gradients that ranks report."""

    def __init__(self, make: Make) -> None:
        self.model = sights()
        self.named = dict(self.model.named_parameters())
        made = make(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.averages: dict[str, torch.Tensor] = {}

    def step(self, gradients: Mapping[str, torch.Tensor], *, skips: bool) -> None:
        for name, parameter in self.named.items():
            parameter.grad = gradients[name].view(parameter.shape).clone() if name in gradients else None
        for name in ("unused.weight", "fixed.weight"):
            self.named[name].grad = None
        for each in self.optimizers if not skips else ():
            each.step()
        for name, parameter in self.named.items():
            value = parameter.detach().reshape(-1)
            self.averages[name] = self.averages[name].lerp(value, 0.5) if name in self.averages else value.clone()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under the names of a checkpoint."""
        for name, parameter in self.named.items():
            for optimizer in self.optimizers:
                flat = flat_state(optimizer.state.get(parameter, {}))
                packed = {key: each for key, each in flat.items() if isinstance(each, Codes)}
                inner = {f"{key}.{name}": vars(each)[name] for key, each in packed.items() for name in vars(each)}
                for key, value in {**flat, **inner}.items():
                    if value is not None and key not in packed:
                        dtype = torch.float64 if type(value) is float else None
                        yield f"optimizer/{name}/{key}", torch.as_tensor(value, dtype=dtype)


def assert_is_plain(
    ranks: Sequence[Seen], plain: Plain, *, spoiled: int = -1, near: Callable[[str], bool] = lambda name: False
) -> None:
    """Masters, averages and states of all ranks have the bits of the plain optimizer's after each step; no others.

    near: what is compared to rounding.
    """

    def same(one: torch.Tensor, other: torch.Tensor, name: str) -> bool:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-8) if near(name) else torch.equal(one, other)

    for step in range(len(ranks[0])):
        plain.step(assembled(rank[step][0] for rank in ranks), skips=step == spoiled)
        state = assembled(rank[step][1] for rank in ranks)
        for name, parameter in plain.named.items():
            master = state.get(f"optimizer/{name}/master", state[name])
            assert same(master, parameter.detach().reshape(-1), name), (step, name)
            average = state.get(f"optimizer/{name}/weight_average", plain.averages[name])
            assert same(average, plain.averages[name], name), (step, name)
        expected = dict(plain.state())
        got = {name for name in state if name.startswith("optimizer/")}
        got = {name for name in got if not name.endswith(("/master", "/weight_average"))}
        assert got == expected.keys(), step
        for name, value in expected.items():
            assert same(state[name], value.reshape(-1).to(state[name].dtype), name.split("/")[1]), (step, name)


def deep(channel: sw.Channel) -> dict[str, torch.Tensor]:
    """Masters after steps of more rounds than shared memory has room for, and of rounds that are far apart."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12))))()
    rules = {str(at): "column" if at % 2 == 0 else "row" for at in range(12)}
    engine = sw.parallelize(
        model,
        plan_of("tp=2", rules=rules, sharding={"bucket_bytes": 1 << 16}, compute="bfloat16"),
        optimizer=torch.optim.Muon(model.parameters(), lr=0.02),
        loss=lambda output, batch: output.float().square().mean(),
        channel=channel,
        groups={"back": ("10", "11"), "ends": ("0", "1", "10", "11"), "third": ("0", "1", "6", "7")},
    )
    for step, only in enumerate((None, "back", "ends", "third", None)):
        engine.step({"input": torch.ones(2, 256) * (step + 1)}, only=only)
    return {piece.name: each.clone() for piece, each in engine.state().items() if piece.name.endswith("master")}
