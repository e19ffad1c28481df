"""What accelerate and TrainingArguments say of processes, said of the plan's data ranks.

    mesh pp=2, dp_shard=2       rank 0  1  2  3
    accelerator.process_index        0  1  0  1      num_processes 2: the data ranks
    args.process_index               0  1  2  3      rank 0 writes files and logs

Nothing here wraps a model or an optimizer, or talks over torch.distributed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset

from shardwise.errors import ModelError
from shardwise.hf.rank_batches import BatchesOfRank, RankCollate, RankStream
from shardwise.trainers.data_ranks import DataRanks
from shardwise.trainers.rank_calls import RankCalls, RankState


class ArgumentsState(RankState):
    """Replaces `args.distributed_state`; its processes are all ranks of the world."""

    distributed_type = DistributedType.NO

    def __init__(self, original: Any, ranks: DataRanks) -> None:
        super().__init__(original, ranks)
        self.process_index, self.is_speaker = ranks.world.rank, True

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """The part of this data rank."""
        return RankState(self.original, self.ranks).split_between_processes(inputs, apply_padding)


class PlanAccelerator(RankCalls):
    """An Accelerator over data ranks, which leaves models and optimizers to the engine."""

    is_computing: bool
    """Whether a loss or a prediction is computed: there is one process then, and the engine adds over the ranks."""
    is_preparing: bool
    """Whether all ranks prepare inputs together: ranks along pp and tp take what the first of them gives."""
    is_alone: bool
    """Whether what a loss gathers stays on its data rank: some other has no batch, and computes none."""
    is_in_first: bool
    """Whether losses of the first update are computed whose inputs were generated: they may be 0 whatever was read."""
    is_in_last: bool | None
    """Whether the loss of an update's last microbatch is computed; None: no loss of a step is."""
    step_was_skipped: bool

    @classmethod
    def take_over(cls, accelerator: Any, ranks: DataRanks) -> None:
        """Make this of an Accelerator, which keeps its settings."""
        # Not another object: the Trainer has handed out its methods already.
        accelerator.__class__ = cls
        accelerator.take_ranks(ranks)
        accelerator.is_computing = accelerator.is_alone = accelerator.step_was_skipped = False
        accelerator.is_preparing, accelerator.is_in_first, accelerator.is_in_last = False, False, None

    @property
    def num_processes(self) -> int:
        """Data ranks; 1 inside of a loss."""
        return 1 if self.is_computing else self.ranks.count

    @property
    def distributed_type(self) -> DistributedType:
        """None: the engine distributes."""
        return DistributedType.NO

    @property
    def use_distributed(self) -> bool:
        """False: the engine distributes."""
        return False

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last microbatch of an update."""
        return bool(self.gradient_state.sync_gradients if self.is_in_last is None else self.is_in_last)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients of the last step were not finite, where losses are scaled."""
        return self.step_was_skipped

    @contextmanager
    def computing(self, *, alone: bool, together: bool = False, first: bool = False) -> Iterator[None]:
        """Inside, a loss or a prediction is computed; alone: see `is_alone`.

        together: its inputs were prepared by all data ranks together, and it divides by what it counted over them all.
        first: with `together`, in the first update.
        """
        self.is_computing, self.is_alone, self.is_in_first = not together, alone, together and first
        try:
            yield
        finally:
            self.is_computing = self.is_alone = self.is_in_first = False
            self.is_in_last = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, all ranks prepare inputs together; see `is_preparing`."""
        self.is_preparing = True
        try:
            yield
        finally:
            self.is_preparing = False

    def parts_of(self, tensor: torch.Tensor, purpose: str) -> list[torch.Tensor]:
        """The tensors that data ranks give; all that a program gathers and reduces comes through here."""
        if self.is_alone:
            return [tensor]
        if self.is_in_first:
            self.ranks.check_alike(tensor)
        if not self.is_computing and self.ranks.world.size > self.ranks.count:
            # Programs take this for a point that all processes come to: what one writes behind it was not there before.
            self.ranks.world.exchange(b"", purpose=purpose)
        return self.ranks.tensors(tensor, purpose=purpose, of_speakers=self.is_preparing)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Data loaders give this data rank's batches; the rest stays as it is."""
        made = tuple(self.prepare_data_loader(each) if isinstance(each, DataLoader) else each for each in args)
        return made if len(made) > 1 else made[0]

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """The model, on the device."""
        return model.to(self.device) if evaluation_mode else model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this data rank's batches, on the host."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        ranks = self.ranks
        if isinstance(seeding := data_loader.worker_init_fn, partial) and "rank" in seeding.keywords:
            data_loader.worker_init_fn = partial(
                seeding.func, *seeding.args, **{**seeding.keywords, "rank": ranks.rank}
            )
        is_stream = isinstance(data_loader.dataset, IterableDataset)
        if ranks.count > 1:
            data_loader.collate_fn = RankCollate(data_loader.collate_fn)
            if is_stream:
                # Past the refusal of a built loader: the next lines build another one of its attributes.
                vars(data_loader)["dataset"] = RankStream(
                    data_loader.dataset,
                    batch_size=data_loader.batch_size,
                    drop_last=data_loader.drop_last,
                    num_processes=ranks.count,
                    process_index=ranks.rank,
                )
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            num_processes=1 if is_stream else ranks.count,
            process_index=0 if is_stream else ranks.rank,
            put_on_device=False,
            # A sampler that draws from torch's own numbers draws alike on all ranks.
            rng_types=["torch"] if ranks.world.size > 1 else None,
            dispatch_batches=False,
            even_batches=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
        )
        if ranks.count > 1 and not is_stream:
            for each in (prepared.batch_sampler, prepared.sampler):
                if hasattr(each, "even_batches"):
                    each.__class__ = BatchesOfRank
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Refused."""
        raise ModelError(
            "accelerator.backward(loss) was called, and would train nothing: gradients are the engine's. Return the "
            "loss of compute_loss, and call super().training_step(model, inputs, num_items_in_batch)"
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Refused."""
        raise ModelError(
            "accelerator.clip_grad_norm_ was called, and would clip nothing: the engine clips. Set --max_grad_norm, or "
            "clip_grad_norm of the plan"
        )
