"""What accelerate and TrainingArguments say of processes, said of the plan's data ranks.

    mesh pp=2, dp_shard=2       rank 0  1  2  3
    accelerator.process_index        0  1  0  1      num_processes 2: the data ranks
    args.process_index               0  1  2  3      rank 0 writes files and logs

Nothing here wraps a model or an optimizer, or talks over torch.distributed.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, recursively_apply
from torch.utils.data import DataLoader, IterableDataset

from shardwise.comm import Channel
from shardwise.engine.channels import DATA_AXES
from shardwise.engine.pipeline.stage_values import StageTensor
from shardwise.errors import BatchError, MismatchError, ModelError
from shardwise.hf.rank_batches import BatchesOfRank, RankCollate, RankStream
from shardwise.moving.nested_exchange import exchange
from shardwise.plan import Plan


class DataRanks:
    """The data ranks of a plan, seen from one rank; what they tell each other outside of the engine's steps."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        self.world = channel
        self.data_rank_of = plan.mesh.data_rank
        """The data rank of a rank."""
        self.count = plan.mesh.num_data_ranks
        self.rank = plan.mesh.data_rank(channel.rank)
        members = plan.mesh.peers(channel.rank, DATA_AXES)
        self.is_speaker = channel.rank == min(
            rank for rank in range(channel.size) if plan.mesh.data_rank(rank) == self.rank
        )
        """Whether this rank writes for its data rank."""
        # Of its own: what a loss gathers travels while the engine's transfers are under way.
        self._channel = channel.over(members) if self.count > 1 else None
        copies = plan.mesh.peers(channel.rank, ("tp",))
        self._copies = channel.over(copies) if len(copies) > 1 else None

    def sums(self, numbers: Sequence[float], *, purpose: str) -> list[float]:
        """Each number summed over the data ranks, in their order."""
        if self._channel is None:
            return list(numbers)
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        told = self._channel.exchange(packed, purpose=purpose)
        return [
            sum(each) for each in zip(*(struct.unpack(f"<{len(numbers)}d", bytes(one)) for one in told), strict=True)
        ]

    def take_numbers(self, metrics: dict[str, Any]) -> None:
        """Give every rank the numbers of rank 0; those that it counted may differ."""
        if self.world.size == 1:
            return
        own = {name: each for name, each in metrics.items() if isinstance(each, Real)} if self.world.rank == 0 else {}
        told = self.world.exchange(json.dumps(own, default=float).encode(), purpose="metrics of an evaluation")
        if self.world.rank:
            metrics.update(json.loads(bytes(told[0])))

    def check_alike(self, own: torch.Tensor) -> None:
        """Raise MismatchError, the same on all of them, where ranks along tp computed another tensor each."""
        if self._copies is None:
            return
        values = own.detach().to("cpu", torch.float64).reshape(-1)
        told = self._copies.exchange(values.numpy().tobytes(), purpose="what a loss gathers, along tp")
        first, *others = (np.frombuffer(each) for each in told)
        # Near: a small model that knows nothing has nearly the entropy of its part of the vocabulary everywhere.
        if all(each.shape == first.shape and np.allclose(each, first, rtol=1e-5, equal_nan=True) for each in others):
            return
        raise MismatchError(
            "ranks along tp have the same rows, and the loss gathers other values on each of them. Some module, or a "
            "head whose weight the loss reads, has this rank's part where the whole is read. Leave lm_head whole, by "
            "tensor.rules for the layers alone"
        )

    def texts(self, own: str, *, purpose: str) -> list[str]:
        """A text of each data rank, in their order."""
        if self._channel is None:
            return [own]
        return [bytes(each).decode() for each in self._channel.exchange(own.encode(), purpose=purpose)]

    def tensors(self, own: torch.Tensor | None, *, purpose: str, of_speakers: bool = False) -> list[torch.Tensor]:
        """A tensor of each data rank that has one, in their order. Ranks may have other sizes, and one dtype.

        of_speakers: all ranks of the world take those of the speakers, which may differ from their own along pp and tp.
        """
        channel = self.world if of_speakers and self.world.size > self.count else self._channel
        if channel is None:
            return [] if own is None else [own]
        back = channel.device if own is None else own.device
        if channel is self.world and not self.is_speaker:
            own = None
        if isinstance(own, StageTensor):
            # Every rank along pp gathers with its own peers. As numbers: all of them can read these.
            own = torch.tensor(own.detach().tolist(), dtype=own.dtype).reshape(own.shape)
        told = [bytes(each) for each in channel.exchange(_described(own), purpose=purpose)]
        shapes = [_shape_in(each) for each in told]
        dtypes = {shape[0] for shape in shapes if shape is not None}
        if len(dtypes) > 1:
            raise BatchError(f"data ranks gather tensors of the dtypes {sorted(map(str, dtypes))}; give one dtype")
        if not dtypes:
            return []
        (dtype,) = dtypes
        sizes = [torch.Size(() if shape is None else shape[1]) for shape in shapes]
        counts = [0 if shape is None else size.numel() for shape, size in zip(shapes, sizes, strict=True)]
        device = channel.device
        flat = torch.empty(0, dtype=dtype, device=device) if own is None else own.detach().to(device).reshape(-1)
        whole = torch.empty(sum(counts), dtype=dtype, device=device)
        # As bytes: transfers know fewer dtypes than models have.
        width = dtype.itemsize
        channel.all_gather(
            whole.view(torch.uint8),
            flat.contiguous().view(torch.uint8),
            counts=[count * width for count in counts],
            purpose=purpose,
        ).wait()
        parts = whole.split(counts)
        return [
            part.view(size).to(back)
            for part, size, shape in zip(parts, sizes, shapes, strict=True)
            if shape is not None
        ]


def _described(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else f"{str(tensor.dtype)[6:]}|{','.join(map(str, tensor.shape))}".encode()


def _shape_in(text: bytes) -> tuple[torch.dtype, list[int]] | None:
    if not text:
        return None
    dtype, _, sizes = text.decode().partition("|")
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise BatchError(f"a data rank gathers a tensor of an unknown dtype {dtype!r}")
    return found, [int(size) for size in sizes.split(",") if size]


class RankState:
    """In the place of `args.distributed_state`: the world of the plan, with nothing for torch.distributed to do."""

    distributed_type = DistributedType.NO

    def __init__(self, original: Any, ranks: DataRanks) -> None:
        self.original: Any = original.original if isinstance(original, RankState) else original
        self.num_processes = ranks.count
        self.process_index = ranks.world.rank
        self.is_main_process = ranks.world.rank == 0
        # Simulated ranks share one process, where the original knows of one rank.
        is_real = self.original.num_processes == ranks.world.size
        self.local_process_index = self.original.local_process_index if is_real else ranks.world.rank
        self.is_local_main_process = self.local_process_index == 0

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    # The arguments are saved with the model (training_args.bin): elsewhere they have the state of that place.
    def __reduce__(self) -> Any:
        return PartialState, ()

    def __deepcopy__(self, memo: Any) -> "RankState":
        return self


class PlanAccelerator(Accelerator):
    """An Accelerator over data ranks, which leaves models and optimizers to the engine."""

    ranks: DataRanks
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
        accelerator.ranks = ranks
        accelerator.is_computing = accelerator.is_alone = accelerator.step_was_skipped = False
        accelerator.is_preparing, accelerator.is_in_first, accelerator.is_in_last = False, False, None

    @property
    def num_processes(self) -> int:
        """Data ranks; 1 inside of a loss."""
        return 1 if self.is_computing else self.ranks.count

    @property
    def process_index(self) -> int:
        """This data rank."""
        return self.ranks.rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.world.rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.ranks.world.rank == self.ranks.world.size - 1

    @property
    def distributed_type(self) -> DistributedType:
        """None: the engine distributes."""
        return DistributedType.NO

    @property
    def use_distributed(self) -> bool:
        """False: the engine distributes."""
        return False

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        return self.ranks.world.device

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

    def _found(self, tensor: torch.Tensor, purpose: str) -> list[torch.Tensor]:
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

    def gather(self, tensor: Any) -> Any:
        """Tensors of all data ranks, one after the other in dim 0; they may have other sizes there."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.reshape(1) if tensor.ndim == 0 else tensor
        found = self._found(own, "tensors that a Trainer gathers")
        return found[0] if len(found) == 1 else torch.cat(found)

    def gather_object(self, object: Any) -> Any:
        """Lists of all data ranks, one after the other: of numbers, texts, tensors and what `sw.exchange` takes."""
        if self.ranks.world.size == 1 or self.is_alone:
            return object
        told = exchange(
            object if self.ranks.is_speaker else [], channel=self.ranks.world, purpose="objects that a Trainer gathers"
        )
        return [each for one in told for each in one]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the rows that a loader gave twice at its end."""
        if use_gather_object:
            raise BatchError(
                "objects that are no tensors cannot be gathered (eval_use_gather_object): ranks take no pickles. Turn "
                "them into tensors"
            )
        found = self.gather(input_data)
        count = self._num_rows_at_end()
        return found if count is None else recursively_apply(lambda each: each[:count], found)

    def _num_rows_at_end(self) -> int | None:
        """Rows of the last round of the loader that is at its end; None: all that came."""
        if self.is_computing or self.ranks.count == 1:
            return None
        under_way = [each for each in self.gradient_state.dataloader_references if each is not None]
        own = [each for each in under_way if any(each is one for one in self._dataloaders)]
        if not own or not own[-1].end_of_dataloader or own[-1].remainder <= 0:
            return None
        parts = (own[-1].batch_sampler, own[-1].sampler, own[-1].dataset)
        return None if any(getattr(each, "takes_uneven_rounds", False) for each in parts) else own[-1].remainder

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """As accelerate: pad to the largest size in `dim` of any data rank."""

        def padded(each: torch.Tensor) -> torch.Tensor:
            if each.ndim <= dim:
                return each
            sizes = self._found(torch.tensor([each.shape[dim]]), "sizes to pad to")
            return padded_to(each, int(torch.cat(sizes).max()), dim=dim, value=pad_index, first=pad_first)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over data ranks."""

        def reduced(each: torch.Tensor) -> torch.Tensor:
            found = torch.stack(self._found(each, "tensors that a Trainer reduces"))
            whole = found.sum(0) if reduction != "mean" else found.float().mean(0)
            return whole * scale

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        if self.ranks.world.size > 1:
            self.ranks.world.exchange(b"", purpose="accelerator.wait_for_everyone")


def padded_to(tensor: torch.Tensor, size: int, *, dim: int, value: Any, first: bool = False) -> torch.Tensor:
    """The tensor with `size` in `dim`, filled with `value` behind it, or before it."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_full(shape, value)
    return torch.cat([filling, tensor] if first else [tensor, filling], dim=dim)
