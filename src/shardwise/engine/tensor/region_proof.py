"""The proof of a plan of tensor parallelism: each region is compared once with the uncut module, when it first runs.

One region on two ranks, after its first forward (of the first microbatch, in training or not):

    [1] inputs      copies of what the call was given, which all ranks have alike (or as parts of positions)
    [2] parameters  gathered over tp, changed a little, alike on all ranks; each rank takes its portion of those
    [3] whole       the module's own forward with whole parameters      no gradients, half precision as float32; the
    [4] cut         the forward of the plan with the portions           module is left as it was
    [5] compare     relative difference, against what rounding alone makes of [3]
    [6] again       in training mode, without dropout; not where the module draws other random numbers

Regions are proved from the inside out. One whose inputs are not whole, or that cannot run uncut by itself, hands the
proof on to the module around it. All ranks along tp go through it together, since they run the same modules in the same
order; what they find is agreed on by all ranks before the update.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.autograd_state import in_backward
from shardwise.engine.pipeline.nested import tensors_in
from shardwise.engine.tensor.apart import CopiedInputs
from shardwise.engine.tensor.movements import Movements, is_fake, uncompiled
from shardwise.engine.tensor.notes import note_on
from shardwise.engine.tensor.region_comparison import Comparison, Gather, Unknown
from shardwise.engine.wrapping import Forward, take_off, wrap
from shardwise.errors import ModelError, ShardwiseError
from shardwise.plan.tensor_plan import TensorPlan, regions_of

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
        movements = Movements(channel, "proof of tensor.rules")
        for region in regions_of(plan):
            if is_local(region.name):
                module = model.get_submodule(region.name)
                comparison = Comparison(region, module, plan, names, channel, movements, gather)
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
