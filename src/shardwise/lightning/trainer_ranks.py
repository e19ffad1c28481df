"""The ranks of a Trainer: who starts them, which rows each gets, and what Lightning sends between them."""

from typing import Any

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from shardwise.comm import Channel, default_channel
from shardwise.comm.channel import alone
from shardwise.errors import ModelError, PlanError
from shardwise.lightning.step_logs import ALIKE
from shardwise.moving.nested_exchange import exchange
from shardwise.plan import Plan
from shardwise.space import Mesh
from shardwise.trainers.data_ranks import DataRanks, reduced


class TrainerRanks(ParallelStrategy):
    """What of a strategy concerns its ranks. Those along pp and tp see the same rows."""

    def __init__(self, plan: Plan | None, channel: Channel | None) -> None:
        """`channel`: None: the ranks that Lightning or torchrun starts."""
        super().__init__()
        self.num_nodes = 1
        self._given_plan = plan
        self._channel = channel
        self._ranks: DataRanks | None = None
        """The ranks that see different rows."""

    @property
    def plan(self) -> Plan:
        """The plan that was given, else stage 1 over all ranks."""
        return self._given_plan or Plan(mesh=Mesh(dp_shard=self.world_size))

    @property
    def channel(self) -> Channel:
        """All ranks."""
        if self._channel is None:
            raise PlanError("the strategy has no ranks before trainer.fit, validate, test or predict")
        return self._channel

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""
        if self._channel is not None:
            return self._channel.device
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[0] if devices[0].type == "cpu" else devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        """This rank."""
        return super().global_rank if self._channel is None else self._channel.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return super().world_size if self._channel is None else self._channel.size

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives ranks different rows; those along pp and tp see the same."""
        return self.plan.mesh.num_data_ranks > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For torch's DistributedSampler."""
        mesh = self.plan.mesh
        return {"num_replicas": mesh.num_data_ranks, "rank": mesh.data_rank(self.global_rank)}

    def set_world_ranks(self) -> None:
        """Called once the devices are known."""
        environment, count = self.cluster_environment, len(self.parallel_devices or [0])
        if self._channel is None and environment is not None:
            environment.set_global_rank(self.node_rank * count + self.local_rank)
            environment.set_world_size(self.num_nodes * count)

    def _configure_launcher(self) -> None:
        if self._channel is None and self.cluster_environment is not None:
            count = len(self.parallel_devices or [0])
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, count, self.num_nodes)

    def setup_environment(self) -> None:
        """Meet the other ranks."""
        if self._channel is None:
            super().setup_environment()
            reset_seed()
            if self.world_size > 1 and self.cluster_environment is not None:
                is_cpu = self.root_device.type == "cpu"
                _init_dist_connection(self.cluster_environment, "gloo" if is_cpu else "nccl")
                self._channel = default_channel()
            else:
                self._channel = alone(self.root_device)
        if self._ranks is None:
            self.plan.mesh.check_world(self.channel.size)
            self._ranks = DataRanks(self.plan, self.channel)
        # A region of autocast is of one kind of device: where ranks compute, whatever `Trainer(accelerator=)` says.
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = self.root_device.type

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self._channel is not None:
            self._channel.exchange(b"", purpose=f"barrier of Lightning: {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of rank `src`, of what `sw.exchange` takes: no rank unpickles what another one sends."""
        mine = obj if self.global_rank == src else None
        return exchange(mine, channel=self.channel, purpose="a broadcast of Lightning")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decide so."""
        said = self.channel.exchange(b"\1" * bool(decision), purpose="a decision of Lightning")
        return b"" not in said if all else any(said)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of the data ranks, in a new first dim."""
        if sync_grads:
            raise ModelError("all_gather(sync_grads=True): an engine sends no gradients of values that ranks gather")
        return torch.stack(self.gathered(tensor))

    def gathered(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The tensor of each data rank, of any shape: torchmetrics gathers its states by it."""
        assert self._ranks is not None
        return self._ranks.tensors(tensor.detach(), purpose="all_gather of Lightning")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, minimum or maximum over the data ranks; ranks along pp and tp have the same values."""
        if group == ALIKE or not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "sum").rpartition(".")[2].lower()
        return reduced(self.gathered(tensor), "mean" if name == "avg" else name)
