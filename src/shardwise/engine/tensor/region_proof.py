"""One region, cut and whole: what the plan makes of it, beside what the module itself gives."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.engine.autograd_state import in_backward
from shardwise.engine.pipeline.nested import tensors_in
from shardwise.engine.tensor.isolated_runs import (
    CopiedInputs,
    ModuleRun,
    Parameters,
    Way,
    differ,
    factor_of,
    finest_eps,
    is_half,
    leaf_of,
    perturbed,
    rounded,
    run_apart,
    widened,
)
from shardwise.engine.tensor.styles import note_on
from shardwise.engine.tensor.tp_collectives import TpCollectives, is_fake, taken, uncompiled
from shardwise.engine.wrapping import Forward, take_off, wrap
from shardwise.errors import ModelError, ShardwiseError, in_words
from shardwise.plan.tensor_heads import GROUPS, HEADS
from shardwise.plan.tensor_plan import TensorPlan
from shardwise.plan.tensor_regions import CUTS_THE_MODULE, CutRegion, regions_of
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
        collectives: TpCollectives,
        gather: Gather | None,
    ) -> None:
        """names: of parameters, as the plan has them. gather: of parameters at rest; None: all have their values."""
        self.region = region
        self.module = module
        self._plan = plan
        self._names = names
        self._channel = channel
        self._collectives = collectives
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
            every = self._collectives.gathered(tensor)
            if differ(list(every), [every[0]] * len(every)) <= _CLOSE * torch.finfo(tensor.dtype).eps:
                return every[0], every[0]
        for dim in self.region.dims:
            rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
            if dim >= tensor.dim() or len(rests) > 1:
                continue
            cuts = even_cuts(sum(shape[dim] for shape in shapes), len(shapes))
            if [stop - start for start, stop in cuts] == [shape[dim] for shape in shapes]:
                return self._collectives.all_gather(tensor, dim, [(each,) for each in cuts]), tensor
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
                value = self._collectives.all_gather(value, cut.dim, cut.ranges)
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


State = Literal["waiting", "standby", "done"]


class Proof:
    """What has been proved of a plan, and what it refuses."""

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        channel: Channel,
        *,
        world: Channel,
        gather: Gather | None = None,
        is_followed: Callable[[], bool] = lambda: False,
        is_local: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """channel: along tp. gather: see `Comparison`. is_followed: whether data ranks that gather too skip what
        runs now; nothing is proved then. is_local: whether a module runs as one on this rank."""
        self.unproved: dict[str, str] = {}
        """Modules that could not be compared, and why."""
        self.is_at_work = False
        """Whether modules run for the proof's sake."""
        self.is_followed = is_followed
        self._model = model
        self._channel = channel
        self._world = world
        self._has_styles = bool(plan.styles)
        self._has_agreed = False
        self._refusals: list[str] = []
        self._warned: set[str] = set()
        self._watched: list[_RegionWatch] = []
        self._calls: list[_RegionWatch] = []
        names = {parameter: name for name, parameter in model.named_parameters()}
        collectives = TpCollectives(channel, "proof of tensor.rules")
        for region in regions_of(plan):
            if is_local(region.name):
                module = model.get_submodule(region.name)
                comparison = Comparison(region, module, plan, names, channel, collectives, gather)
                self._watched.append(_RegionWatch(self, comparison))
                wrap(module, self._watched[-1])
            elif region.is_needed:
                self.unproved[region.name] = "it runs on several stages of the pipeline"

    @contextmanager
    def calling(self, watch: "_RegionWatch") -> Iterator[None]:
        """The watched module runs."""
        self._calls.append(watch)
        try:
            yield
        finally:
            self._calls.pop()

    def compare(self, watch: "_RegionWatch", forward: Forward, inputs: CopiedInputs | Unknown) -> None:
        """Prove a region; a refusal is kept until all ranks are asked."""
        around = next((each for each in reversed(self._calls) if each is not watch), None)
        verdict: Unknown | str | None = None
        if isinstance(inputs, Unknown):
            verdict = inputs
        else:
            with self._working():
                verdict = watch.comparison.verdict(forward, inputs, is_outermost=around is None)
        if isinstance(verdict, str):
            self._refusals.append(verdict)
        elif verdict is not None and around is not None:
            around.state = "waiting"
        elif verdict is not None:
            self.unproved[watch.comparison.region.name] = verdict.why

    def explain(self, watch: "_RegionWatch", forward: Forward, inputs: CopiedInputs, error: Exception) -> None:
        """Raise ModelError for an error of a forward that the whole module does not raise."""
        with self._working():
            text = watch.comparison.explanation(
                forward, inputs, f"{error}\n{note_on(self._model, error) or ''}".strip()
            )
        if text:
            raise ModelError(text) from error

    @contextmanager
    def judging(self, *, by_all: bool) -> Iterator[None]:
        """Modules run inside. Raises ModelError for what is refused, also in the place of an error that follows it.

        The whole world agrees the first time that it asks together (`by_all`). What needs no proof any more runs
        unwatched from then on.
        """
        try:
            yield
        except ShardwiseError:
            raise
        except Exception as error:
            if self._refusals:
                raise ModelError(self._refusals[0]) from error
            raise
        self._judge(by_all=by_all)

    def _judge(self, *, by_all: bool) -> None:
        refusals = self._refusals[:1]
        if by_all and self._has_styles and not self._has_agreed:
            self._has_agreed = True
            mine = "".join(refusals).encode()
            answers = self._world.exchange(mine, purpose="verdict on the proof of tensor.rules")
            refusals = [each.decode() for each in answers if each]
        if refusals:
            raise ModelError(refusals[0])
        for watch in self._watched:
            if watch.state != "waiting":
                watch.state = "done"
                take_off(watch.comparison.module, watch)
        self._watched = [watch for watch in self._watched if watch.state == "waiting"]
        self._warn()

    def _warn(self) -> None:
        new = {name: why for name, why in self.unproved.items() if name not in self._warned}
        self._warned |= new.keys()
        if new and self._channel.rank == 0:
            listed = "; ".join(f"{name or 'the model itself'!r}: {why}" for name, why in new.items())
            warnings.warn(
                f"tensor.rules: not compared with the uncut module: {listed}; compare a whole run with `shardwise "
                "verify`",
                stacklevel=2,
            )

    @contextmanager
    def _working(self) -> Iterator[None]:
        self.is_at_work = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_at_work = False


class _RegionWatch:
    """A `Wrapper` of a region, or of a module around one."""

    structure = None
    """It changes no shapes."""

    def __init__(self, proof: Proof, comparison: Comparison) -> None:
        self.comparison = comparison
        self.state: State = "waiting" if comparison.region.is_needed else "standby"
        self.run = uncompiled(self._run)
        self._proof = proof

    def _run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Wrapper`."""
        proof = self._proof
        is_passed = self.state == "done" or proof.is_at_work or in_backward() or proof.is_followed()
        if is_passed or not _is_real(module, args, kwargs):
            return forward(*args, **kwargs)
        inputs = _copied(args, kwargs)
        with proof.calling(self):
            try:
                output = forward(*args, **kwargs)
            except ShardwiseError:
                raise
            except Exception as error:
                if isinstance(inputs, CopiedInputs):
                    proof.explain(self, forward, inputs, error)
                raise
            if self.state == "waiting":
                proof.compare(self, forward, inputs)
            self.state = "done"
        return output


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CopiedInputs | Unknown:
    try:
        return CopiedInputs.of(args, kwargs)
    except Exception as error:  # whatever an object raises that refuses to be copied
        return Unknown(f"what it is given cannot be copied ({error})")


def _is_real(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call computes values, rather than shapes."""
    held = [each for inner in module.modules() for each in inner._parameters.values() if each is not None]
    return not any(is_fake(each) for each in (*tensors_in((args, kwargs)), *held))
