"""The proof of a plan of tensor parallelism: each region is compared once with the uncut module, when it first runs.

A region is the smallest module in which every cut that begins also ends. On two ranks, after its first forward:

    [1] inputs      copies of what the call was given, which all ranks have alike (or as parts of positions)
    [2] parameters  gathered over tp, changed a little, alike on all ranks; each rank takes its portion of those
    [3] whole       the module's own forward with whole parameters      no gradients, half precision as float32; the
    [4] cut         the forward of the plan with the portions           module is left as it was
    [5] compare     relative difference, against what rounding alone makes of [3]
    [6] again       in training mode, without dropout; not where the module draws other random numbers

    measured, float32   heads of an attention: differ by 5e-8, passed at once
                        a mean over own features: differ by 1.3e-1, rounding makes 1.7e-7, allowed 64 x 1.7e-7: refused

Regions are proved from the inside out. A region without whole inputs, or one that cannot run uncut alone, hands the
proof on to the module around it. Ranks along tp go through it together, since they run the same modules in the same
order. All ranks agree on the verdict before the update.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.comm.agreement import json_as, understood
from shardwise.comm.digests import digest_of_values
from shardwise.comm.nested_values import tensors_in
from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.layers import Layer, Place, in_backward, take_off, wrap
from shardwise.engine.parameter_kinds import inner_by_path, is_packed
from shardwise.engine.tensor.proof.isolated_runs import (
    CopiedInputs,
    ModuleRun,
    Parameters,
    Way,
    counterpart,
    differ,
    factor_of,
    finest_eps,
    hooks_watched,
    perturbed,
    rounded,
    run_apart,
    watched_hooks,
)
from shardwise.engine.tensor.styles import note_on
from shardwise.engine.tensor.tp_collectives import TpCollectives, is_fake, is_half, taken, uncompiled, widened
from shardwise.engine.torch_private import without_dispatch_modes
from shardwise.errors import ModelError, ShardwiseError, in_words
from shardwise.plan.outlines import parents
from shardwise.plan.tensor_cuts import GROUPS, HEADS
from shardwise.plan.tensor_plan import CUTS_THE_MODULE, CutRegion, ParameterCut, TensorPlan, regions_of
from shardwise.space import even_cuts

Gather = Callable[[torch.Tensor], AbstractContextManager[None]]
"""Inside, the parameter has its values."""

# A router that compares two nearly equal scores may choose otherwise after another order of sums, and its output then
# differs by far more than a rounding. Three such draws in a row are unlikely; a wrong plan differs in all of them.
_ATTEMPTS = 3
"""Times that a difference has to show, each with other parameters."""

_PURPOSE = "proof of tensor.rules"
# Kernels that add atomically (on GPUs) give each rank other last bits of one whole value: such replicas count as alike.
_CLOSE = 100.0
"""Times the last digit by which whole inputs may differ between ranks."""


class UnjudgedError(Exception):
    """A region cannot be judged alone; the text says why."""


State = Literal["waiting", "standby", "done"]


class _RegionProof(Layer):
    """Runs a region, or a module around one, both ways.

    waiting --compared--> done --all agreed--> taken off
    standby --a region inside hands the proof on--> waiting          standby --its call ends--> done
    """

    place = Place.PROOF

    def __init__(self, proof: "Proof", region: CutRegion) -> None:
        self.region = region
        self.state: State = "waiting" if region.is_needed else "standby"
        self._run = uncompiled(self._seen)
        self._proof = proof

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        proof = self._proof
        # Not inside of the proof's own runs, and not in a recomputation, which is an earlier call once more. At stage 3
        # data ranks that skip this microbatch gather what this rank announces, and a proof gathers more than that.
        is_passed = self.state == "done" or proof.is_at_work or in_backward() or proof.is_followed()
        if is_passed or not self._is_real(args, kwargs):
            return self.forward(*args, **kwargs)
        # Before the forward: it may write to what it is given.
        inputs: CopiedInputs | UnjudgedError
        try:
            inputs = CopiedInputs(args, kwargs).changed(torch.clone)
        except Exception as error:
            inputs = UnjudgedError(f"its inputs cannot be copied ({error})")
        with proof.calling(self):
            try:
                output = self.forward(*args, **kwargs)
            except ShardwiseError:
                raise
            except Exception as error:
                if isinstance(inputs, CopiedInputs):
                    proof.explain(self, inputs, error)
                raise
            proof.compare_held_back(self)
            if self.state == "waiting":
                proof.compare(self, inputs)
            self.state = "done"
        return output

    def _is_real(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call computes values, rather than shapes."""
        held = [each for inner in self.module.modules() for each in inner._parameters.values() if each is not None]
        return not any(is_fake(each) for each in (*tensors_in((args, kwargs)), *held))

    def refusal(self, inputs: CopiedInputs, *, is_outermost: bool) -> str:
        """Why cut and whole do not agree; "" where they do. Raises UnjudgedError.

        is_outermost: no module around could be compared instead. Ranks along tp do it together, and get one result.
        """
        pair = self._shared(inputs)
        # Gathered once, before the attempts: at stage 3 data ranks gather together, and may need other numbers of them.
        held = self._held()
        with ExitStack() as gathered:
            for each in self.module.parameters():
                if is_packed(each):
                    gathered.enter_context(self._proof.gather(next(iter(inner_by_path(each).values()), each)))
            return self._judged(pair, held, is_outermost=is_outermost)

    def _judged(self, pair: tuple[CopiedInputs, CopiedInputs], held: Parameters, *, is_outermost: bool) -> str:
        # Every decision in these loops comes from numbers that all ranks have exchanged, so that all ranks go the same
        # way: each turn gathers over tp, and a rank that left early would let the others wait.
        for mode in ("evaluation mode", "training mode without dropout"):
            trains = mode != "evaluation mode"
            found: tuple[float, float] | None = None
            try:
                for attempt in range(_ATTEMPTS):
                    found = self._difference(*pair, held, attempt, is_outermost=is_outermost, trains=trains)
                    if found is None:
                        break
            except UnjudgedError:
                # Training mode comes second: the region has agreed in evaluation mode already.
                if trains:
                    return ""
                raise
            if found is not None:
                # A cache of keys and values is given with what this rank computed; uncut, the module would need the
                # whole cache. A difference may come from there, and proves nothing.
                if pair[0].has_state:
                    raise UnjudgedError("each rank may have its own part of the tensors in an object that it is given")
                return (
                    f"tensor.rules: {self._named()} gives other numbers when it is cut. With whole parameters its "
                    f"output differs by {found[0]:.1e} (relative, largest over the ranks along tp, in {mode}); "
                    f"rounding gives {found[1]:.1e}. {self._rules()} {self._advice()}"
                )
        return ""

    def explanation(self, inputs: CopiedInputs, error: str) -> str:
        """The message for an error that only the cut module raises; empty for one that the whole module raises too.

        No rank is asked: another one may not have failed, and would not answer. Any parameters of the right shapes show
        whether the whole module runs.
        """
        # `expand` of one number: a whole parameter of any size takes the memory of one element.
        stand_ins: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self._unpacked():
            cut = self._cut_of(parameter)
            value = torch.full((), 1, dtype=parameter.dtype, device=parameter.device)
            stand_ins[parameter] = (value / 64).to(value.dtype).expand(parameter.shape if cut is None else cut.shape)
        if isinstance(self._try(inputs, stand_ins, Way(is_cut=False, is_wide=False, trains=False)), str):
            return ""
        return (
            f"tensor.rules: {self._named()} fails when it is cut, and runs with whole parameters: {error}\n"
            f"{self._rules()} {self._advice()}"
        )

    # Values ---------------------------------------------------------------------------------------------------------

    def _shared(self, inputs: CopiedInputs) -> tuple[CopiedInputs, CopiedInputs]:
        """Inputs for the whole module, and for this rank's part of it."""
        tensors = inputs.tensors
        # Digests instead of values: inputs of a region are large, and mostly equal on all ranks.
        mine = [[list(each.shape), str(each.dtype), digest_of_values(each)] for each in tensors]
        answers = self._exchanged(mine, list[tuple[list[int], str, str]])
        if any(len(each) != len(mine) for each in answers):
            raise UnjudgedError("the ranks give it other inputs")
        whole: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for tensor, each in zip(tensors, zip(*answers, strict=True), strict=True):
            shared = (tensor, tensor) if all(other == each[0] for other in each) else self._joined(tensor, each)
            if shared is None:
                raise UnjudgedError("each rank gives it other inputs")
            whole.append(shared[0])
            own.append(shared[1])
        return inputs.with_tensors(whole), inputs.with_tensors(own)

    def _joined(self, tensor: torch.Tensor, described: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Whole and own values of an input that has other bits on other ranks."""
        shapes = [tuple(shape) for shape, _, _ in described]
        if len({dtype for _, dtype, _ in described}) > 1:
            return None
        if len(set(shapes)) == 1 and tensor.is_floating_point():
            every = self._proof.collectives.gathered(tensor)
            if differ(list(every), [every[0]] * len(every)) <= _CLOSE * torch.finfo(tensor.dtype).eps:
                return every[0], every[0]
        for dim in self.region.dims:
            rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
            if dim >= tensor.dim() or len(rests) > 1:
                continue
            # Parts of positions are recognized by their sizes: along one dim they are those that an even cut makes.
            cuts = even_cuts(sum(shape[dim] for shape in shapes), len(shapes))
            if [stop - start for start, stop in cuts] == [shape[dim] for shape in shapes]:
                return self._proof.collectives.all_gather(tensor, dim, [(each,) for each in cuts]), tensor
        return None

    def _unpacked(self) -> list[nn.Parameter]:
        """Packed weights run as they are: changed codes belong to no scales."""
        return [each for each in self.module.parameters() if not is_packed(each)]

    def _cut_of(self, parameter: nn.Parameter) -> ParameterCut | None:
        return self._proof.plan.cuts.get(self._proof.names[parameter])

    def _held(self) -> Parameters:
        """Copies of this rank's parameters."""
        held = {}
        for parameter in self._unpacked():
            # Under sharding stage 3 the values are elsewhere between uses: one parameter at a time is gathered and
            # copied.
            with self._proof.gather(parameter):
                held[parameter] = parameter.detach().clone()
        return held

    def _parameters(self, held: Parameters, attempt: int, *, is_wide: bool) -> tuple[Parameters, Parameters]:
        """Whole ones, and this rank's portions of them: the same changed values."""
        whole: dict[nn.Parameter, torch.Tensor] = {}
        own: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, local in held.items():
            value = widened(local) if is_wide else local
            cut = self._cut_of(parameter)
            if cut is not None:
                value = self._proof.collectives.all_gather(value, cut.dim, cut.ranges)
            # Changed after the gathering, by numbers that the name and the attempt decide: all ranks change the whole
            # alike, and the portions are portions of the same whole.
            whole[parameter] = value = perturbed(value, self._proof.names[parameter], attempt)
            portion = value if cut is None else taken(value, cut.dim, cut.ranges[self._proof.channel.rank])
            own[parameter] = portion.contiguous()
        return whole, own

    # Both ways ------------------------------------------------------------------------------------------------------

    def _difference(
        self,
        whole: CopiedInputs,
        own: CopiedInputs,
        held: Parameters,
        attempt: int,
        *,
        is_outermost: bool,
        trains: bool,
    ) -> tuple[float, float] | None:
        """The largest over the ranks, with what rounding makes. None where cut and whole agree, or where `trains` and
        chance is in what the module computes. Raises UnjudgedError."""
        problem = ""
        # Half precision as float32 first: with 3 digits a wrong plan could hide in the rounding. A forward that refuses
        # float32 (it casts to a fixed dtype inside) is compared as it is.
        has_halves = any(is_half(each) for each in (*self.module.parameters(), *whole.tensors))
        for is_wide in (True, False) if has_halves else (True,):
            parameters, portions = self._parameters(held, attempt, is_wide=is_wide)
            uncut = Way(is_cut=False, is_wide=is_wide, trains=trains)
            expected = self._try(whole, parameters, uncut)
            problem = next(filter(None, self._exchanged(expected if isinstance(expected, str) else "", str)), "")
            if problem or isinstance(expected, str):
                continue
            # Noise is drawn for a part by each rank, for the whole by the uncut module: they differ in a right plan,
            # too.
            if trains and any(self._exchanged(expected.drew, bool)):
                return None
            made = self._try(own, portions, uncut._replace(is_cut=True))
            answers = self._exchanged(
                [made, []] if isinstance(made, str) else ["", [list(each.shape) for each in made.tensors]],
                tuple[str, list[list[int]]],
            )
            failure = next((each for each, _ in answers if each), "")
            if failure or isinstance(made, str):
                raise UnjudgedError(f"it runs, and fails in evaluation mode ({failure})")
            shapes = [[tuple(shape) for shape in each] for _, each in answers]
            if any(len(each) != len(expected.tensors) for each in shapes):
                raise UnjudgedError("it gives another number of tensors when it is cut")
            pairs = []
            for at, (cut, wide) in enumerate(zip(made.tensors, expected.tensors, strict=True)):
                other, is_part = counterpart(cut, wide, [each[at] for each in shapes], self._proof.channel.rank)
                # Modules behind it read the first output. Others (attention weights of own heads) may only be there to
                # be looked at.
                if other is not None and (at == 0 or not is_part):
                    pairs.append((cut, other))
            if not pairs or (len(pairs) < len(expected.tensors) and not is_outermost):
                raise UnjudgedError("each rank has its own part of the tensors that it gives")
            relative = max(self._exchanged(differ(*map(list, zip(*pairs, strict=True))), float))
            finest = finest_eps(expected.tensors)
            # Equal to the last digits: no need to measure the rounding, which costs another run and copies.
            if relative <= 4 * finest:
                return None
            # The bound is measured and not guessed: how much one last digit in inputs and parameters moves the output
            # depends on the depth of the region and on how its terms cancel.
            inexact, values = rounded(whole, parameters, expected.eps)
            again = self._try(inexact, values, uncut)
            others = [] if isinstance(again, str) else again.tensors
            is_alike = len(others) == len(expected.tensors)
            noise = max(finest, *self._exchanged(differ(others, expected.tensors) if is_alike else 0.0, float))
            return None if relative <= factor_of(expected.eps) * noise else (relative, noise)
        raise UnjudgedError(f"it does not run alone with whole parameters ({problem})")

    def _try(self, inputs: CopiedInputs, parameters: Parameters, way: Way) -> ModuleRun | str:
        """What the module gives, or what it raises."""
        try:
            return run_apart(self.module, self.forward, inputs, parameters, way)
        except Exception as error:
            return in_words(error)

    def on_any_rank(self, is_so: bool) -> bool:
        """Whether it is so on some rank along tp."""
        return any(self._exchanged(is_so, bool))

    def _exchanged(self, value: Any, form: Any) -> list[Any]:
        """Every rank's value, each of this form."""
        answers = self._proof.channel.exchange(json.dumps(value).encode(), purpose=_PURPOSE)
        return understood(answers, json_as(form), purpose=_PURPOSE)

    # Words ----------------------------------------------------------------------------------------------------------

    def _named(self) -> str:
        name = repr(self.region.name) if self.region.name else "the model itself"
        return f"{name} ({type(self.module).__name__})"

    def _inside(self, name: str) -> str:
        """The name in the model of a module in this one."""
        return ".".join(filter(None, (self.region.name, name)))

    def _rules(self) -> str:
        listed = [f"{name!r}: {', '.join(style.kind for style in held)}" for name, held in self.region.styles.items()]
        plan = self._proof.plan
        listed += [
            f"{name!r}: cut along dim {plan.cuts[name].dim}"
            for name in map(self._proof.names.__getitem__, self.module.parameters())
            if name in plan.cuts
            and not any(style.kind in CUTS_THE_MODULE for style in plan.styles.get(name.rpartition(".")[0], ()))
        ]
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        return f"The rules in it: {'; '.join(listed[:8])}{more}."

    def _advice(self) -> str:
        counting = [
            self._inside(name)
            for name, each in self.module.named_modules()
            if any(type(vars(each).get(word)) is int for word in HEADS + GROUPS)
            and not any(style.kind == "heads" for style in self.region.styles.get(self._inside(name), ()))
        ]
        heads = f"; {counting[0]!r} counts heads in attributes: try the rule 'heads' for it" if counting else ""
        hooked = next((self._inside(name) for name, each in self.module.named_modules() if _changes(each)), None)
        hook = "" if hooked is None else f"A hook of the program changes values of {hooked or 'the model'!r}. "
        return (
            f"{hook}If a mean, a norm or a softmax reads a cut dim, give the map before it 'colwise_gather_output' or "
            "'replicate'. If a parameter holds parts side by side, give parts=; if they alternate, leave it whole "
            f"('replicate'){heads}. Rules that are given beat the plan that a model carries. sw.Tensor(prove=False) "
            "(tensor.prove = false) trains without this comparison"
        )


def _changes(module: nn.Module) -> bool:
    """Whether a hook of the program has changed what the module reads or gives."""
    return any(each.changes for each in watched_hooks(module))


class Proof:
    """The state of the proof: which regions are still to be compared, and what is refused."""

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
        """channel: along tp. gather: of parameters at rest; None: all have their values. is_followed: whether data
        ranks that gather too skip what runs now; nothing is proved then. is_local: whether a module runs as one on this
        rank."""
        self.unproved: dict[str, str] = {}
        """Modules that could not be compared, and why."""
        self.is_at_work = False
        """Whether modules run for the comparison."""
        self.is_followed = is_followed
        self.plan = plan
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.channel = channel
        self.collectives = TpCollectives(channel, "proof of tensor.rules")
        self.gather: Gather = gather or (lambda _: nullcontext())
        self._model = model
        self._world = world
        self._has_agreed = False
        self._refusals: list[str] = []
        self._warned: set[str] = set()
        self._watched: list[_RegionProof] = []
        self._calls: list[_RegionProof] = []
        self._held_back: list[tuple[_RegionProof, _RegionProof, CopiedInputs | UnjudgedError]] = []
        """The module around, a region whose own hooks run after its forward, and what the region was given."""
        for region in regions_of(plan):
            if is_local(region.name):
                self._watched.append(_RegionProof(self, region))
                wrap(model.get_submodule(region.name), self._watched[-1])
            elif region.is_needed:
                self.unproved[region.name] = "it runs on several stages of the pipeline"

    @contextmanager
    def calling(self, watch: _RegionProof) -> Iterator[None]:
        """The watched module runs."""
        with nullcontext() if self._calls else hooks_watched(watch.module.modules()):
            self._calls.append(watch)
            try:
                yield
            finally:
                self._calls.pop()

    def compare(self, watch: _RegionProof, inputs: CopiedInputs | UnjudgedError) -> None:
        """Compare a region, or hold it back to the end of the module around; a refusal is kept until all are asked."""
        around = self._around(watch)
        if around is not None and watch.on_any_rank(bool(watched_hooks(watch.module))):
            self._held_back.append((around, watch, inputs))
        else:
            self._compare(watch, inputs)

    def compare_held_back(self, around: _RegionProof) -> None:
        """Compare the regions held back for a module: their hooks have run. Where these change a value, it waits."""
        mine = [each for each in self._held_back if each[0] is around]
        self._held_back = [each for each in self._held_back if each[0] is not around]
        for _, watch, inputs in mine:
            if watch.on_any_rank(_changes(watch.module)):
                around.state = "waiting"
            else:
                self._compare(watch, inputs)

    def _around(self, watch: _RegionProof) -> _RegionProof | None:
        """The nearest call around that goes on: it has a layer too, and is compared when its own forward ends."""
        return next((each for each in reversed(self._calls) if each is not watch), None)

    def _compare(self, watch: _RegionProof, inputs: CopiedInputs | UnjudgedError) -> None:
        around = self._around(watch)
        try:
            if isinstance(inputs, UnjudgedError):
                raise inputs
            with self._working():
                self._refusals += filter(None, [watch.refusal(inputs, is_outermost=around is None)])
        except UnjudgedError as why:
            if around is not None:
                around.state = "waiting"
            else:
                self.unproved[watch.region.name] = str(why)

    def explain(self, watch: _RegionProof, inputs: CopiedInputs, error: Exception) -> None:
        """Raise ModelError for an error of a forward that the whole module does not raise."""
        with self._working():
            text = watch.explanation(inputs, f"{error}\n{note_on(self._model, error) or ''}".strip())
        if text:
            raise ModelError(text) from error

    @contextmanager
    def judging(self, *, by_all: bool) -> Iterator[None]:
        """Modules run inside. Raises ModelError for what is refused, also in the place of an error that follows it.

        The whole world agrees the first time that all ranks are here (`by_all`). Regions that are done lose their
        layer, so that later steps cost nothing.
        """
        # Their own hooks run outside of every layer: no run of a proof has them.
        outermost = [] if self._has_agreed else self._outermost()
        with hooks_watched(each.module for each in outermost):
            try:
                yield
            except ShardwiseError:
                raise
            except Exception as error:
                if self._refusals:
                    raise ModelError(self._refusals[0]) from error
                raise
            for watch in filter(lambda each: _changes(each.module), outermost):
                self.unproved.setdefault(watch.region.name, "hooks of the program change what it reads or gives")
        self._judge(by_all=by_all)

    def _outermost(self) -> list[_RegionProof]:
        """Those with no other around."""
        names = {each.region.name for each in self._watched}
        return [
            each for each in self._watched if not each.region.name or names.isdisjoint(("", *parents(each.region.name)))
        ]

    def _judge(self, *, by_all: bool) -> None:
        refusals = self._refusals[:1]
        if by_all and self.plan.styles and not self._has_agreed:
            self._has_agreed = True
            # The world, and not tp alone: data ranks and stages have other regions or none, and would go on to the
            # update and wait there. Once only: each region is proved once, and later steps shall not pay for an
            # exchange.
            mine = "".join(refusals).encode()
            purpose = "verdict on the proof of tensor.rules"
            told = understood(self._world.exchange(mine, purpose=purpose), bytes.decode, purpose=purpose)
            refusals = [*filter(None, told)]
        if refusals:
            raise ModelError(refusals[0])
        for watch in self._watched:
            if watch.state != "waiting":
                watch.state = "done"
                take_off(watch)
        self._watched = [watch for watch in self._watched if watch.state == "waiting"]
        self._warn()

    def _warn(self) -> None:
        new = {name: why for name, why in self.unproved.items() if name not in self._warned}
        self._warned |= new.keys()
        if new and self.channel.rank == 0:
            listed = "; ".join(f"{name or 'the model itself'!r}: {why}" for name, why in new.items())
            warnings.warn(
                f"tensor.rules: not compared with the uncut module: {listed}; compare a whole run with `shardwise "
                "verify`",
                stacklevel=2,
            )

    @contextmanager
    def _working(self) -> Iterator[None]:
        # A mode that counts operations must not see those of a proof, which is made once.
        with attributes_set(self, {"is_at_work": True}), torch.no_grad(), without_dispatch_modes():
            yield
