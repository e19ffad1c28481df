"""An Accelerator whose processes are the data ranks of a plan.

    mesh pp=2, dp_shard=2    rank 0  1  2  3
    process_index                 0  1  0  1    num_processes 2; a split gives ranks 0 and 2 the same part
    is_main_process               x             one rank each, also of `on_process(process_index=...)`
    is_last_process                  x
    main_process_first            all ranks of the world wait

Nothing here wraps a model or an optimizer, or talks over torch.distributed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import ProfileKwargs, recursively_apply

from shardwise.errors import ModelError
from shardwise.launchers.environment import announced
from shardwise.moving.nested_exchange import exchange
from shardwise.trainers.data_ranks import DataRanks, padded_to, reduced


class RankState(PartialState):
    """Replaces a state of accelerate: its processes, also in its decorators and contexts, are the data ranks."""

    # Properties of PartialState; none of them changes during a run.
    is_main_process = is_local_main_process = is_last_process = use_distributed = False

    def __init__(self, original: Any, ranks: DataRanks) -> None:
        # Not PartialState's: all its objects are one in a process, and simulated ranks share a process.
        self.original: Any = original.original if isinstance(original, RankState) else original
        self.ranks = ranks
        self.num_processes, self.process_index = ranks.count, ranks.rank
        self.device = ranks.world.device
        self.is_speaker = ranks.is_speaker
        self.local_process_index = _local_rank(self.original, ranks)
        self.is_main_process, self.is_local_main_process = ranks.world.rank == 0, self.local_process_index == 0
        self.is_last_process = ranks.is_speaker and ranks.rank == ranks.count - 1
        self.use_distributed = ranks.world.size > 1

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """As in accelerate, on the rank that speaks for the process."""
        return super().on_process(function, process_index if self.is_speaker else -1)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """As in accelerate; padding asks no other rank."""
        rows = _rows_of(inputs) if apply_padding else inputs
        with super().split_between_processes(rows, apply_padding) as part:
            yield _taken(inputs, part, self.device) if apply_padding else part

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        if self.use_distributed:
            self.ranks.world.exchange(b"", purpose="accelerator.wait_for_everyone")

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    # Arguments of a Trainer are saved with its model: elsewhere they have the state of that place.
    def __reduce__(self) -> Any:
        return PartialState, ()

    def __deepcopy__(self, memo: Any) -> "RankState":
        return self


def _local_rank(original: Any, ranks: DataRanks) -> int:
    if original.num_processes == ranks.world.size:
        return int(original.local_process_index)
    found = announced(os.environ)  # accelerate knows fewer launchers
    is_this = found is not None and (found.rank, found.size) == (ranks.world.rank, ranks.world.size)
    return ranks.world.rank if found is None or not is_this or found.local_rank is None else found.local_rank


def _rows_of(inputs: Any) -> Any:
    """The inputs with numbers of rows for tensors, which accelerate pads by asking all processes of torch."""
    if isinstance(inputs, Mapping):
        return {name: _rows_of(each) for name, each in inputs.items()}
    return list(range(len(inputs))) if isinstance(inputs, torch.Tensor) else inputs


def _taken(inputs: Any, part: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _taken(each, part[name], device) for name, each in inputs.items()}
    return inputs[part].to(device) if isinstance(inputs, torch.Tensor) and isinstance(part, list) else part


def _of_state(name: str) -> Callable[..., Any]:
    """A method that calls the one of the accelerator's state; accelerate's own asks the state of its process."""

    def called(self: "RankCalls", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.state, name)(*args, **kwargs)

    return called


class RankCalls(Accelerator):
    """What accelerate's Accelerator asks of processes, over the data ranks."""

    ranks: DataRanks
    state: Any
    is_alone = False
    """Whether what is gathered stays on its data rank."""

    def take_ranks(self, ranks: DataRanks) -> None:
        """From here on these are the processes."""
        self.ranks, self.state = ranks, RankState(self.state, ranks)

    @property
    def is_last_process(self) -> bool:
        """True on one rank."""
        return bool(self.state.is_last_process)

    wait_for_everyone = _of_state("wait_for_everyone")
    split_between_processes = _of_state("split_between_processes")
    on_main_process = _of_state("on_main_process")
    on_local_main_process = _of_state("on_local_main_process")
    on_last_process = _of_state("on_last_process")
    on_process = _of_state("on_process")
    on_local_process = _of_state("on_local_process")

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0."""
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0."""
        if self.is_main_process:
            super().log(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """From rank 0, or from the first rank of each host."""
        on_each_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if on_each_node else self.is_main_process:
            super().save(*args, **kwargs)

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """As in accelerate, with a trace of each rank of the world."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if (folder := handler.output_trace_dir) is not None:
            os.makedirs(folder, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(folder, f"profile_{self.ranks.world.rank}.json"))
            self.wait_for_everyone()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing: loaders give all data ranks the same number of batches. Raises ModelError where they would not."""
        if self.ranks.count > 1 and not (self.even_batches if even_batches is None else even_batches):
            raise ModelError(
                "join_uneven_inputs(even_batches=False): ranks of an engine step together, and one that has no batch "
                "cannot leave the others. Leave even_batches out: loaders repeat rows at their end, which "
                "gather_for_metrics drops; or give loaders drop_last=True"
            )
        yield

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last check; all ranks call it together."""
        flag = getattr(self, "flag_tensor", None)
        mine, self.flag_tensor = flag is not None and bool(flag), None
        return any(self.ranks.world.exchange(b"\1" * mine, purpose="check_trigger of accelerate"))

    # Tensors --------------------------------------------------------------------------------------------------------

    def parts_of(self, tensor: torch.Tensor, purpose: str) -> list[torch.Tensor]:
        """The tensors that data ranks give, in their order."""
        return self.ranks.tensors(tensor, purpose=purpose)

    def gather(self, tensor: Any) -> Any:
        """Tensors of all data ranks, one after the other in dim 0, in any nesting; they may have other sizes there."""

        def gathered(each: torch.Tensor) -> torch.Tensor:
            found = self.parts_of(each.reshape(1) if each.ndim == 0 else each, "tensors that accelerate gathers")
            return found[0] if len(found) == 1 else torch.cat(found)

        return recursively_apply(gathered, tensor, error_on_other_type=True)

    def gather_object(self, object: Any) -> Any:
        """Lists of all data ranks, one after the other: of numbers, texts, tensors and what `sw.exchange` takes."""
        if self.ranks.world.size == 1 or self.is_alone:
            return object
        given = object if self.ranks.is_speaker else []
        told = exchange(given, channel=self.ranks.world, purpose="objects that accelerate gathers")
        return [each for one in told for each in one]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, or as `gather_object` for what is no tensor, without the rows that a loader gave twice."""
        count = self._num_rows_at_end()
        if use_gather_object or not _has_only_tensors(input_data):
            return self.gather_object(input_data)[:count]
        found = self.gather(input_data)
        return found if count is None else recursively_apply(lambda each: each[:count], found)

    def _num_rows_at_end(self) -> int | None:
        """How many rows count in the last round of a loader that is at its end; None: all that came."""
        if self.num_processes == 1:
            return None
        under_way = [each for each in self.gradient_state.dataloader_references if each is not None]
        own = [each for each in under_way if any(each is one for one in self._dataloaders)]
        if not own or not own[-1].end_of_dataloader or own[-1].remainder <= 0:
            return None
        parts = (own[-1].batch_sampler, own[-1].sampler, own[-1].dataset)
        return None if any(getattr(each, "takes_uneven_rounds", False) for each in parts) else int(own[-1].remainder)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean, max or min over the data ranks, in any nesting; "none": what was given.

        As in accelerate, `scale` counts on TPUs alone. Raises BatchError, see `reduced`.
        """
        if reduction == "none":
            return tensor
        return recursively_apply(
            lambda each: reduced(self.parts_of(each, "tensors that accelerate reduces"), reduction),
            tensor,
            error_on_other_type=True,
        )

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The tensors, in any nesting, padded to the largest size in `dim` of any data rank."""

        def padded(each: torch.Tensor) -> torch.Tensor:
            if each.is_nested or not -each.ndim <= dim < each.ndim:
                return each
            sizes = self.parts_of(torch.tensor([each.shape[dim]]), "sizes to pad to")
            return padded_to(each, int(torch.cat(sizes).max()), dim=dim, value=pad_index, first=pad_first)

        return recursively_apply(padded, tensor, error_on_other_type=True)


def _has_only_tensors(tree: Any) -> bool:
    """As accelerate looks into one."""
    if isinstance(tree, Mapping):
        return all(map(_has_only_tensors, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_has_only_tensors, tree))
    return isinstance(tree, torch.Tensor)
