"""One update under the layout against one process, in the order of the program of the latter.

    for each microbatch    outputs of modules in the order of calls, the loss, gradients in the order of backward
    once                   loss of all, mean gradients (last parameters first), their norm
    after the update       parameters, buffers, optimizer state; pieces that several ranks hold

The first tensor that differs by more than rounding is named: what comes later may differ only because of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardwise.checkpoint import Catalogue
from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.plan import Plan
from shardwise.plan.names import is_state_name
from shardwise.verification.error_model import (
    EQUAL,
    UNIT_ROUNDOFF,
    UPDATE_ROUNDINGS,
    Closeness,
    ErrorModel,
    Path,
    by_element,
    by_size,
)
from shardwise.verification.layout_run import LayoutNotes
from shardwise.verification.mean_gradients import MeanGradients
from shardwise.verification.one_process import OwnStep
from shardwise.verification.report import Divergence, StepComparison, Tally
from shardwise.verification.run_recording import LOSS, Noted, is_number, places, wide

OUTPUTS, PER_MICROBATCH, LOSSES = "outputs of modules", "gradients per microbatch", "losses"
MEANS, NORMS, UPDATED = "mean gradients", "gradient norms", "updated tensors"


_BARELY = 2.0**-52
"""The ratio of tensors that only differ in elements that are not kept."""


class StepComparer:
    """The comparison of one update: `first_divergence`, then `summary`."""

    def __init__(
        self,
        *,
        step: int,
        plan: Plan,
        layout: LayoutNotes,
        own: OwnStep,
        gradients: Catalogue,
        state: Catalogue,
    ) -> None:
        """gradients, state: of the layout, after the update."""
        self._step = step
        self._plan = plan
        self._layout = layout
        self._own = own
        self._model = ErrorModel.of(plan)
        self._gradients = gradients
        self._state = state
        self._tallies: dict[str, Tally] = {}
        """By kind."""
        self._num_equal: dict[str, int] = {}
        """By parameter, the microbatches whose gradients are."""
        self._norm = own.report.grad_norm
        self._not_compared: dict[str, int] = {}
        self._remarks: list[str] = []

    def first_divergence(self) -> Divergence | None:
        """None where all is equal or rounding."""
        # A generator: what comes after the first divergence is not computed.
        return next(self._divergences(), None)

    def summary(self) -> StepComparison:
        """The tallies of the tensors that were compared."""
        return StepComparison(
            step=self._step,
            loss=self._layout.report.loss,
            one_process_loss=self._own.report.loss,
            grad_norm=self._layout.report.grad_norm,
            one_process_grad_norm=self._norm,
            tallies=tuple(self._tallies.values()),
        )

    def remarks(self) -> list[str]:
        """The tensors that were not compared, known once `first_divergence` has looked at all."""
        kinds = [f"{number} {kind}" for kind, number in self._not_compared.items()]
        if not kinds:
            return self._remarks
        return [*self._remarks, f"not compared: {' and '.join(kinds)} per update: ranks along tp have parts, or none"]

    def _divergences(self) -> Iterator[Divergence]:
        yield from self._of_inputs()
        computed = len({key.microbatch for key in self._own.notes.outputs})
        if computed != len(self._layout.counted):
            yield self._divergence(
                "batch", "microbatches of all data ranks", _unlike(f"{computed}", f"{len(self._layout.counted)}")
            )
        # One process leaves out microbatches of weight 0 too, and counts on without them.
        for own_number, number in enumerate(self._layout.counted):
            yield from self._of_outputs(own_number, number)
            yield from self._of_contributions(own_number, number)
        yield from self._of_loss()
        if not self._own.report.skipped:
            yield from self._of_means()
        yield from self._of_state()
        yield from self._of_replicas()

    def _of_inputs(self) -> Iterator[Divergence]:
        """A program may choose the rows of a data rank itself."""
        if len(self._own.inputs) != len(self._layout.inputs):
            yield self._divergence(
                "batch", "microbatches", _unlike(f"{len(self._own.inputs)}", f"{len(self._layout.inputs)}")
            )
        for number, (ours, (rank, theirs)) in enumerate(zip(self._own.inputs, self._layout.inputs, strict=True)):
            if ours != theirs:
                where = self._divergence(
                    "batch", "microbatch", _unlike("some values", "other values"), "", microbatch=number, rank=rank
                )
                yield replace(
                    where, explanation="The first data rank has to train on the first rows, the next on the next"
                )

    # One microbatch -------------------------------------------------------------------------------------------------

    def _of_outputs(self, own_number: int, number: int) -> Iterator[Divergence]:
        for key, ours in self._own.notes.outputs.items():
            if key.microbatch != own_number:
                continue
            place = key.place or ("loss" if key.module == LOSS else "output")
            # Several ranks may have one output: ranks along tp, or all of them for a module without a stage.
            noted_by_rank = self._layout.outputs.get(key._replace(microbatch=number), ())
            if not noted_by_rank:
                yield from self._of_missing("output", place, key.module, OUTPUTS, number)
            for rank, theirs in noted_by_rank:
                if ours.shape != theirs.shape:
                    yield from self._of_misshapen("output", place, key.module, OUTPUTS, number, ours, theirs, rank)
                    continue
                found = self._of_noted(ours, theirs, ours.path, is_exact=self._model.same_up_to_order)
                if found is not None and self._is_far(LOSSES if key.module == LOSS else OUTPUTS, found):
                    yield self._divergence("output", place, found, key.module, noted=ours, microbatch=number, rank=rank)

    def _of_contributions(self, own_number: int, number: int) -> Iterator[Divergence]:
        for key, ours in self._own.notes.gradients.items():
            if key.microbatch != own_number:
                continue
            name = key.parameter
            kind = "gradient of" if key.part < 0 else f"gradient of the part on rank {key.part} along tp of"
            theirs = self._layout.gradients.get(key._replace(microbatch=number))
            if theirs is None:
                # A parameter that is cut has parts in the layout, and is compared part by part: the whole one is
                # then not missing.
                if not self._layout.has_gradient(name, number, cut=key.part < 0):
                    yield from self._of_missing(kind, name, None, PER_MICROBATCH, number)
                continue
            if ours.shape != theirs.noted.shape:
                yield from self._of_misshapen(kind, name, None, PER_MICROBATCH, number, ours, theirs.noted)
                continue
            path = self._own.path.there_and_back()
            least = math.sqrt(self._own.terms[name].square)
            found = self._of_noted(ours, theirs.noted, path, is_exact=self._model.same_forward, least_size=least)
            if found is None:
                continue
            # Parameters whose gradients are equal in every microbatch get the narrow bound of `of_sum` for their
            # mean.
            if found.ratio == 0 and key.part < 0:
                self._num_equal[name] = self._num_equal.get(name, 0) + 1
            if self._is_far(PER_MICROBATCH, found):
                yield self._divergence(kind, name, found, noted=ours, microbatch=number)

    def _of_missing(
        self, kind: str, tensor: str, module: str | None, tally: str, microbatch: int
    ) -> Iterator[Divergence]:
        """No rank has it. Ranks along tp may do without modules, and compute with parts; others compute the same."""
        # Under tp a module may be replaced by parts that are no calls of it: counted, and said in a remark.
        if not self._model.same_up_to_order:
            self._not_compared[tally] = self._not_compared.get(tally, 0) + 1
            return
        yield self._divergence(kind, tensor, _unlike("a value", "none"), module, microbatch=microbatch)

    def _of_misshapen(
        self,
        kind: str,
        tensor: str,
        module: str | None,
        tally: str,
        microbatch: int,
        ours: Noted,
        theirs: Noted,
        rank: int | None = None,
    ) -> Iterator[Divergence]:
        """It has another shape: a part of it, where parameters are cut over ranks along tp."""
        for found in self._of_missing(kind, tensor, module, tally, microbatch):
            yield replace(found, rank=rank, one_process=f"shape {list(ours.shape)}", layout=f"{list(theirs.shape)}")

    def _of_noted(
        self, ours: Noted, theirs: Noted, path: Path, *, is_exact: bool, least_size: float = 0.0
    ) -> Closeness | None:
        """None where rounding may turn a choice, and nothing can be said."""
        # Digests are of all elements: where they are equal, nothing else has to be looked at.
        if ours.digest == theirs.digest and ours.dtype == theirs.dtype:
            return EQUAL
        if ours.dtype != theirs.dtype:
            return Closeness(ratio=math.inf, at=0, allowed=0.0, ours=ours.dtype, theirs=theirs.dtype)
        # Whole numbers and bools (an index, a mask) are choices: where floats round differently, a choice may turn,
        # and there is no bound for that.
        if is_exact or not is_number(ours.dtype):
            if not self._model.same_up_to_order:
                return None
            found = by_element(ours.sample, theirs.sample, torch.zeros(len(ours.sample), dtype=torch.float64))
            # Elements that are not kept differ, or there is nothing but a sum to compare with.
            return found if found.ratio or not theirs.digest else replace(found, ratio=math.inf)
        found = by_size(ours.sample, theirs.sample, path.deviation, least_size=least_size)
        return replace(found, ratio=_BARELY) if not found.ratio and theirs.digest else found

    # All of them ----------------------------------------------------------------------------------------------------

    def _of_loss(self) -> Iterator[Divergence]:
        ours, theirs = self._own.report, self._layout.report
        # Losses of microbatches are equal then; only their sum over ranks is taken in another order, in float64.
        deviation = 0.0 if self._model.same_up_to_order else self._own.path.deviation
        allowed = (deviation + 1e-15 * (1 + len(self._layout.counted))) * abs(ours.loss)
        found = by_element(_one(ours.loss), _one(theirs.loss), _one(allowed))
        if self._is_far(LOSSES, found):
            yield self._divergence("loss", "loss of all microbatches", found)
        if ours.skipped != theirs.skipped:
            words = {True: "skips the update: its gradient is not finite", False: "takes the update"}
            yield self._divergence("update", "update", _unlike(words[ours.skipped], words[theirs.skipped]))

    def _of_means(self) -> Iterator[Divergence]:
        numbers: dict[str, int] = {}
        for key in self._own.notes.gradients:
            numbers[key.parameter] = numbers.get(key.parameter, 0) + (key.part < 0)
        rounded = {name for name, number in numbers.items() if self._num_equal.get(name) != number}
        means = MeanGradients(self._plan, self._model, self._own, self._layout, rounded)
        # In float64, and of all parameters: the norm of the engine in one process is part of what is verified.
        self._norm = means.norm
        stored = self._gradients.tensors
        for name in means.names():
            if name not in stored:
                yield self._divergence("mean gradient of", name, _unlike("a gradient", "none"))
                continue
            theirs = self._gradients.read(name)
            found = means.closeness(name, theirs)
            is_equal = digest_of_values(theirs) == self._own.gradient_digests.get(name)
            if self._is_far(MEANS, found, is_equal=is_equal):
                pieces = [each.piece for each in stored[name].pieces]
                words, microbatch = means.words.explain(name, theirs, found.at, pieces)
                if not words and PER_MICROBATCH in self._tallies:
                    words = "The gradients of its microbatches agree: their sum over microbatches and ranks does not"
                where = self._divergence("mean gradient of", name, found, microbatch=microbatch, shape=theirs.shape)
                yield replace(where, explanation=words)
        # After all parameters: a factor near one hides in each of them and shows in all together.
        if (common := means.common_factor()) is not None and common[1].is_far:
            name, found = common
            where = self._divergence("mean gradient of", name, found)
            yield replace(where, explanation="The values are a factor that all gradients have in common")
        # An all-zero gradient is what an engine may have for a parameter that no microbatch used; any other is a
        # fault.
        for name in stored:
            if name not in self._own.terms and bool(self._gradients.read(name).any()):
                yield self._divergence("mean gradient of", name, _unlike("no gradient", "one that is not zero"))
        found = by_element(_one(means.norm), _one(self._layout.report.grad_norm), _one(means.allowed_of_norm))
        if self._is_far(NORMS, found, is_equal=self._own.report.grad_norm == self._layout.report.grad_norm):
            yield self._divergence("norm", "norm of all gradients", found)

    def _of_state(self) -> Iterator[Divergence]:
        # Tied parameters have one entry and further names: one process may name another of them.
        theirs_of = {**self._state.contents.aliases, **{name: name for name in self._state.tensors}}
        for name, ours in self._own.state.items():
            if name not in theirs_of:
                yield self._divergence("updated", name, _unlike("a value", "none"))
                continue
            theirs = self._state.read(name).to(ours.device)
            if self._is_left_out(name, ours, theirs):
                continue
            found = _of_update(ours, theirs)
            if self._is_far(UPDATED, found):
                words = "One process started from the same state and was given the layout's gradients"
                where = self._divergence("updated", name, found, shape=theirs.shape)
                yield replace(where, explanation=words)

    def _is_left_out(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Buffers that a forward writes: every data rank sees other rows, and one of them gives its own to all."""
        if self._model.num_data_ranks == 1 and self._model.same_up_to_order:
            return False
        if name not in self._own.written_buffers or _of_update(ours, theirs).ratio == 0:
            return False
        why = "of several data ranks one gives its own to all"
        if self._model.num_data_ranks == 1:
            why = "ranks along tp write rounded parts"
        remark = f"not compared: buffer {name!r}, which forwards write; {why}"
        self._remarks += [remark] if remark not in self._remarks else []
        return True

    def _of_replicas(self) -> Iterator[Divergence]:
        for piece, one, other in self._layout.unequal_pieces:
            differ = _unlike(f"one value (as rank {one} has it)", "another one")
            yield self._divergence("replica", piece, differ, "", rank=other)

    # Words ----------------------------------------------------------------------------------------------------------

    def _is_far(self, kind: str, found: Closeness, *, is_equal: bool | None = None) -> bool:
        """Count it; whether rounding does not explain it. `is_equal`: to the bit, where `found` compares in float64."""
        before = self._tallies.get(kind, Tally(kind=kind, num_compared=0, num_equal=0, worst=0.0))
        equal = found.ratio == 0 if is_equal is None else is_equal
        worst = before.worst if equal or found.is_far else max(before.worst, found.ratio)
        self._tallies[kind] = replace(
            before, num_compared=before.num_compared + 1, num_equal=before.num_equal + equal, worst=worst
        )
        return found.is_far

    def _divergence(
        self,
        kind: str,
        tensor: str,
        found: Closeness,
        module: str | None = None,
        *,
        noted: Noted | None = None,
        microbatch: int | None = None,
        rank: int | None = None,
        shape: Sequence[int] = (),
    ) -> Divergence:
        """module: None: the one that holds the tensor."""
        if noted is not None:
            # The sample has places of its own: the element is named by its index in the whole tensor.
            at, shape = int(places(noted.num_elements)[found.at]) if noted.num_elements else 0, noted.shape
            found = replace(found, at=at)
        return _divergence_at(
            self._step, kind, tensor, found, tuple(shape), module=module, microbatch=microbatch, rank=rank
        )


def initial_divergence(own: Mapping[str, torch.Tensor], layout: Catalogue) -> Divergence | None:
    """The first tensor that is not the same before the first update."""
    known = {*layout.tensors, *layout.contents.aliases}
    for name, ours in own.items():
        theirs = layout.read(name) if name in known else None
        found = Closeness(ratio=math.inf, at=0, allowed=0.0, ours="a value", theirs="none")
        if theirs is not None:
            found = _of_update(ours.cpu(), theirs)
        if found.ratio > 0:
            return _divergence_at(0, "initial", name, replace(found, allowed=0.0), tuple(ours.shape))
    return None


def other_number(ours: str, theirs: str, step: int) -> Divergence:
    """One side makes more updates than the other: this one is the first of them."""
    return _divergence_at(step, "number of", "updates", _unlike(ours, theirs), (), module="")


def _divergence_at(
    step: int,
    kind: str,
    tensor: str,
    found: Closeness,
    shape: tuple[int, ...],
    *,
    module: str | None = None,
    microbatch: int | None = None,
    rank: int | None = None,
) -> Divergence:
    return Divergence(
        kind=kind,
        tensor=tensor,
        module=_module_of(tensor) if module is None else module,
        step=step,
        microbatch=microbatch,
        rank=rank,
        index=tuple(map(int, torch.unravel_index(torch.tensor(found.at), shape))) if shape else None,
        one_process=_shown(found.ours),
        layout=_shown(found.theirs),
        allowed=found.allowed,
    )


def _unlike(ours: str, theirs: str) -> Closeness:
    """Of what differs by no number."""
    return replace(EQUAL, ours=ours, theirs=theirs)


def _of_update(ours: torch.Tensor, theirs: torch.Tensor) -> Closeness:
    """Updates do the same to the same numbers; an optimizer that works in blocks may round a little differently."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return Closeness(ratio=math.inf, at=0, allowed=0.0, ours=_kind(ours), theirs=_kind(theirs))
    if digest_of_values(ours) == digest_of_values(theirs):
        return EQUAL
    mine, other = wide(ours).reshape(-1), wide(theirs).reshape(-1)
    roundoff = UNIT_ROUNDOFF.get(dtype_name(ours.dtype), 0.0)
    return by_element(mine, other, UPDATE_ROUNDINGS * roundoff * mine.abs())


def _kind(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _shown(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


def _module_of(name: str) -> str:
    """The module that holds a parameter or buffer, or the parameter that a state of the optimizer belongs to."""
    # "optimizer/layers.0.weight/exp_avg" belongs to the module of layers.0.weight.
    plain = name.removeprefix("optimizer/").rpartition("/")[0] if is_state_name(name) else name
    return plain.rpartition(".")[0]
