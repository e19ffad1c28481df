"""A strategy of Lightning's Trainer whose training, evaluation and checkpoints are those of an engine.

What Lightning calls                       what happens                          what Lightning gets
    training_step, but it accumulates      the batch is kept                     nan: nothing has run yet
    training_step of an update             engine.step([microbatch, ...]) runs   the mean loss of the batches
                                           the module's training_step for each
    backward, clipping, optimizer.step     nothing: they were in the step        the counts of its progress
    self.log in training_step              an entry of the loss                  the mean over ranks and microbatches
    validation_step, test_, predict_       engine.predict runs it                its output, on every rank
    a checkpoint                           rank 0 gathers the whole state        the file of any other strategy
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size

from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import agreed
from shardwise.comm.channel import alone
from shardwise.engine import Engine, StepReport
from shardwise.engine.batch_rows import BatchRows, RowDims
from shardwise.engine.batches import count_rows, split_batch
from shardwise.engine.channels import DATA_AXES
from shardwise.engine.parallelize import parallelize
from shardwise.errors import BatchError, CheckpointError, ModelError, PlanError
from shardwise.lightning.manual_programs import ManualProgram
from shardwise.lightning.step_logs import StepLogs
from shardwise.lightning.trainer_settings import check_clip, plan_for
from shardwise.lightning.whole_checkpoints import ENTRY, gathered, take_over
from shardwise.plan import Plan
from shardwise.space import Mesh

_IN_MODULE = ("log", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
"""Methods of a module that the strategy stands in for, in the object."""


class Strategy(ParallelStrategy):
    """Trains a LightningModule under a plan: `Trainer(strategy=Strategy(plan))`."""

    def __init__(self, plan: Plan | None = None, *, channel: Channel | None = None, rows: RowDims = 0) -> None:
        """plan: None: stage 1 over all ranks. channel: None: the ranks that Lightning or torchrun starts.

        rows: see `parallelize`; for plans that cut a batch into microbatches.
        """
        super().__init__()
        self.engine: Engine[Any] | None = None
        """What has the module, since the last `fit`, `validate`, `test` or `predict` began."""
        self.report: StepReport | None = None
        """What the last update reported: `grad_norm`, `skipped`, `ranks`."""
        self.num_nodes = 1
        self._given_plan = plan
        self._channel = channel
        self._data: Channel | None = None
        self._rows = BatchRows(rows)
        self._kept: list[tuple[Any, ...]] = []
        """Arguments of `training_step` whose update is to come."""
        self._updates = False
        """Whether the module's optimizer steps now, and its closure may run."""
        self._share = 1.0
        """The batches of this update over those of a whole one."""
        self._extra: dict[str, Any] = {}
        self._program: ManualProgram | None = None
        self._logs = StepLogs()
        self._states: list[dict[str, Any]] = []
        self._own_state: dict[str, Any] = {}

    # Ranks ----------------------------------------------------------------------------------------------------------

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
        devices = self.parallel_devices or [torch.device("cpu")]
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
        super().setup_environment()
        if self._channel is None:
            reset_seed()
            if self.world_size > 1 and self.cluster_environment is not None:
                is_cpu = self.root_device.type == "cpu"
                _init_dist_connection(self.cluster_environment, "gloo" if is_cpu else "nccl")
                self._channel = default_channel()
            else:
                self._channel = alone(self.root_device)
        if self._data is None:
            self.plan.mesh.check_world(self.channel.size)
            self._data = self.channel.over(self.plan.mesh.peers(self.channel.rank, DATA_AXES))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self._channel is not None:
            self._channel.exchange(b"", purpose=f"barrier of Lightning: {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of rank `src`, which JSON can hold: no rank unpickles what another one sends."""
        try:
            mine = json.dumps(obj).encode() if self.global_rank == src else b""
        except TypeError as error:
            raise ModelError(f"broadcast of a {type(obj).__name__}: give numbers, texts, lists or dicts") from error
        return json.loads(self.channel.exchange(mine, purpose="broadcast of Lightning")[src])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decide so."""
        said = self.channel.exchange(b"\1" * bool(decision), purpose="a decision of Lightning")
        return len([each for each in said if each]) >= (len(said) if all else 1)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of the data ranks, in a new first dim."""
        assert self._data is not None
        if sync_grads:
            raise ModelError("all_gather(sync_grads=True): an engine sends no gradients of values that ranks gather")
        mine = tensor.detach().to(self.root_device).contiguous()
        output = mine.new_empty(self._data.size * mine.numel())
        self._data.all_gather(output, mine.reshape(-1), purpose="all_gather of Lightning").wait()
        return output.reshape(self._data.size, *mine.shape)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, minimum or maximum over the data ranks; ranks along pp and tp have the same values."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        values = self.all_gather(tensor)
        if name in ("mean", "avg", "none"):
            return (values if values.is_floating_point() else values.float()).mean(0)
        return {"sum": values.sum, "max": values.amax, "min": values.amin}[name](0)

    # The engine -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Put the module under the plan."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self.engine is not None and self.engine.model is module and fits:
            self._take_back(self.engine, module)
        if self.engine is None or self.engine.model is not module:
            self.precision_plugin.convert_module(module)
            plan = plan_for(trainer, module, self.plan) if fits else self.plan
            self.setup_optimizers(trainer) if fits else None
            self.engine = self._made(module, plan, fits)
        stand_ins = (self._log, self._toggle, lambda optimizer: None, self._clip_by_hand)
        vars(module).update(zip(_IN_MODULE[: 1 if module.automatic_optimization else None], stand_ins, strict=False))

    def _made(self, module: Any, plan: Plan, fits: bool) -> Engine[Any]:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        groups = {
            str(at): [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
            for at, optimizer in enumerate(self.optimizers)
        }
        frozen = [] if fits else [each for each in module.parameters() if each.requires_grad]
        for each in frozen:  # no gradients, masters or states for a model that is only evaluated
            each.requires_grad_(False)
        self._frozen = [names[id(each)] for each in frozen]
        return parallelize(
            module,
            plan,
            optimizer=list(self.optimizers) if fits else partial(torch.optim.SGD, lr=0.0),
            loss=self._loss,
            loss_weight=_weight_of,
            channel=self.channel,
            groups=groups if len(groups) > 1 else None,
        )

    def _take_back(self, engine: Engine[Any], module: Any) -> None:
        """Make the module the plain one again, with its values: another engine comes, for other optimizers."""
        trainer = module._trainer
        with engine.whole(optimizer=False):
            plain = copy.deepcopy(module)
        vars(module).clear()
        vars(module).update(vars(plain))
        module._trainer = trainer
        for name in self._frozen:
            module.get_parameter(name).requires_grad_(True)
        self.engine = None

    def model_to_device(self) -> None:
        """Nothing: an engine moves what a rank holds."""

    def teardown(self) -> None:
        """End a run. The engine keeps the module: see `engine.whole`."""
        assert self.accelerator is not None
        for name in _IN_MODULE:
            vars(self.lightning_module).pop(name, None)
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    # Training -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the update of a batch; its loss."""
        module, engine = self.lightning_module, self.engine
        assert module is not None
        assert engine is not None
        if not module.automatic_optimization:
            return self._train_by_hand(engine, args)
        if module.trainer.fit_loop._should_accumulate():
            self._kept.append(args)
            return torch.full((), float("nan"), device=self.root_device)
        if not self._updates:
            raise ModelError(
                f"{type(module).__name__}.optimizer_step called the closure itself, and the optimizer would train "
                "nothing: call optimizer.step(closure=optimizer_closure)"
            )
        batches, self._kept = [*self._kept, args], []
        # Lightning divides by the same number where an epoch ends with fewer batches.
        self._share = len(batches) / module.trainer.accumulate_grad_batches
        self.report = report = engine.step([part for each in batches for part in self._cut(each)])
        size = partial(_rows_of, batches)
        self._logs.log_step(partial(type(module).log, module), report, size)
        return {"loss": torch.tensor(report.loss / self._share, device=self.root_device), **self._extra}

    def _cut(self, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The microbatches of a batch. Each batch counts as much as others, as in Lightning, and its rows alike."""
        count = self.plan.merge.microbatches
        if count == 1:
            return [{"args": args, "weight": 1.0, "number": 0}]
        cut, rows = split_batch(args[0], count, self.root_device, self._rows), count_rows(args[0], self._rows)
        return [
            {"args": (part, *args[1:]), "weight": count_rows(part, self._rows) / rows, "number": number}
            for number, part in enumerate(cut)
        ]

    def _loss(self, part: Mapping[str, Any]) -> Any:
        """The loss function of the engine: the module's `training_step`."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context(), self._logs.noting() as values:
            found = self.lightning_module.training_step(*part["args"])
        self._extra = {} if self._has_stages or not isinstance(found, Mapping) else {**found}
        loss = found.get("loss") if isinstance(found, Mapping) else found
        self._extra.pop("loss", None)
        if loss is None:
            raise BatchError("training_step returned no loss: an engine skips no batch. Return a loss of 0 * self(x)")
        return self._measured(loss if self._share == 1 else loss * self._share, values, part)

    def _measured(self, loss: Any, values: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
        return {"loss": loss, **self._logs.entries(values, part["weight"])}

    @property
    def _has_stages(self) -> bool:
        return self.engine is not None and self.engine.pipeline is not None

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Nothing, since the step has done it; a loss of manual optimisation waits for its update."""
        if self._program is not None:
            self._program.backward(closure_loss, {**dict.fromkeys(map(str, args)), **kwargs})
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, whose `training_step` is the update."""
        if self._program is not None:
            return self._program.update(optimizer, closure, closure is not do_nothing_closure)
        # Hooks before zero_grad see the weights before the update.
        zero = getattr(closure, "_zero_grad_fn", None)
        if zero is not None:
            closure._zero_grad_fn = None  # type: ignore[attr-defined]
            zero()
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

    # Manual optimisation --------------------------------------------------------------------------------------------

    def _train_by_hand(self, engine: Engine[Any], args: tuple[Any, ...]) -> Any:
        assert self.lightning_module is not None
        parts = self._cut(args)
        programs = [
            ManualProgram(
                partial(self.lightning_module.training_step, *part["args"]),
                number=part["number"],
                begins=self.optimizers[0] if len(self.optimizers) == 1 else None,
                looks_at_graphs=not self._has_stages,
            )
            for part in parts
        ]
        self._share = 1.0
        try:
            while True:
                wanted = [self._run(each, each.go_on) for each in programs]
                if not (asked := [each for each in wanted if each is not None]):
                    return None if self._has_stages else programs[0].output
                if any(each is not asked[0] for each in wanted):
                    raise ModelError("training_step toggles different optimizers for the microbatches of a batch")
                only = None if len(self.optimizers) == 1 else str(self.optimizers.index(asked[0]))
                section = partial(self._loss_of_section, programs)
                self.report = engine.step(parts, only=only, loss=section)
                for each in programs:
                    each.ended(self.report.loss)
                self._logs.log_step(partial(type(self.lightning_module).log, self.lightning_module), self.report, _none)
        finally:
            for each in programs:
                each.abandon()

    def _run(self, program: ManualProgram, what: Callable[[], Any]) -> Any:
        self._program = program
        try:
            with self.precision_plugin.train_step_context():
                return what()
        finally:
            self._program = None

    def _loss_of_section(self, programs: list[ManualProgram], part: Mapping[str, Any]) -> Any:
        program = programs[part["number"]]
        with self._logs.noting() as values:
            return self._measured(self._run(program, program.loss), values, part)

    def _toggle(self, optimizer: Any) -> None:
        """In the place of `module.toggle_optimizer`."""
        if self._program is not None:
            self._program.begin(getattr(optimizer, "optimizer", optimizer))

    def _clip_by_hand(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        """In the place of `module.clip_gradients`."""
        check_clip(self.plan, gradient_clip_val, gradient_clip_algorithm)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Where Lightning accumulates, which the engine does; by hand it would train nothing."""
        if self._program is not None:
            raise ModelError(
                "toggle_model(sync_grad=False): give Plan(merge=sw.Merge(microbatches=...)) larger batches"
            )
        yield

    # Evaluation and logs --------------------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, on all ranks of its model together."""
        return self._evaluated("validation_step", self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        return self._evaluated("test_step", self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        return self._evaluated("predict_step", self.precision_plugin.predict_step_context, args)

    def _evaluated(
        self, method: str, context: Callable[[], AbstractContextManager[None]], args: tuple[Any, ...]
    ) -> Any:
        module, engine = self.lightning_module, self.engine
        assert module is not None
        assert engine is not None

        def run(inputs: Mapping[str, Any]) -> Any:
            with context(), self._logs.noting() as values:
                output = getattr(module, method)(*inputs["args"])
            return {"output": output, "values": dict(values)}

        # Tensors of the inference mode in gathered parameters would be there in the next step.
        with torch.inference_mode(False):
            found = engine.predict({"args": args}, run)
        self._logs.log(partial(type(module).log, module), found["values"], {})
        return found["output"]

    def _log(self, name: str, value: Any, prog_bar: bool = False, **settings: Any) -> None:
        """In the place of `module.log`."""
        module = self.lightning_module
        assert module is not None
        settings["prog_bar"] = prog_bar
        if self._logs.values is not None:
            self._logs.note(name, value, settings, has_stages=self._has_stages)
        elif self._program is None or self._program.number == 0:
            value = value if self._program is None else self._program.value_of(value)
            type(module).log(module, name, value, **settings)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's whole state on rank 0; {} elsewhere."""
        assert self.engine is not None
        model, self._states, self._own_state = gathered(self.engine, optimizers=bool(self.optimizers))
        return model

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Its whole state on rank 0; {} elsewhere."""
        found = self.optimizers.index(getattr(optimizer, "optimizer", optimizer))
        return self._states[found] if self._states else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file from rank 0; where that fails, all ranks raise."""
        with agreed(self.channel, purpose="verdict on a checkpoint", doing="save_checkpoint", only=0):
            try:
                super().save_checkpoint({**checkpoint, ENTRY: self._own_state}, filepath, storage_options)
            except OSError as error:
                raise CheckpointError(f"{filepath} cannot be written: {error}") from error
        self._states, self._own_state = [], {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Into the module, whether an engine has it already or not."""
        if self.engine is None or self.engine.model is not self.lightning_module:
            super().load_model_state_dict(checkpoint, strict)
            return
        with self.engine.whole(optimizer=False):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Into the engine, each rank its part."""
        assert self.engine is not None
        take_over(self.engine, self.optimizers, checkpoint)


def _weight_of(part: Mapping[str, Any]) -> float:
    return float(part["weight"])


def _none() -> None:
    return None


def _rows_of(batches: list[tuple[Any, ...]]) -> int | None:
    """The rows of several batches; None for one, which Lightning counts itself."""
    return sum(extract_batch_size(each[0]) for each in batches) if len(batches) > 1 else None
