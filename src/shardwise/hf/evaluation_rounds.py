"""Evaluation and prediction: each data rank computes its batches, and all get the rows of all in their order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from shardwise.errors import BatchError
from shardwise.hf.rank_batches import RankStream, take_uneven_rounds
from shardwise.moving.nested_exchange import exchange
from shardwise.trainers.data_ranks import padded_to, plain_tensor


class EvaluationRounds:
    """The part of a trainer that evaluates and predicts."""

    def evaluation_loop(
        self: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in transformers, over the data ranks; every rank gets all rows, in the order of the dataset."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        # A loader of the user's own gives every rank all batches, and each computes them.
        is_shared = getattr(dataloader, "_is_accelerate_prepared", False)
        take_uneven_rounds(dataloader, shares_rows=self._sw_generates)
        engine = self.engine
        engine.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        is_streamed = args.batch_eval_metrics and description != "Prediction"
        names = ("losses", "predictions", "labels", "inputs")
        found = {name: EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100) for name in names}
        metrics: dict[str, Any] | None = None
        num_rows = 0
        for number, (inputs, is_last) in enumerate(_with_last(dataloader)):
            own = self._sw_computed(inputs, dataloader, loss_only, ignore_keys, number)
            parts = self._sw_of_all_ranks(own) if is_shared and self._sw_ranks.count > 1 else own
            num_rows += parts.pop("rows", 0)
            for name, each in parts.items():
                if each is not None and (name == "losses" or not is_streamed):
                    found[name].add(each)
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            if args.batch_eval_metrics:
                has_both = parts["predictions"] is not None and parts["labels"] is not None
                if self.compute_metrics is not None and has_both:
                    metrics = self.compute_metrics(self._sw_metric_inputs(parts), compute_result=is_last)
            elif args.eval_accumulation_steps is not None and (number + 1) % args.eval_accumulation_steps == 0:
                for each in found.values():
                    each.to_cpu_and_numpy()
        self.gather_function = self.accelerator.gather_for_metrics
        arrays = {name: each.get_arrays() for name, each in found.items()}
        has_all = arrays["predictions"] is not None and arrays["labels"] is not None
        if self.compute_metrics is not None and has_all and not args.batch_eval_metrics:
            metrics = self.compute_metrics(self._sw_metric_inputs(arrays))
        return EvalLoopOutput(
            predictions=arrays["predictions"],
            label_ids=arrays["labels"],
            metrics=self._sw_named_metrics(metrics or {}, arrays["losses"], metric_key_prefix),
            num_samples=_num_samples(dataloader, num_rows),
        )

    def _sw_metric_inputs(self: Any, parts: dict[str, Any]) -> EvalPrediction:
        wanted = self.args.include_for_metrics
        return EvalPrediction(
            predictions=parts["predictions"],
            label_ids=parts["labels"],
            losses=parts["losses"] if "loss" in wanted else None,
            inputs=parts["inputs"] if "inputs" in wanted else None,
        )

    def _sw_named_metrics(self: Any, metrics: dict[str, Any], losses: Any, prefix: str) -> dict[str, Any]:
        metrics = denumpify_detensorize(metrics)
        if isinstance(losses, list) and losses:
            losses = np.concatenate(losses)
        if isinstance(losses, np.ndarray):
            finite = np.isfinite(losses)
            kept = losses[finite] if self.args.logging_nan_inf_filter and finite.any() else losses
            metrics[f"{prefix}_loss"] = kept.mean().item()
        return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": each for name, each in metrics.items()}

    def _sw_computed(
        self: Any, inputs: Any, dataloader: Any, loss_only: bool, ignore_keys: Any, number: int
    ) -> dict[str, Any]:
        """What this data rank has of a round: the loss of each row, predictions, labels, inputs."""
        nothing: dict[str, Any] = dict.fromkeys(("losses", "predictions", "labels", "inputs")) | {"rows": 0}
        is_absent = not inputs and self._sw_ranks.count > 1
        is_uneven = self._sw_ranks.count > 1 and self._sw_has_own_loss and self._sw_is_missing(inputs)
        if is_absent:
            if self.plan.sharding.stage < 3:
                return nothing
            # The others gather parameters together with this rank, in the same calls.
            inputs = self._sw_stand_in(dataloader)
        self._sw_last_batch = inputs if self.plan.sharding.stage == 3 else None
        is_uncollated = isinstance(inputs, list) and all(isinstance(each, Mapping) for each in inputs)
        rows = len(inputs) if is_uncollated else find_batch_size(inputs) or 0
        # A Seq2SeqTrainer counts a small last batch as a full one: it sets this function.
        is_full = self.gather_function == self.accelerator.gather
        first = number * self._sw_ranks.count + self._sw_ranks.rank
        known = rows if self._sw_generates else _num_rows_of(dataloader, first)
        repeats = self.args.eval_batch_size if is_full else known or rows or 1
        with self._sw_preparing("evaluation", number):
            loss, predictions, labels = self._sw_predicted(inputs, loss_only, ignore_keys, alone=is_uneven)
        if is_absent:
            return nothing
        if predictions is not None and self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)
        main = getattr(self.model, "main_input_name", "input_ids")
        wants_inputs = "inputs" in self.args.include_for_metrics
        return {
            "losses": None if loss is None else loss.reshape(1).repeat(repeats),
            "predictions": predictions,
            "labels": labels,
            "inputs": self._prepare_input(inputs[main]) if wants_inputs else None,
            "rows": rows,
        }

    def _sw_is_missing(self: Any, inputs: Any) -> bool:
        """Whether some data rank has no batch in this round: what the loss of the others gathers would wait for it."""
        (present,) = self._sw_ranks.sums([float(bool(inputs))], purpose="data ranks with a batch")
        return bool(present < self._sw_ranks.count)

    def _sw_predicted(self: Any, inputs: Any, loss_only: bool, ignore_keys: Any, *, alone: bool) -> Any:
        is_together = self._sw_generates
        predicting = nullcontext(self.model) if is_together else self._sw_predicting()
        with predicting as model, self.accelerator.computing(alone=alone, together=is_together):
            return self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    def _sw_stand_in(self: Any, dataloader: Any) -> Any:
        if self._sw_last_batch is not None:
            return self._sw_last_batch
        dataset = dataloader.dataset
        row = dataset[0] if hasattr(dataset, "__getitem__") else next(iter(getattr(dataset, "dataset", dataset)))
        return dataloader.collate_fn([row])

    def _sw_of_all_ranks(self: Any, own: dict[str, Any]) -> dict[str, Any]:
        """The rows of all data ranks of a round, in their order."""
        given = (own.pop("rows"), _plain(own))
        told = exchange(given, channel=self._sw_ranks.channel, purpose="rows of an evaluation")
        # A rank without rows cannot know where the others have theirs.
        parts = [part for rows, part in told if rows] or [part for _, part in told]
        joined: dict[str, Any] = _joined(parts, self.args.device)
        return joined | {"rows": sum(rows for rows, _ in told)}


def _plain(value: Any) -> Any:
    """What a rank sends of a value: plain tensors in dicts and tuples."""
    if isinstance(value, torch.Tensor):
        return plain_tensor(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if value is None:
        return None
    raise BatchError(
        f"an evaluation cannot gather a {type(value).__name__} of the model's output; name its key in ignore_keys, or "
        "drop it in preprocess_logits_for_metrics"
    )


def _joined(parts: Sequence[Any], device: torch.device) -> Any:
    """Tensors joined in dim 0, padded in dim 1 to the longest with -100, as the Trainer does."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([each[name] for each in parts], device) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(each, device) for each in zip(*parts, strict=True))
    if first is None:
        return None
    if first.ndim > 1:
        size = max(each.shape[1] for each in parts)
        parts = [padded_to(each, size, dim=1, value=-100) for each in parts]
    return torch.cat([each.reshape(1) if each.ndim == 0 else each for each in parts]).to(device)


def _with_last(batches: Any) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last."""
    nothing = object()
    ahead: Any = nothing
    for batch in batches:
        if ahead is not nothing:
            yield ahead, False
        ahead = batch
    if ahead is not nothing:
        yield ahead, True


def _num_rows_of(dataloader: Any, number: int) -> int | None:
    """Rows of the dataset in a batch, by its place among those of all ranks; a packed batch has fewer in its tensors.

    None: only the batch itself can say.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    size = getattr(batches, "batch_size", None)
    dataset = getattr(dataloader, "dataset", None)
    if size is None or not has_length(dataset) or isinstance(dataset, RankStream):
        return None
    # A sampler may give a row several times.
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", dataset)
    return int(max(0, min(size, len(sampler if has_length(sampler) else dataset) - number * size)))


def _num_samples(dataloader: Any, num_rows: int) -> int:
    dataset = getattr(dataloader, "dataset", None)
    return len(dataset) if has_length(dataset) and not isinstance(dataset, RankStream) else num_rows
