"""From a batch to losses: rows, microbatches, and the call of an unmodified model.

7 rows, k = 3         rows 0 1 2 | 3 4 | 5 6       views of the batch, not copies
"scale", 0-d or no tensor   given to each microbatch as it is
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.engine.wrapping import is_ours
from shardwise.errors import BatchError, ModelError
from shardwise.plan import split_rows

Batch: TypeAlias = Mapping[str, object]
"""Tensors by name, with equally many rows in dim 0; other values, and tensors without dims, are for all rows."""

Microbatch: TypeAlias = dict[str, Any]
"""Some rows of a batch. `Any`, so that functions may say dict[str, torch.Tensor] where that is what they get."""

LossFunction: TypeAlias = Callable[[Any, Microbatch], torch.Tensor]
"""f(output, microbatch) -> a tensor with one element. The output is what the model's forward returns."""

LossWeight: TypeAlias = Callable[[Microbatch], float | torch.Tensor]
"""f(microbatch) -> one finite number of at least 0: by what the loss of the microbatch counts in the mean."""


def count_rows(batch: Batch) -> int:
    """The rows of a batch: the size of dim 0, the same for all its tensors. Raises BatchError."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a batch is a dict of tensors, not a {type(batch).__name__}; wrap it: {{'input_ids': tensor, ...}}"
        )
    # A dict of tensors and nothing deeper: a list that holds tensors would go whole to every microbatch, and each of
    # its rows would count k times.
    if nested := [
        name for name, value in batch.items() if not isinstance(value, torch.Tensor) and _holds_tensor(value)
    ]:
        raise BatchError(
            f"the batch's entry {nested[0]!r} is a {type(batch[nested[0]]).__name__} of tensors, and cannot be split "
            "into microbatches. A batch is a dict of tensors with rows in dim 0. Stack the entry into one tensor, or "
            "name each tensor in the batch"
        )
    rows = {name: value.shape[0] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if not rows:
        raise BatchError(f"the batch has no tensor with a dim 0 to split on; its entries are {sorted(batch, key=str)}")
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise BatchError(f"all tensors of a batch have the same number of rows (dim 0), but {listed}")
    return next(iter(rows.values()))


def is_on_host(batch: Batch) -> bool:
    """Whether no tensor of it is on a device."""
    return all(value.device.type == "cpu" for value in batch.values() if isinstance(value, torch.Tensor))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _holds_tensor(list(value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))


def split_batch(batch: Batch, num_microbatches: int, device: torch.device) -> list[Microbatch]:
    """Cut a batch into microbatches on `device`; entries that are no tensors, and 0-d tensors, go to each of them.

    Rows are not copied: what a forward writes to them is written to the batch, as in a loop over `chunk`.
    Raises BatchError when a microbatch would have no rows.
    """
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise BatchError(f"a batch is split into a whole number of microbatches, 1 or more, not {num_microbatches!r}")
    num_rows = count_rows(batch)
    if not num_rows:
        raise BatchError("the batch has no rows (dim 0 is 0); give each data rank rows, or leave the last batch out")
    if num_rows < num_microbatches:
        raise BatchError(
            f"a batch of {num_rows} rows cannot be split into {num_microbatches} microbatches; give "
            f"{num_microbatches} rows or more, or set merge.microbatches to at most {num_rows}"
        )
    moved: Microbatch = {
        name: _moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
    parts = [
        {
            name: value[rows.start : rows.stop] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in moved.items()
        }
        for rows in split_rows(num_rows, num_microbatches)
    ]
    # Only where no write can reach another microbatch is a separate count true: interleaved rows (a transposed batch)
    # keep the shared one, and autograd's error with it.
    for names in _sharing(moved):
        if _are_apart([[part[name] for name in names] for part in parts]):
            for part in parts:
                part.update(zip(names, _counted_apart([part[name] for name in names]), strict=True))
    return parts


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on the device; the host does not wait until they are there."""
    if value.device.type != "cpu" or device.type == "cpu" or value.layout is not torch.strided:
        return value.to(device)
    # From pinned memory of our own. From other memory torch waits for all that the device has to do; and pinned memory
    # of the user may get the rows of the next step while the device still reads it.
    return torch.empty_like(value, pin_memory=True).copy_(value).to(device, non_blocking=True)


def _sharing(batch: Microbatch) -> list[list[str]]:
    """The entries whose rows a forward may write to, those of one memory and dtype together."""
    found: dict[int, list[str]] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.layout is torch.strided:
            # By storage: two entries may view one memory (inputs and targets shifted by one). They keep one count
            # together.
            found.setdefault(value.untyped_storage()._cdata, []).append(name)
    return [
        names
        for names in found.values()
        if not any(batch[name].requires_grad or batch[name].is_inference() for name in names)
        and len({(batch[name].dtype, type(batch[name])) for name in names}) == 1
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


class LossOfModel:
    """Calls the model on a microbatch and finds the loss.

    Without a loss function the model gets the whole microbatch as keyword arguments and must give a loss
    (`output.loss`, `output["loss"]`, or a scalar). With one, the model gets the entries that its forward names. Where
    it names none of them and takes one argument, it gets the first entry.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        self._model = model
        self._loss = loss
        inner = model
        while (wrapped := inner._modules.get("_orig_mod")) is not None:  # torch.compile's wrapper names no arguments
            inner = wrapped
        self._inner = inner
        parameters = inspect.signature(inner.forward).parameters.values()
        self._takes_any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self._required = [
            each.name
            for each in parameters
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)
        ]
        self._required_names = [
            each.name for each in parameters if each.default is each.empty and each.name in self._named
        ]

    def __call__(self, microbatch: Microbatch) -> torch.Tensor:
        """The loss of one microbatch, a scalar tensor. Raises ModelError when there is none."""
        if self._loss is None:
            return _scalar(_loss_in(self._called(microbatch, microbatch)), "the model's output")
        output = self._output(microbatch)
        return _scalar(self._loss(output, microbatch), "the loss function's result")

    def output(self, microbatch: Microbatch) -> Any:
        """What the model gives, called as for the loss."""
        return self._called(microbatch, microbatch) if self._loss is None else self._output(microbatch)

    def _output(self, microbatch: Microbatch) -> Any:
        # By name, as far as names fit. A position is taken only where it cannot be the wrong one.
        if self._takes_any_keyword:
            return self._called(microbatch, microbatch)
        if named := {name: microbatch[name] for name in self._named if name in microbatch}:
            return self._called(named, microbatch)
        if len(self._required) != 1:
            raise self._refusal(microbatch, "name the batch's entries as forward does")
        first, wanted = next(iter(microbatch)), self._required[0]
        # A loss function takes other entries under any names. One that is spelled like the argument is not for it.
        meant = difflib.get_close_matches(wanted, microbatch, n=1, cutoff=0.8)
        if meant not in ([], [first]):
            raise self._refusal(microbatch, f"rename {meant[0]} to {wanted}, else the model would get {first}")
        return self._model(microbatch[first])

    def _called(self, named: Microbatch, microbatch: Microbatch) -> Any:
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
        return self._model(**named)

    def _has_hooks(self) -> bool:
        """Whether hooks of the user may put arguments in before the forward, or take some out."""
        found = [torch.nn.modules.module._global_forward_pre_hooks, self._model._forward_pre_hooks]
        hooks = [hook for each in (*found, self._inner._forward_pre_hooks) for hook in each.values()]
        return not all(map(is_ours, hooks))

    def _refusal(self, microbatch: Microbatch, way_out: str) -> ModelError:
        return ModelError(
            f"the model's forward takes {', '.join(self._named) or 'no named arguments'}, and the batch has "
            f"{', '.join(microbatch)}; {way_out}"
        )


def _loss_in(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _scalar(value: Any, source: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(()) if value.dim() else value
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
    raise ModelError(
        f"{source} holds no scalar loss (found {given}). Give labels to a model that computes its loss, or pass "
        "loss=f(output, batch) (model.loss in a configuration)"
    )
