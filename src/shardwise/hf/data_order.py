"""A Trainer over an `sw.Data`: rows come in its order, and a run resumes on the next one without reading the others."""

from contextlib import nullcontext
from typing import Any

from transformers import trainer as transformers_trainer

from shardwise.data import Data
from shardwise.errors import ConfigError
from shardwise.hf.borrowed_names import instead
from shardwise.trainers.data_batches import DataBatches


class DataOrder:
    """The part of a trainer that reads an `sw.Data`, where its `train_dataset` is one."""

    @property
    def _sw_data(self: Any) -> Data | None:
        return self.train_dataset if isinstance(self.train_dataset, Data) else None

    def _sw_refuse_data(self: Any) -> None:
        """Raise ConfigError for what has no single epoch to evaluate: said before the run trains up to it."""
        given = self.eval_dataset
        if any(isinstance(each, Data) for each in (given.values() if isinstance(given, dict) else [given])):
            raise ConfigError(
                "eval_dataset is an sw.Data, whose batches go on from one epoch to the next; give its dataset as it "
                "is, and data_collator"
            )

    def get_train_dataloader(self: Any) -> Any:
        """As in transformers; of an `sw.Data`, this data rank's rows. Raises ConfigError for another global batch."""
        data = self._sw_data
        if data is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        rows, parts, given = self._train_batch_size, self.args.gradient_accumulation_steps, data.global_batch
        if (total := self.get_total_train_batch_size(self.args)) != given:
            raise ConfigError(
                f"an update has {rows} (per_device_train_batch_size) x {parts} (gradient_accumulation_steps) x "
                f"{self._sw_ranks.count} (data ranks) = {total} rows, and sw.Data has global_batch={given}; give "
                "numbers whose product is the same"
            )
        loader: Any = DataBatches(data, lambda: self.engine, parts=lambda: parts)
        loader._is_accelerate_prepared = True
        return loader

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        # In an epoch that is resumed in its middle, the Trainer skips batches. The data are behind them already.
        place = (transformers_trainer, "skip_first_batches")
        with nullcontext() if self._sw_data is None else instead({place: _none_skipped}):
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]


def _none_skipped(skip_first_batches: Any, loader: Any, num_batches: int = 0) -> Any:
    return loader if isinstance(loader, DataBatches) else skip_first_batches(loader, num_batches)
