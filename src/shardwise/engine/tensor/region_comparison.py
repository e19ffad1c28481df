"""One region, cut and whole: what the plan makes of it, beside what the module itself gives."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.engine.tensor.apart import CopiedInputs, ModuleRun, Parameters, Way, is_half, run_apart, widened
from shardwise.engine.tensor.differences import differ, factor_of, finest_eps, leaf_of, perturbed, rounded
from shardwise.engine.tensor.movements import Movements, taken
from shardwise.engine.wrapping import Forward
from shardwise.errors import in_words
from shardwise.plan.tensor_cuts import GROUPS, HEADS
from shardwise.plan.tensor_plan import CUTS_THE_MODULE, CutRegion, TensorPlan
from shardwise.space import even_cuts

Gather = Callable[[nn.Parameter], AbstractContextManager[None]]
"""Inside, the parameter has its values."""

_ATTEMPTS = 3
"""Times that a difference has to be seen, each with other parameters: a choice (of experts, say) may be a close one."""

_PURPOSE = "proof of tensor.rules"
_CLOSE = 100.0
"""Times the last digit that replicas may differ by, where kernels add in any order."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing can be said of a region by itself."""

    why: str


@dataclass(frozen=True, slots=True)
class _RegionDifference:
    """The largest over the ranks, with what rounding makes."""

    relative: float
    noise: float


class Comparison:
    """Runs a region both ways. Ranks along tp do it together; all see the same result."""

    def __init__(
        self,
        region: CutRegion,
        module: nn.Module,
        plan: TensorPlan,
        names: Mapping[nn.Parameter, str],
        channel: Channel,
        movements: Movements,
        gather: Gather | None,
    ) -> None:
        """names: of parameters, as the plan has them. gather: of parameters at rest; None: all have their values."""
        self.region = region
        self.module = module
        self._plan = plan
        self._names = names
        self._channel = channel
        self._movements = movements
        self._gather: Gather = gather or (lambda _: nullcontext())

    def verdict(self, forward: Forward, inputs: CopiedInputs, *, is_outermost: bool) -> Unknown | str | None:
        """None where cut and whole agree; else why not, or why nobody knows.

        forward: what the plan runs. is_outermost: no module around could be compared instead.
        """
        pair = self._shared(inputs)
        if isinstance(pair, Unknown):
            return pair
        # Gathered once: data ranks gather together (stage 3), and need other numbers of attempts.
        held = self._held()
        for trains in (False, True):
            found: _RegionDifference | Unknown | None = None
            for attempt in range(_ATTEMPTS):
                found = self._compare(forward, *pair, held, attempt, is_outermost=is_outermost, trains=trains)
                if not isinstance(found, _RegionDifference):
                    break
            if isinstance(found, Unknown) and not trains:
                return found
            if isinstance(found, _RegionDifference):
                if inputs.has_state:
                    return Unknown("each rank may have its own part of the tensors in an object that it is given")
                return self._refusal(found, "training mode without dropout" if trains else "evaluation mode")
        return None

    def _refusal(self, found: _RegionDifference, mode: str) -> str:
        return (
            f"tensor.rules: {self._named()} gives other numbers when it is cut. With whole parameters its output "
            f"differs by {found.relative:.1e} (relative, largest over the ranks along tp, in {mode}), and rounding "
            f"makes {found.noise:.1e}. {self._rules()} {self._advice()}"
        )

    def explanation(self, forward: Forward, inputs: CopiedInputs, error: str) -> str:
        """What to say of an error that only the cut module raises; empty for one that the whole module raises too.

        Other ranks are not asked, for they may go on. Whether the whole module runs is seen with any parameters of the
        right shapes, which take no memory.
        """
        stand_ins: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self.module.parameters():
            cut = self._plan.cuts.get(self._names[parameter])
            value = torch.full((), 1, dtype=parameter.dtype, device=parameter.device)
            stand_ins[parameter] = (value / 64).to(value.dtype).expand(parameter.shape if cut is None else cut.shape)
        if isinstance(self._try(forward, inputs, stand_ins, Way(is_cut=False, is_wide=False, trains=False)), str):
            return ""
        return (
            f"tensor.rules: {self._named()} fails when it is cut, and runs with whole parameters: {error}\n"
            f"{self._rules()} {self._advice()}"
        )

    # Values ---------------------------------------------------------------------------------------------------------

    def _shared(self, inputs: CopiedInputs) -> tuple[CopiedInputs, CopiedInputs] | Unknown:
        """Inputs for the whole module, and for this rank's part of it."""
        tensors = inputs.tensors
        mine = [[list(each.shape), str(each.dtype), digest_of_values(each)] for each in tensors]
        answers = self._told(mine)
        if any(len(each) != len(mine) for each in answers):
            return Unknown("the ranks give it other inputs")
        whole: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for tensor, each in zip(tensors, zip(*answers, strict=True), strict=True):
            shared = (tensor, tensor) if all(other == each[0] for other in each) else self._joined(tensor, each)
            if shared is None:
                return Unknown("each rank gives it other inputs")
            whole.append(shared[0])
            own.append(shared[1])
        return inputs.with_tensors(whole), inputs.with_tensors(own)

    def _joined(self, tensor: torch.Tensor, told: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Whole and own values of an input that has other bits on other ranks."""
        shapes = [tuple(shape) for shape, _, _ in told]
        if len({dtype for _, dtype, _ in told}) > 1:
            return None
        if len(set(shapes)) == 1 and tensor.is_floating_point():
            every = self._movements.gathered(tensor)
            if differ(list(every), [every[0]] * len(every)) <= _CLOSE * torch.finfo(tensor.dtype).eps:
                return every[0], every[0]
        for dim in self.region.dims:
            rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
            if dim >= tensor.dim() or len(rests) > 1:
                continue
            cuts = even_cuts(sum(shape[dim] for shape in shapes), len(shapes))
            if [stop - start for start, stop in cuts] == [shape[dim] for shape in shapes]:
                return self._movements.whole(tensor, dim, [(each,) for each in cuts]), tensor
        return None

    def _held(self) -> Parameters:
        """Copies of this rank's parameters."""
        held = {}
        for parameter in self.module.parameters():
            with self._gather(parameter):
                held[parameter] = parameter.detach().clone()
        return held

    def _parameters(self, held: Parameters, attempt: int, *, is_wide: bool) -> tuple[Parameters, Parameters]:
        """Whole ones, and this rank's portions of them: the same changed values."""
        whole: dict[nn.Parameter, torch.Tensor] = {}
        own: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, local in held.items():
            name = self._names[parameter]
            value = widened(local) if is_wide else local
            cut = self._plan.cuts.get(name)
            if cut is not None:
                value = self._movements.whole(value, cut.dim, cut.ranges)
            whole[parameter] = value = perturbed(value, name, attempt)
            portion = value if cut is None else taken(value, cut.dim, cut.ranges[self._channel.rank])
            own[parameter] = portion.contiguous()
        return whole, own

    # Both ways ------------------------------------------------------------------------------------------------------

    def _compare(
        self,
        forward: Forward,
        whole: CopiedInputs,
        own: CopiedInputs,
        held: Parameters,
        attempt: int,
        *,
        is_outermost: bool,
        trains: bool,
    ) -> _RegionDifference | Unknown | None:
        """None where cut and whole agree, or where `trains` and chance is in what the module computes."""
        problem = ""
        for is_wide in (True, False) if self._has_halves(whole) else (True,):
            parameters, portions = self._parameters(held, attempt, is_wide=is_wide)
            uncut = Way(is_cut=False, is_wide=is_wide, trains=trains)
            expected = self._try(forward, whole, parameters, uncut)
            problem = next(filter(None, self._told(expected if isinstance(expected, str) else "")), "")
            if problem or isinstance(expected, str):
                continue
            if trains and any(self._told(expected.drew)):
                return None
            made = self._try(forward, own, portions, uncut._replace(is_cut=True))
            told = self._told(
                [made, []] if isinstance(made, str) else ["", [list(each.shape) for each in made.tensors]]
            )
            failure = next((each for each, _ in told if each), "")
            if failure or isinstance(made, str):
                return Unknown(f"it runs, and fails in evaluation mode ({failure})")
            shapes = [[tuple(shape) for shape in each] for _, each in told]
            if any(len(each) != len(expected.tensors) for each in shapes):
                return Unknown("it gives another number of tensors when it is cut")
            pairs = self._pairs(made.tensors, expected.tensors, shapes)
            compared = [pair for pair in pairs if pair is not None]
            if not compared or (len(compared) < len(pairs) and not is_outermost):
                return Unknown("it gives tensors of which each rank has its own part")
            relative = max(self._told(differ(*map(list, zip(*compared, strict=True)))))
            finest = finest_eps(expected.tensors)
            if relative <= 4 * finest:
                return None
            inexact, values = rounded(whole, parameters, expected.eps)
            again = self._try(forward, inexact, values, uncut)
            others = [] if isinstance(again, str) else again.tensors
            is_alike = len(others) == len(expected.tensors)
            noise = max(finest, *self._told(differ(others, expected.tensors) if is_alike else 0.0))
            return None if relative <= factor_of(expected.eps) * noise else _RegionDifference(relative, noise)
        return Unknown(f"it does not run by itself with whole parameters ({problem})")

    def _try(self, forward: Forward, inputs: CopiedInputs, parameters: Parameters, way: Way) -> ModuleRun | str:
        """What the module gives, or what it raises."""
        try:
            return run_apart(self.module, forward, inputs, parameters, way)
        except Exception as error:  # whatever a module raises
            return in_words(error)

    def _pairs(
        self,
        made: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[tuple[int, ...]]],
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """For each tensor what it is compared with; None for one of which the rank has a part that nobody knows."""
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for at, (cut, whole) in enumerate(zip(made, expected, strict=True)):
            kind, other = leaf_of(cut, whole, [each[at] for each in shapes], self._channel.rank)
            # What a module gives first is what the modules behind it read; the rest may be there to look at only.
            pairs.append((cut, other) if kind == "alike" or (kind == "part" and at == 0) else None)
        return pairs

    def _has_halves(self, inputs: CopiedInputs) -> bool:
        return any(is_half(each) for each in (*self.module.parameters(), *inputs.tensors))

    def _told(self, value: Any) -> list[Any]:
        """Every rank's value."""
        answers = self._channel.exchange(json.dumps(value).encode(), purpose=_PURPOSE)
        return [json.loads(each) for each in answers]

    # Words ----------------------------------------------------------------------------------------------------------

    def _named(self) -> str:
        name = repr(self.region.name) if self.region.name else "the model itself"
        return f"{name} ({type(self.module).__name__})"

    def _rules(self) -> str:
        listed = [f"{name!r}: {', '.join(style.kind for style in held)}" for name, held in self.region.styles.items()]
        held = [self._names[each] for each in self.module.parameters() if self._names[each] in self._plan.cuts]
        listed += [
            f"{name!r}: cut along dim {self._plan.cuts[name].dim}"
            for name in held
            if not any(style.kind in CUTS_THE_MODULE for style in self._plan.styles.get(name.rpartition(".")[0], ()))
        ]
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        return f"What the rules do in it: {'; '.join(listed[:8])}{more}."

    def _advice(self) -> str:
        counting = [
            ".".join(filter(None, (self.region.name, name)))
            for name, each in self.module.named_modules()
            if any(type(vars(each).get(word)) is int for word in HEADS + GROUPS)
            and not any(
                style.kind == "heads"
                for style in self.region.styles.get(".".join(filter(None, (self.region.name, name))), ())
            )
        ]
        heads = f"; {counting[0]!r} counts heads in attributes: try the rule 'heads' for it" if counting else ""
        return (
            "Where a mean, a norm or a softmax reads a dim that is cut, give the map before it 'colwise_gather_output' "
            "or 'replicate'; where a parameter holds parts side by side, say parts=, and leave it whole ('replicate') "
            f"where they alternate{heads}. Rules that are given beat the plan that a model carries. "
            "sw.Tensor(prove=False) (tensor.prove = false) trains without this comparison"
        )
