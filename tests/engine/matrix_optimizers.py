"""Optimizers of whole matrices as users bring them, in the forms that their authors gave them, and what shows them.

They are written for these tests, with the traits that matter here: which shapes they look at, what they keep and where,
when they begin, and how they tell parameters apart.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.plan.nested_state import flat_state
from tests.checkpoint.layouts import assembled


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


class AuxiliaryMuon(torch.optim.Optimizer):
    """Muon with Adam inside (Jordan's muon.py): groups say which, by `use_muon`, and differ in their settings."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if group["use_muon"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["momentum"])
                    way = orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                    way *= max(1, parameter.size(-2) / parameter.size(-1)) ** 0.5
                else:
                    way = adam(state, parameter.grad)
                parameter.sub_(way, alpha=group["lr"])


class FlaggedMuon(torch.optim.Optimizer):
    """Muon that notes in the state which parameters it is for, when it is built (Moonlight's): one group, two kinds."""

    def __init__(self, lr: float, muon_params: Iterable[nn.Parameter], adamw_params: Iterable[nn.Parameter]) -> None:
        matrices, others = list(muon_params), list(adamw_params)
        super().__init__([*others, *matrices], {"lr": lr, "wd": 0.1})
        for parameter in [*others, *matrices]:
            self.state[parameter]["use_muon"] = any(parameter is each for each in matrices)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                parameter.data.mul_(1 - group["lr"] * group["wd"])
                if state["use_muon"]:
                    flat = gradient.flatten(1)
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(flat))
                    momentum.mul_(0.9).add_(flat)
                    # The root mean square of AdamW's updates.
                    rate = group["lr"] * 0.2 * math.sqrt(max(flat.shape))
                    parameter.data.sub_(orthogonal(flat.add(momentum, alpha=0.9)).view(parameter.shape), alpha=rate)
                else:
                    parameter.data.sub_(adam(state, gradient), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Shampoo (Gupta et al., 2018, arXiv:1802.09568) with a late begin: factors in a list, a count made by steps."""

    def __init__(self, params: Any, lr: float, begin: int = 2, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "begin": begin, "every": every})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.state["of all"] = {"steps": group["step"]}  # type: ignore[index]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    eyes = [torch.eye(size, dtype=gradient.dtype) for size in gradient.shape]
                    state["factors"] = [1e-4 * each for each in eyes]
                    state["roots"] = tuple(eyes)
                    state["kept"] = {"clipped": 0, "shape": gradient.shape, "best": None}
                for at, factor in enumerate(state["factors"]):
                    flat = gradient.movedim(at, 0).reshape(len(factor), -1)
                    factor.add_(flat @ flat.mT)
                if group["step"] >= group["begin"]:
                    if group["step"] % group["every"] == 0:
                        state["roots"] = tuple(self._root(each, gradient.ndim) for each in state["factors"])
                    for at, root in enumerate(state["roots"]):
                        moved = gradient.movedim(at, 0)
                        gradient = (root @ moved.reshape(len(root), -1)).view(moved.shape).movedim(0, at)
                parameter.sub_(gradient, alpha=group["lr"])

    @staticmethod
    def _root(factor: torch.Tensor, dims: int) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(factor)
        root: torch.Tensor = (vectors * values.clamp(min=1e-6) ** (-1 / (2 * dims))) @ vectors.mT
        return root


class Soap(torch.optim.Optimizer):
    """SOAP (Vyas et al., 2024, arXiv:2409.11321): the first step only begins; bases are kept, or [] for long dims."""

    def __init__(self, params: Any, lr: float, every: int = 2, longest: int = 20) -> None:
        super().__init__(params, {"lr": lr, "every": every, "longest": longest})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, parameter.grad = parameter.grad, None
                state = self.state[parameter]
                if "step" not in state:
                    sizes = gradient.shape if gradient.ndim > 1 else ()
                    state.update(step=0, Q=None, every=group["every"], beta=0.95)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                    state["GG"] = [
                        torch.zeros(size, size, dtype=gradient.dtype) if size <= group["longest"] else []
                        for size in sizes
                    ] or [[]]
                    self._gather(state, gradient)
                    if sizes:  # vectors have none
                        # In the order of rows, as a save keeps it: products of other strides may be rounded otherwise.
                        state["Q"] = [
                            torch.linalg.eigh(each)[1].contiguous() if len(each) else [] for each in state["GG"]
                        ]
                    continue
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].lerp_(self._turned(gradient, state["Q"], back=False).square(), 0.05)
                mean = self._turned(state["exp_avg"], state["Q"], back=False)
                way = self._turned(mean / (state["exp_avg_sq"].sqrt() + 1e-8), state["Q"], back=True)
                parameter.sub_(way, alpha=group["lr"])
                self._gather(state, gradient)
                if state["Q"] is not None and state["step"] % state["every"] == 0:
                    state["Q"] = [
                        torch.linalg.qr(each @ basis)[0].contiguous() if len(each) else []
                        for each, basis in zip(state["GG"], state["Q"], strict=True)
                    ]

    @staticmethod
    def _gather(state: dict[str, Any], gradient: torch.Tensor) -> None:
        for at, each in enumerate(state["GG"]):
            if len(each):
                flat = gradient.movedim(at, 0).flatten(1)
                each.lerp_(flat @ flat.mT, 1 - state["beta"])

    @staticmethod
    def _turned(matrix: torch.Tensor, bases: list[Any] | None, *, back: bool) -> torch.Tensor:
        for at, basis in enumerate(bases or ()):
            if len(basis):
                moved = matrix.movedim(at, 0)
                turned = (basis if back else basis.mT) @ moved.flatten(1)
                matrix = turned.view(moved.shape).movedim(0, at)
        return matrix


class Sights(nn.Module):
    """A conv, square matrices cut along tp, one with a long dim, vectors, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.first = nn.Linear(36, 8, bias=False)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(torch.tanh(self.conv(x)).flatten(1))
        out: torch.Tensor = self.head(hidden + self.down(torch.tanh(self.up(hidden))))
        return out


def sights() -> Sights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sights()


def apart(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and what is none."""
    every = list(model.parameters())
    return [each for each in every if each.ndim > 1], [each for each in every if each.ndim < 2]


def auxiliary_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = apart(model)
    return AuxiliaryMuon(
        [
            {"params": others, "use_muon": False, "lr": 0.01, "weight_decay": 0.1},
            {"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
        ]
    )


def hf_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=None, scale_parameter=True, relative_step=True, warmup_init=True)  # type: ignore[no-untyped-call]


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "auxiliary muon": auxiliary_muon,
    "flagged muon": lambda model: FlaggedMuon(0.02, *apart(model)),
    "shampoo": lambda model: Shampoo(model.parameters(), lr=0.05),
    "soap": lambda model: Soap(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1),
    "adafactor of transformers": hf_adafactor,
}


def batch_of(seed: int, rows: int = 14) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *size, generator=generator) for name, size in (("x", (1, 4, 5)), ("y", (5,)))}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (output.float() - batch["y"]).square().mean()


def plan_of(mesh: str, sharding: Mapping[str, Any] | None = None, **settings: Any) -> sw.Plan:
    axes = sw.Mesh.parse(mesh)
    stages = {"conv": 0, "first": 0, "up": 0, "down": 0, "unused": 1, "head": 1}
    return sw.Plan(
        mesh=axes,
        sharding=sw.Sharding(**{"bucket_bytes": 400, **(sharding or {})}),
        tensor=sw.Tensor(rules={"up": "column", "down": "row"} if axes.tp > 1 else None),
        pipeline=sw.Pipeline(stages=stages) if axes.pp > 1 else sw.Pipeline(),
        **settings,
    )


def engine_of(channel: sw.Channel, plan: sw.Plan, make: Make) -> sw.Engine:
    model = sights()
    return sw.parallelize(model, plan, optimizer=make(model), loss=loss_of, channel=channel)


def stepped(engine: sw.Engine, channel: sw.Channel, seed: int) -> float:
    """One update on this rank's share of a batch."""
    mesh = engine.plan.mesh
    share = {
        name: each.tensor_split(mesh.num_data_ranks)[mesh.data_rank(channel.rank)]
        for name, each in batch_of(seed).items()
    }
    return engine.step(share).loss


Pieces = dict[sw.Piece, torch.Tensor]
Seen = list[tuple[Pieces, Pieces]]
"""For each step gradients and the state after it, of one rank."""


def seen(engine: sw.Engine) -> tuple[Pieces, Pieces]:
    gradients, state = engine.gradients(), engine.state()
    return (
        {piece: each.detach().clone() for piece, each in gradients.items()},
        {piece: each.detach().clone() for piece, each in state.items()},
    )


class Plain:
    """The optimizer in one process, stepped on the gradients that ranks report."""

    def __init__(self, make: Make) -> None:
        self.model = sights()
        self.named = dict(self.model.named_parameters())
        self.optimizer = make(self.model)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.named.items():
            parameter.grad = gradients[name].view(parameter.shape).clone() if name in gradients else None
        self.named["unused.weight"].grad = None
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Under the names of a checkpoint."""
        found = {}
        for name, parameter in self.named.items():
            for key, value in flat_state(self.optimizer.state.get(parameter, {})).items():
                if value is not None:
                    dtype = torch.float64 if type(value) is float else None
                    found[f"optimizer/{name}/{key}"] = torch.as_tensor(value, dtype=dtype)
        return found


def assert_is_plain(ranks: Sequence[Seen], plain: Plain) -> None:
    """Masters and states of all ranks have the bits of the plain optimizer's after each step; there are no others."""
    for step in range(len(ranks[0])):
        plain.step(assembled(rank[step][0] for rank in ranks))
        state = assembled(rank[step][1] for rank in ranks)
        for name, parameter in plain.named.items():
            master = state.get(f"optimizer/{name}/master", state[name])
            assert torch.equal(master, parameter.detach().reshape(-1)), (step, name)
        expected = plain.state()
        got = {name for name in state if name.startswith("optimizer/") and not name.endswith("/master")}
        assert got == expected.keys(), step
        for name, value in expected.items():
            assert torch.equal(state[name], value.reshape(-1).to(state[name].dtype)), (step, name)
