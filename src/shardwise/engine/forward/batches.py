"""From a batch to losses: rows, microbatches, and the call of an unmodified model.

7 rows, k = 3         rows 0 1 2 | 3 4 | 5 6       views of the batch, not copies
"scale", 0-d or no tensor   given to each microbatch as it is
[mb, mb, mb]          each is a microbatch, of any shape

In which dim the rows are:

rows=0                            {"x": [8, 5], "y": [8], "scale": []}     dims 0, 0, none: it is for all rows
rows={"x": 1, "table": None}      {"x": [5, 8], "y": [8], "table": [9]}    dims 1, 0, none
"""

import difflib
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, overload
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from shardwise.comm.local_tensors import is_dense
from shardwise.comm.nested_values import field_names, is_container, named_leaves, transform
from shardwise.engine.forward.layers import is_ours
from shardwise.engine.torch_private import ORIGINAL_MODULE, forward_pre_hooks, hooks_before_all_forwards, storage_id
from shardwise.errors import BatchError, ModelError
from shardwise.plan import Plan, split_rows
from shardwise.plan.names import matches, nearest

RowDims: TypeAlias = int | Mapping[str, int | None]
"""The dim of the rows, of all tensors or by names and globs; None: a tensor for all rows."""


class BatchRows:
    """Says where rows are."""

    def __init__(self, dims: RowDims = 0) -> None:
        """Of names that several globs mean, the first holds; of those that none means, dim 0."""
        self.usual = 0 if isinstance(dims, Mapping) else dims
        """The dim of what is not named."""
        self._named = dict(dims) if isinstance(dims, Mapping) else {}

    def check(self) -> None:
        """Raise BatchError for what is no dim."""
        for name, dim in {"": self.usual, **self._named}.items():
            if not (type(dim) is int and dim >= 0) and not (name and dim is None):
                raise BatchError(
                    f"rows{f' of {name!r}' if name else ''}: {dim!r} is no dim; give 0, 1, .. or a dict of them by "
                    "name or glob, where None means a tensor for all rows"
                )

    @property
    def described(self) -> str:
        """In words."""
        return f"rows={self._named}" if self._named else f"dim {self.usual}"

    def dims_of(self, leaves: Sequence[tuple[str, Any]]) -> list[int | None]:
        """For each leaf of a batch, with its name: the dim of its rows; None for what is for all rows.

        Raises BatchError for a tensor without that dim, and for a name or glob that means no entry.
        """
        if not self._named and not self.usual:
            return [0 if _has_dims(leaf) else None for _, leaf in leaves]
        names = [name for name, _ in leaves]
        for pattern in self._named:
            if not any(matches(pattern, name) for name in names):
                near = nearest(pattern, names)
                raise BatchError(
                    f"rows: {pattern!r} matches none of the entries {names}"
                    + (f"; the nearest is {near!r}" if near is not None else "")
                )
        return [self._dim_of(name, leaf) for name, leaf in leaves]

    def _dim_of(self, name: str, leaf: Any) -> int | None:
        if not _has_dims(leaf):
            return None
        found = [dim for pattern, dim in self._named.items() if matches(pattern, name)]
        dim = found[0] if found else self.usual
        if dim is not None and leaf.ndim <= dim:
            has = f"{leaf.ndim} dims" if getattr(leaf, "is_nested", False) else f"the shape {list(leaf.shape)}"
            raise BatchError(
                f"the batch's entry {name!r} has {has}, and no dim {dim} with rows. Say where "
                f"its rows are: parallelize(..., rows={{{name!r}: 0}}), or None for all rows; data.rows in a "
                "configuration"
            )
        return dim


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


DIM_0 = BatchRows()


Batch: TypeAlias = Any
"""Tensors in any nesting of dicts, tuples, lists and dataclasses, with equally many rows; or a list of such, each of
them one microbatch. Other values, and tensors without dims, are for all rows."""

Microbatch: TypeAlias = Any
"""Some rows of a batch, in its nesting."""

LossFunction: TypeAlias = (
    Callable[[Any, Any], torch.Tensor | Mapping[str, Any]] | Callable[[Any], torch.Tensor | Mapping[str, Any]]
)
"""f(output, microbatch) -> a tensor with one element, or a dict with it under "loss" and other numbers to report. The
output is what the model's forward returns. With one argument, f(microbatch), it calls what it needs of the model
itself, and nothing else is called."""

LossWeight: TypeAlias = Callable[[Any], float | torch.Tensor]
"""f(microbatch) -> one finite number of at least 0: by what the loss of the microbatch counts in the mean."""


def given_microbatches(batch: Batch) -> list[Microbatch] | None:
    """The microbatches of a batch that is a list of them; None for one that is still to be cut.

    A list is one batch where it has anything in it that is no container: DataLoaders give [inputs, targets].
    """
    if isinstance(batch, list) and all(map(_is_nested, batch)):
        return batch
    return None


def _is_nested(value: Any) -> bool:
    """Whether it may be a batch that is no tensor: objects that move by a method of theirs may be, too."""
    return isinstance(value, Mapping) or is_container(value) or _moves_itself(value)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, torch.Tensor | type)


def with_tensors(batch: Batch) -> Batch:
    """The batch with a tensor for each array of numbers, in the same memory."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.dtype.kind in "biufc":
            # torch knows no steps backwards and no foreign order of bytes, and warns of what cannot be written to.
            is_fit = leaf.flags.writeable and leaf.dtype.isnative and min(leaf.strides) >= 0
            with suppress(TypeError):  # for what torch has no dtype
                return torch.from_numpy(leaf if is_fit else np.array(leaf, leaf.dtype.newbyteorder("=")))
        if isinstance(leaf, Mapping):  # one that cannot be filled: a dict has the rows
            return with_tensors(dict(leaf))
        return leaf

    return transform(batch, made)


def count_rows(batch: Batch, rows: BatchRows = DIM_0) -> int:
    """The rows of a batch, the same for all its tensors. Raises BatchError."""
    return _counted_rows(batch, named_leaves(batch), rows)[0]


def _counted_rows(batch: Batch, leaves: Sequence[tuple[str, Any]], rows: BatchRows) -> tuple[int, Sequence[int | None]]:
    """The rows, and the dim that has them in each leaf."""
    is_tensor = isinstance(batch, torch.Tensor) or hasattr(batch, "shape")
    if not isinstance(batch, dict) and not _is_nested(batch) and not is_tensor:
        raise BatchError(
            f"a batch is a dict, tuple, list or dataclass of tensors, not a {type(batch).__name__}; wrap it: "
            "{'input_ids': tensor, ...}"
        )
    dims = rows.dims_of(leaves)
    counts = {
        # Nested tensors have no shape, and arrays have a `size` of another kind.
        name: leaf.size(dim) if isinstance(leaf, torch.Tensor) else leaf.shape[dim]
        for (name, leaf), dim in zip(leaves, dims, strict=True)
        if dim is not None
    }
    if not counts:
        raise BatchError(
            f"the batch has no tensor with a dim {rows.usual} to split on; its entries are "
            f"{sorted(name for name, _ in leaves)}"
        )
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise BatchError(
            f"all tensors of a batch have the same number of rows ({rows.described}), but {listed}. Name what has its "
            "rows elsewhere, or none: parallelize(..., rows={name: dim or None}), data.rows in a configuration. "
            "Or give microbatches of any shapes as a list, with a loss_weight"
        )
    return next(iter(counts.values())), dims


def is_on_host(batch: Batch) -> bool:
    """Whether no tensor of it is on a device."""
    return all(leaf.device.type == "cpu" for _, leaf in named_leaves(batch) if isinstance(leaf, torch.Tensor))


class NoMoreMicrobatches(BaseException):
    """Raised by a given microbatch that has its turn: neither it nor those behind it are computed, on any rank."""


class GivenMicrobatches(Sequence[Microbatch]):
    """Microbatches that were given one by one: each moves to the device when it has its turn."""

    def __init__(self, given: Sequence[Microbatch], device: torch.device) -> None:
        self._given = given
        self._device = device

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, at: int) -> Microbatch: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Microbatch]: ...
    def __getitem__(self, at: int | slice) -> Microbatch | Sequence[Microbatch]:
        if isinstance(at, slice):
            return GivenMicrobatches(self._given[at], self._device)
        return moved_to(self._given[at], self._device)


def split_batch(
    batch: Batch, num_microbatches: int, device: torch.device, rows: BatchRows = DIM_0
) -> Sequence[Microbatch]:
    """Cut a batch into microbatches on `device`; entries that are no tensors, and 0-d tensors, go to each of them.

    Rows are not copied: what a forward writes to them is written to the batch, as in a loop over `chunk`.
    Raises BatchError when a microbatch would have no rows.
    """
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise BatchError(f"a batch is split into a whole number of microbatches, 1 or more, not {num_microbatches!r}")
    leaves = named_leaves(batch)
    num_rows, dims = _counted_rows(batch, leaves, rows)
    if not num_rows:
        raise BatchError("the batch has no rows (dim 0 is 0); give each data rank rows, or leave the last batch out")
    if num_rows < num_microbatches:
        raise BatchError(
            f"a batch of {num_rows} rows cannot be split into {num_microbatches} microbatches; give "
            f"{num_microbatches} rows or more, or set merge.microbatches to at most {num_rows}"
        )
    if num_microbatches > 1:
        _refuse_whole_tensors(leaves)
    moved = [_leaf_on(leaf, device) for _, leaf in leaves]
    parts = [
        [
            leaf if dim is None else _cut(name, leaf, dim, cut)
            for (name, _), leaf, dim in zip(leaves, moved, dims, strict=True)
        ]
        for cut in split_rows(num_rows, num_microbatches)
    ]
    # Only where no write can reach another microbatch is a separate count true: interleaved rows (a transposed batch)
    # keep the shared one, and autograd's error with it.
    for places in _sharing([leaf if dim is not None else None for leaf, dim in zip(moved, dims, strict=True)]):
        if _are_apart([[part[at] for at in places] for part in parts]):
            for part in parts:
                for at, counted in zip(places, _counted_apart([part[at] for at in places]), strict=True):
                    part[at] = counted
    return [_filled(batch, part) for part in parts]


def rows_of(batch: Batch, wanted: range, rows: BatchRows = DIM_0) -> Batch:
    """Some rows of a batch, as views; what has no rows goes along."""
    leaves = named_leaves(batch)
    dims = rows.dims_of(leaves)
    parts = [
        leaf if dim is None else _cut(name, leaf, dim, wanted) for (name, leaf), dim in zip(leaves, dims, strict=True)
    ]
    return _filled(batch, parts)


def first_microbatch(batch: Batch, plan: Plan, device: torch.device, rows: BatchRows) -> Microbatch:
    """The first of a sample, as the training will see it: a whole batch might not fit."""
    batch = with_tensors(batch)
    if given := given_microbatches(batch):
        return moved_to(given[0], device)
    return split_batch(batch, min(plan.merge.microbatches, count_rows(batch, rows)), device, rows)[0]


def _cut(name: str, leaf: Any, dim: int, rows: range) -> Any:
    if isinstance(leaf, torch.Tensor) and not is_dense(leaf):
        return _cut_of_layout(name, leaf, dim, rows)
    return leaf[(slice(None),) * dim + (slice(rows.start, rows.stop),)] if dim else leaf[rows.start : rows.stop]


def _cut_of_layout(name: str, leaf: torch.Tensor, dim: int, rows: range) -> torch.Tensor:
    """Rows of a sparse or a nested tensor: a copy. Raises BatchError for layouts that torch cannot cut."""
    if len(rows) == leaf.size(dim):
        return leaf
    if leaf.is_nested and not dim:
        return torch.nested.as_nested_tensor(list(leaf.unbind()[rows.start : rows.stop]), layout=leaf.layout)
    if leaf.layout is torch.sparse_coo:
        return leaf.index_select(dim, torch.arange(rows.start, rows.stop, device=leaf.device))
    raise BatchError(
        f"the batch's entry {name!r} has the layout {leaf.layout}, and cannot be cut into microbatches by its dim "
        f"{dim}. If it is for all rows, say so: parallelize(..., rows={{{name!r}: None}}), data.rows in a "
        "configuration. Or give microbatches as a list, with a loss_weight; or give a sparse_coo tensor"
    )


def _filled(batch: Batch, leaves: Sequence[Any]) -> Microbatch:
    """The batch with other leaves. Containers are new ones: what the program puts into a microbatch stays there."""
    following = iter(leaves)
    return transform(batch, lambda _: next(following), fresh=True)


def _refuse_whole_tensors(leaves: Sequence[tuple[str, Any]]) -> None:
    """Tensors inside of an object that is no container would go whole to every microbatch: rows would count k times."""
    for name, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            continue
        held = leaf if isinstance(leaf, set | frozenset | deque) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(each, torch.Tensor) for each in held):
            raise BatchError(
                f"the batch's entry {name!r} is a {type(leaf).__name__} of tensors, and cannot be split into "
                "microbatches. Put them into a dict, tuple, list or dataclass, or give a list of microbatches"
            )


def moved_to(batch: Batch, device: torch.device) -> Microbatch:
    """The batch on the device. Objects that have a method `to` move by it."""
    return transform(batch, lambda leaf: _leaf_on(leaf, device), fresh=True)


def _leaf_on(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _moved(leaf, device)
    return leaf.to(device) if _moves_itself(leaf) else leaf


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on the device; the host does not wait until they are there."""
    if value.device.type != "cpu" or device.type == "cpu" or not is_dense(value):
        return value.to(device)
    # From pinned memory of our own. From other memory torch waits for all that the device has to do; and pinned memory
    # of the user may get the rows of the next step while the device still reads it.
    return torch.empty_like(value, pin_memory=True).copy_(value).to(device, non_blocking=True)


def _sharing(leaves: Sequence[Any]) -> list[list[int]]:
    """The places of leaves whose rows a forward may write to, those of one memory and dtype together."""
    found: dict[int, list[int]] = {}
    for at, value in enumerate(leaves):
        if isinstance(value, torch.Tensor) and is_dense(value):
            # By storage: two entries may view one memory (inputs and targets shifted by one). They keep one count
            # together.
            found.setdefault(storage_id(value.untyped_storage()), []).append(at)
    return [
        places
        for places in found.values()
        if not any(leaves[at].requires_grad or leaves[at].is_inference() for at in places)
        and len({(leaves[at].dtype, type(leaves[at])) for at in places}) == 1
    ]


def _are_apart(parts: list[list[torch.Tensor]]) -> bool:
    """Whether the tensors of each microbatch end before those of the next begin, so that no write reaches another."""
    spans = []
    for tensors in parts:
        starts = [each.storage_offset() for each in tensors]
        steps = [zip(each.shape, each.stride(), strict=True) for each in tensors]
        stops = [at + sum((size - 1) * step for size, step in each) for at, each in zip(starts, steps, strict=True)]
        spans.append((min(starts), max(stops)))
    return all(stop < start for (_, stop), (start, _) in pairwise(spans))


def _counted_apart(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory with its own count of writes.

    Views of one batch share their count. So autograd takes a write to one microbatch for a write to a tensor that
    another one saved for its backward. Where forwards and backwards alternate, as in one process, it never sees that.
    """
    first, *others = tensors
    # `.data` starts a new count; views made from it share that one.
    first = first.data
    return [first, *(first.as_strided(each.shape, each.stride(), each.storage_offset()) for each in others)]


_OF_FUNCTION = "the loss function's result"


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch, and what else is reported of it."""

    loss: torch.Tensor
    """A scalar, which is differentiated."""
    others: Mapping[str, Any]
    """Numbers, and tensors with one element, by name; {} for a loss function that returns no dict."""

    def detached(self, value_of: Callable[[Any], Any] | None = None) -> "MicrobatchLoss":
        """Without a graph. value_of: gives each tensor and number in another form."""
        value_of = value_of or (lambda value: value.detach() if isinstance(value, torch.Tensor) else value)
        return MicrobatchLoss(value_of(self.loss), {name: value_of(each) for name, each in self.others.items()})


See: TypeAlias = Callable[[Any, Microbatch], None]
"""Looks at the model's output for a microbatch."""


class LossOfModel:
    """Calls the model on a microbatch and finds the loss.

    Without a loss function the model gets the whole microbatch (a mapping as keyword arguments, a tuple or list as
    positional ones, anything else as the one argument) and must give a loss (`output.loss`, `output["loss"]`, or a
    scalar). With one, it gets the inputs in the microbatch: see `_output`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        rows: BatchRows = DIM_0,
        weight: LossWeight | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        """Where the rows of its batches are."""
        self.weight = weight
        """What a microbatch counts; None: its rows."""
        self._loss: Callable[..., Any] | None = loss
        self.takes_output = _takes_output(loss)
        """Whether its loss is of an output, which it makes before."""
        inner = model
        while (wrapped := inner._modules.get(ORIGINAL_MODULE)) is not None:  # the wrapper names no arguments
            inner = wrapped
        self._inner = inner
        parameters = inspect.signature(inner.forward).parameters.values()
        places = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)]
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self._named = [each.name for each in named]
        self._required = [each.name for each in places if each.default is each.empty]
        self._required_names = [each.name for each in named if each.default is each.empty]
        self._takes_any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters)
        takes_any_place = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        self._has_optional_places = takes_any_place or len(self._required) < len(places)

    def check(self) -> None:
        """Raise ModelError for a loss that is no function, and BatchError for what is no dim of rows."""
        check_loss(self._loss)
        self.rows.check()

    def with_loss(self, loss: LossFunction | None) -> "LossOfModel":
        """The same with another loss function; None: with this one."""
        if loss is None:
            return self
        other = copy(self)
        other._loss, other.takes_output = loss, _takes_output(loss)
        return other

    def __call__(self, microbatch: Microbatch) -> torch.Tensor:
        """The loss of one microbatch, a scalar tensor. Raises ModelError when there is none."""
        return self.measured(microbatch).loss

    def measured(self, microbatch: Microbatch, see: See | None = None) -> MicrobatchLoss:
        """The loss of one microbatch, with what the loss function reports besides. Raises ModelError.

        see: is shown the model's output.
        """
        output = None
        if self.takes_output or see is not None:
            output = self.output(microbatch)
        if see is not None:
            see(output, microbatch)
        if self._loss is None:
            return MicrobatchLoss(_scalar(_loss_in(output), "the model's output"), {})
        found = self._loss(output, microbatch) if self.takes_output else self._of_microbatch(microbatch)
        if not isinstance(found, Mapping):
            return MicrobatchLoss(_scalar(found, _OF_FUNCTION), {})
        others = {name: _number(name, value) for name, value in found.items() if name != "loss"}
        return MicrobatchLoss(_scalar(found.get("loss"), _OF_FUNCTION), others)

    def _of_microbatch(self, microbatch: Microbatch) -> Any:
        """What a loss function with one argument gives."""
        assert self._loss is not None
        try:
            return self._loss(microbatch)
        except Exception as error:
            error.add_note(
                "shardwise: a loss function with one argument gets the microbatch, and calls the model itself. "
                "With two it gets the output and the microbatch"
            )
            raise

    def output(self, microbatch: Microbatch) -> Any:
        """What the model gives, called as for the loss."""
        return self._called(microbatch) if self._loss is None else self._output(microbatch)

    def _output(self, microbatch: Microbatch) -> Any:
        """The output for the inputs in a microbatch.

        Of names (a mapping, a dataclass, a named tuple) the forward gets those that it names, or the first where it
        names none. Of a tuple or list it gets the first entry: a tuple's as positional arguments, a mapping's as
        before. Where its forward requires n arguments, it gets the first n entries.
        """
        if isinstance(microbatch, Mapping):
            return self._output_of_names(microbatch)
        if is_container(microbatch) and (names := field_names(microbatch)):
            fields = {name: getattr(microbatch, name) for name in names}
            if any(name in self._named for name in names):
                return self._output_of_names(fields)
        if not isinstance(microbatch, tuple | list):
            return self.model(microbatch)
        return self._output_of_places(microbatch)

    def _output_of_names(self, microbatch: Mapping[str, Any]) -> Any:
        # By name, as far as names fit. A position is taken only where it cannot be the wrong one.
        if self._takes_any_keyword:
            return self._called_by_names(microbatch, microbatch)
        if named := {name: microbatch[name] for name in self._named if name in microbatch}:
            return self._called_by_names(named, microbatch)
        if len(self._required) != 1:
            raise self._refusal(microbatch, "name the batch's entries as forward does")
        first, wanted = next(iter(microbatch)), self._required[0]
        # A loss function takes other entries under any names. One that is spelled like the argument is not for it.
        meant = difflib.get_close_matches(wanted, microbatch, n=1, cutoff=0.8)
        if meant not in ([], [first]):
            raise self._refusal(microbatch, f"rename {meant[0]} to {wanted}, else the model would get {first}")
        return self.model(microbatch[first])

    def _output_of_places(self, microbatch: Sequence[Any]) -> Any:
        num_taken = max(len(self._required), 1)
        inputs = microbatch[0] if microbatch else None
        if num_taken == 1 or len(microbatch) <= 2:
            if isinstance(inputs, Mapping):
                return self._output_of_names(inputs)
            if type(inputs) is tuple:
                return self.model(*inputs)
        if len(microbatch) < num_taken:
            raise self._refusal_of_places(microbatch, "give as many entries, or (inputs, targets)")
        # One more entry is the target. Two more may be an argument that forward can do without.
        if self._has_optional_places and len(microbatch) > num_taken + 1:
            raise self._refusal_of_places(microbatch, "say which of them are inputs: ((input, input), target)")
        return self.model(*microbatch[:num_taken])

    def _called(self, microbatch: Microbatch) -> Any:
        """The output for the whole microbatch."""
        if isinstance(microbatch, Mapping):
            return self._called_by_names(microbatch, microbatch)
        return self.model(*microbatch) if isinstance(microbatch, tuple | list) else self.model(microbatch)

    def _called_by_names(self, named: Mapping[str, Any], microbatch: Mapping[str, Any]) -> Any:
        """The output for arguments of these names. Raises ModelError for names that forward cannot be called with."""
        if not self._has_hooks():
            if lacking := [name for name in self._required_names if name not in named]:
                raise self._refusal(
                    microbatch, f"{', '.join(lacking)} is missing: name the batch's entries as forward does"
                )
            if not self._takes_any_keyword and (surplus := [name for name in named if name not in self._named]):
                raise self._refusal(
                    microbatch,
                    f"leave out {', '.join(surplus)}, or pass loss=f(output, batch) (model.loss in a configuration): "
                    "then the model gets the entries that its forward names",
                )
        return self.model(**named)

    def _has_hooks(self) -> bool:
        """Whether hooks of the user may put arguments in before the forward, or take some out."""
        found = [hooks_before_all_forwards, forward_pre_hooks(self.model)]
        hooks = [hook for each in (*found, forward_pre_hooks(self._inner)) for hook in each.values()]
        return not all(map(is_ours, hooks))

    def _refusal_of_places(self, microbatch: Sequence[Any], way_out: str) -> ModelError:
        return ModelError(
            f"the model's forward takes {', '.join(self._named) or 'any arguments'} "
            f"({len(self._required)} of them required), and the batch is a {type(microbatch).__name__} of "
            f"{len(microbatch)} entries; {way_out}"
        )

    def _refusal(self, microbatch: Mapping[str, Any], way_out: str) -> ModelError:
        return ModelError(
            f"the model's forward takes {', '.join(self._named) or 'no named arguments'}, and the batch has "
            f"{', '.join(microbatch)}; {way_out}"
        )


def check_loss(loss: object) -> None:
    """Raise ModelError for a loss that cannot be called."""
    if not (loss is None or callable(loss)):
        raise ModelError(
            f"loss: {loss!r} is no function; give f(output, batch) -> loss, f(batch) -> loss, or None where the model "
            "gives its loss"
        )


def _takes_output(loss: Callable[..., Any] | None) -> bool:
    """Whether a loss function has room for an output and a microbatch; one with one argument calls the model itself."""
    if loss is None:
        return True
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return True
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(positional) != 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def _loss_in(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _number(name: str, value: Any) -> Any:
    """An entry of a dict that a loss function returned. Raises ModelError for what is no single number."""
    is_one = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float | np.number)
    if is_one and isinstance(name, str):
        return value
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
    raise ModelError(
        f"the loss function gives {name!r} in its dict, {given}. Each entry has a name, and is one number: take its "
        "mean over the rows of the microbatch"
    )


def _scalar(value: Any, source: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(()) if value.dim() else value
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
    raise ModelError(
        f"{source} holds no scalar loss (found {given}). Give labels to a model that computes its loss, or pass "
        "loss=f(output, batch) (model.loss in a configuration)"
    )


Weight: TypeAlias = float | torch.Tensor
"""A number, or one that is on a device and is not read."""


def scaled_loss(loss: torch.Tensor, factor: Weight) -> torch.Tensor:
    """The loss with its weight in the mean."""
    if isinstance(factor, torch.Tensor):
        return loss * factor.to(loss.dtype)
    # A multiplication by 1.0 would be exact, but adds a node to the graph of every microbatch.
    return loss if factor == 1.0 else loss * factor


class BatchSource(Protocol):
    """What hands batches out, such as `sw.Data`. It draws ahead: only the engine knows on what it made a step."""

    def on_step(self, batch: Batch) -> bool:
        """A step was made on this batch; whether it is one of this source."""

    def on_other_step(self) -> None:
        """A step was made on a batch that no source knows."""


class TrainedBatches:
    """The sources of one engine. A source that the program has dropped is forgotten."""

    def __init__(self) -> None:
        self._sources: WeakSet[BatchSource] = WeakSet()

    def add(self, source: BatchSource) -> None:
        """Tell it of every step from now on."""
        self._sources.add(source)

    def tell(self, batch: Batch) -> None:
        """A step was made on `batch`."""
        sources = list(self._sources)
        # Microbatches of a list may be batches of a source each. All sources are asked: one batch may be made of
        # tensors of several.
        given = given_microbatches(batch)
        answers = [source.on_step(each) for source in sources for each in ([batch] if given is None else given)]
        if not any(answers):
            for source in sources:
                source.on_other_step()
