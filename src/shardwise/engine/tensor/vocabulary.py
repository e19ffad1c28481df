"""The cross-entropy over a vocabulary that is cut over the ranks: logits stay on the rank that computed them.

Per token each rank gives three numbers: the largest logit, the sum of exponentials relative to it, and the label's
logit if it has it. Label smoothing needs a fourth, the sum of logits. 6 tokens, label 4:

    rank 0   logits 2 0 1 |            largest 2    sum e^0 + e^-2 + e^-1 = 1.503    label 0 (foreign)
    rank 1              | 3 4 0        largest 4    sum e^-1 + e^0 + e^-4 = 1.386    label 4

    on both  largest 4,  sum 1.503 e^(2-4) + 1.386 e^(4-4) = 1.590,  loss 4 + ln 1.590 - 4 = 0.464

The gradient of a rank's logits is softmax minus one at the label, which needs ln of the whole sum and no exchange
(Shoeybi et al., 2019, Megatron-LM, arXiv:1909.08053).
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.engine.tensor.styles import Styled, span_outside, style_of_head
from shardwise.engine.tensor.tp_collectives import TpCollectives, widened
from shardwise.engine.torch_private import backward_class
from shardwise.errors import ModelError, PlanError

Reduction = Literal["mean", "sum", "none"]


class VocabularyCrossEntropy:
    """Cross-entropy of the logits of a head, which may be cut over the ranks along `tp` (rule `column`) or not.

    Equal to `torch.nn.functional.cross_entropy`, to float32 rounding, whatever the plan:

        entropy = sw.VocabularyCrossEntropy(model.head)
        engine = sw.parallelize(model, plan, loss=lambda logits, batch: entropy(logits, batch["labels"]), ...)

    head: the module that gives the logits. ignore_index, reduction, label_smoothing: as in torch. Half-precision logits
    are read as float32, and the loss is float32 then.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if reduction not in ("mean", "sum", "none"):
            raise PlanError(f"reduction: {reduction!r} is not one of 'mean', 'sum', 'none'")
        if not 0.0 <= label_smoothing <= 1.0:
            raise PlanError(f"label_smoothing: {label_smoothing!r} is not between 0 and 1")
        self._head = head
        self._ignore_index = ignore_index
        self._reduction = reduction
        self._smoothing = label_smoothing
        # `self._compute` is a new bound method at each access. The pipeline knows an operation by identity.
        self._operation = self._compute

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss; logits (..., vocabulary or this rank's part of it), labels (...) without the last dim."""
        # Logits of another pipeline stage are a stand-in: the whole loss is one operation there, run by the stage
        # that has them.
        if has_torch_function_unary(logits):
            loss: torch.Tensor = handle_torch_function(self._operation, (logits, labels), logits, labels)
            return loss
        return self._compute(logits, labels)

    def _compute(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.shape[:-1] != labels.shape:
            raise ModelError(
                f"logits of shape {tuple(logits.shape)} were given with labels of shape {tuple(labels.shape)}; labels "
                "have the shape of logits without the last dim"
            )
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        styled = style_of_head(self._head)
        if styled is None:
            # "none" and the reduction below, so that a head cut and a head whole take one path to the mean.
            losses = functional.cross_entropy(
                widened(rows),
                targets,
                ignore_index=self._ignore_index,
                reduction="none",
                label_smoothing=self._smoothing,
            )
        else:
            losses = self._of_parts(rows, targets, styled)
        if self._reduction == "none":
            return losses.view(labels.shape)
        if self._reduction == "sum":
            return losses.sum()
        return losses.sum() / (targets != self._ignore_index).sum()

    def _of_parts(self, rows: torch.Tensor, targets: torch.Tensor, styled: Styled) -> torch.Tensor:
        ranges = styled.style.ranges
        own = ranges[styled.collectives.rank]
        if len(own) > 1:
            raise ModelError(
                f"{styled.name!r} is cut in several parts on each rank; a head has the rule 'column' alone"
            )
        ((start, stop),) = own
        if rows.shape[-1] != stop - start:
            raise ModelError(
                f"logits of {rows.shape[-1]} tokens were given, but {styled.name!r} gives the {stop - start} of this "
                "rank. Give the head's output to the loss, or make the loss for the head that gave these"
            )
        size = max(end for each in ranges for _, end in each)
        losses: torch.Tensor = _CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, targets, styled.collectives, start, size, self._ignore_index, self._smoothing
        )
        return losses


class _CutCrossEntropy(torch.autograd.Function):
    """The loss of each token, from the logits of this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        targets: torch.Tensor,
        collectives: TpCollectives,
        start: int,
        size: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        wide = widened(rows)
        ignored = targets == ignore_index
        if found := span_outside(targets.masked_fill(ignored, 0), size):
            raise IndexError(f"labels reach from {found[0]} to {found[1]}, but there are {size} tokens")
        foreign = (targets < start) | (targets >= start + wide.shape[-1]) | ignored
        places = (targets - start).masked_fill(foreign, 0)
        largest = wide.amax(-1)
        numbers = [
            largest,
            (wide - _finite(largest).unsqueeze(-1)).exp_().sum(-1),
            wide.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0),
        ]
        if smoothing:
            numbers.append(wide.sum(-1))
        # One message for all numbers of all tokens: a size that does not depend on the vocabulary.
        of_ranks = collectives.gathered(torch.stack(numbers))
        largest = of_ranks[:, 0].amax(0)
        # Each rank's sum is relative to its own largest logit. Brought to the largest of all, nothing overflows.
        weights = (of_ranks[:, 0] - _finite(largest)).exp()
        total, of_target = _added(of_ranks[:, 1] * weights), _added(of_ranks[:, 2])
        # Every rank computes this from the same numbers in the same order: the loss has the same bits on all ranks.
        log_total = largest + total.log()
        losses = log_total - of_target
        if smoothing:
            mean = _added(of_ranks[:, 3]) / size
            losses = (1 - smoothing) * losses + smoothing * (log_total - mean)
        # The logits themselves, not the softmax: it would be another tensor of their size, in float32.
        ctx.save_for_backward(rows, log_total, places, foreign, ignored)
        ctx.numbers = (size, smoothing)
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    # `log_total` is a constant here. A second derivative would miss what it contributes, so it is refused.
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, log_total, places, foreign, ignored = ctx.saved_tensors
        size, smoothing = ctx.numbers
        shares = (rows.to(log_total.dtype) - log_total.unsqueeze(-1)).exp_()
        if smoothing:
            shares -= smoothing / size
        # Minus one at the label, on the rank that has it: elsewhere `own` is 0, and adding it to place 0 changes
        # nothing.
        own = foreign.logical_not().to(shares.dtype) * (1 - smoothing)
        shares.scatter_add_(-1, places.unsqueeze(-1), -own.unsqueeze(-1))
        shares *= gradients[0].masked_fill(ignored, 0).unsqueeze(-1)
        return shares.to(rows.dtype), None, None, None, None, None, None


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """What is subtracted from logits: 0 where all of them are masked out, since -inf - -inf is nan."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _added(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dim, in its order."""
    total = values[0].clone()
    for each in values[1:]:
        total += each
    return total


def is_cut_loss(node: object) -> bool:
    """Whether a node of an autograd graph is the backward of a loss over cut logits."""
    return isinstance(node, backward_class(_CutCrossEntropy))
