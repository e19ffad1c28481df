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

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torchmetrics import Metric

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.comm.timed import Timed
from shardwise.data import Data
from shardwise.engine import Engine
from shardwise.engine.forward.batches import BatchRows, RowDims, count_rows, split_batch
from shardwise.engine.parallelize import parallelize
from shardwise.errors import BatchError, CheckpointError, ModelError
from shardwise.lightning.agreed_signals import AgreedSignals
from shardwise.lightning.finetuning_callbacks import name_groups
from shardwise.lightning.held_modules import StandIns, engine_of, hold, take_back
from shardwise.lightning.manual_training import ManualTraining
from shardwise.lightning.step_logs import rows_of
from shardwise.lightning.trainer_settings import plan_for
from shardwise.lightning.whole_checkpoints import ENTRY, gathered, take_over
from shardwise.plan import Plan
from shardwise.runs.preemption import Preemption
from shardwise.runs.run_trace import Tracer
from shardwise.trainers.data_batches import DataBatches

_IN_MODULE = ("log", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
"""Methods of a module that the strategy stands in for, in the object."""

_TURN = "a turn of trainer.predict"


class Strategy(ManualTraining):
    """Trains a LightningModule under a plan: `Trainer(strategy=Strategy(plan))`."""

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        channel: Channel | None = None,
        rows: RowDims = 0,
        trace: Path | str | None = None,
    ) -> None:
        """plan: None: stage 1 over all ranks. channel: None: the ranks that Lightning or torchrun starts.

        rows: see `parallelize`; for plans that cut a batch into microbatches. trace: a folder for the trace of the last
        updates of a fit on all ranks.
        """
        super().__init__(plan, channel)
        self._trace = None if trace is None else Path(trace)
        self.engine: Engine[Any] | None = None
        """What has the module, since the last `fit`, `validate`, `test` or `predict` began."""
        self._rows = BatchRows(rows)
        self._kept: list[tuple[Any, ...]] = []
        """Arguments of `training_step` whose update is to come."""
        self._updates = False
        """Whether the module's optimizer steps now, and its closure may run."""
        self._share = 1.0
        """The batches of this update over those of a whole one."""
        self._extra: dict[str, Any] = {}
        self._stand_ins = StandIns()
        self._signals: AgreedSignals | None = None
        """While the module is fitted."""
        self.preemption = Preemption()
        """Of the last `fit`: after a signal its `exit_code` is for `sys.exit`."""
        self._evaluations: Callable[[], Any] | None = None
        """Runs the last batch of an evaluation again."""
        self._states: list[dict[str, Any]] = []
        self._own_state: dict[str, Any] = {}

    def setup_environment(self) -> None:
        """Meet the other ranks."""
        super().setup_environment()
        if self._trace is not None and not isinstance(self._channel, Timed):
            self._channel = Timed(self.channel)

    def connect(self, model: Any) -> None:
        """Called with the module of a run, which an engine may have since the run before."""
        super().connect(model)
        self.engine = engine_of(model)

    def setup(self, trainer: Any) -> None:
        """Put the module under the plan."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        # Tensors of the inference mode, in gathered parameters or buffers, would still be there in the next step.
        validates = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop
        for loop in (*validates, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self._kept, self._waits_for_toggle = [], False  # of a run before
        if self.engine is not None and (fits or self.engine.plan.mesh != self.plan.mesh):
            take_back(module, self.engine)
            self.engine = None
        if fits:
            self.preemption = Preemption()
            self._signals = AgreedSignals(trainer, self.preemption, self._stand_ins)
        if self.engine is None:
            self.precision_plugin.convert_module(module)
            plan = plan_for(trainer, module, self.plan) if fits else self.plan
            if fits:
                self.setup_optimizers(trainer)
                name_groups(trainer, module, self._stand_ins)
            self.engine = self._made(module, plan, fits)
        if fits and self._trace is not None:
            self._tracer = Tracer(self.engine)
        stand_ins = (self._log, self._toggle, lambda optimizer: None, self._clip_by_hand)
        self._stand_ins.put(module, **dict(zip(_IN_MODULE, stand_ins, strict=True)))
        for each in module.modules():
            if isinstance(each, Metric):  # its states are no buffers, and ranks along pp and tp count the same rows
                each.to(self.root_device)
                self._stand_ins.put(
                    each, dist_sync_fn=self.gathered, distributed_available_fn=lambda: self.is_distributed
                )

    def _made(self, module: Any, plan: Plan, fits: bool) -> Engine[Any]:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        groups = {
            str(at): [
                names[id(each)] for group in optimizer.param_groups for each in group["params"] if id(each) in names
            ]
            for at, optimizer in enumerate(self.optimizers if fits else ())
        }
        frozen = [] if fits else [each for each in module.parameters() if each.requires_grad]
        for each in frozen:  # no gradients, masters or states for a model that is only evaluated
            each.requires_grad_(False)
        engine = parallelize(
            module,
            plan,
            optimizer=list(self.optimizers) if fits else partial(torch.optim.SGD, lr=0.0),
            loss=self._loss,
            loss_weight=itemgetter("weight"),
            channel=self.channel,
            groups=groups if len(groups) > 1 else None,
        )
        hold(module, engine, [names[id(each)] for each in frozen])
        return engine

    def model_to_device(self) -> None:
        """Nothing: an engine moves what a rank holds."""

    def teardown(self) -> None:
        """End a run. The engine keeps the module: see `engine.whole`."""
        assert self.accelerator is not None
        if self._signals is not None:
            self._signals.leave()
            self._signals = None
        if self._tracer is not None:  # after an error
            self._tracer.take_off()
            self._tracer = None
        self._stand_ins.remove()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    def loader_of(self, data: Data) -> DataBatches:
        """A loader for `trainer.fit`: the rows of an `sw.Data`, whose global batch is that of an update.

        A fit that resumes goes on with the next one, on any number of ranks.
        """

        def engine() -> Engine[Any]:
            assert self.engine is not None, "Lightning reads when the engine is there"
            return self.engine

        def parts() -> int:
            assert self.lightning_module is not None
            return int(self.lightning_module.trainer.accumulate_grad_batches)

        return DataBatches(data, engine, parts=parts)

    def on_train_start(self) -> None:
        """All ranks look for signals from here on."""
        assert self._signals is not None
        assert self.engine is not None
        self._signals.ask(self.engine)

    def on_train_end(self) -> None:
        """Leave the trace."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None and self._trace is not None:
            rank_zero_info("\n".join(tracer.leave(self._trace, title=type(self.lightning_module).__name__)))

    def on_exception(self, exception: BaseException) -> None:
        """Called behind the callbacks, which may have saved."""
        if self._signals is not None and isinstance(exception, SIGTERMException):
            self.on_train_end()
            self._signals.requeue()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the update of a batch; its loss."""
        assert self._signals is not None
        assert self.engine is not None
        found = self._trained(self.engine, args)
        self._signals.ask(self.engine)
        return found

    def _trained(self, engine: Engine[Any], args: tuple[Any, ...]) -> Any:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            return self._train_by_hand(engine, self._cut(args))
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
        report = self._step(engine, [part for each in batches for part in self._cut(each)])
        self._logs.log_step(partial(type(module).log, module), report, partial(rows_of, batches))
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
        loss = loss if self._share == 1 else loss * self._share
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
        if (zero := getattr(closure, "_zero_grad_fn", None)) is not None:
            closure._zero_grad_fn = None  # type: ignore[attr-defined]
            zero()
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

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

        self._evaluations = partial(engine.predict, {"args": args}, run)
        if self._meets:
            self._meets.exchange(b"+", purpose=_TURN)
        found = self._evaluations()
        self._logs.log(partial(type(module).log, module), found["values"], {})
        return found["output"]

    def on_predict_end(self) -> None:
        """Go on gathering with the ranks that have more batches: Lightning repeats no row to make them even."""
        while self._meets and any(self._meets.exchange(b"", purpose=_TURN)):
            if self._evaluations is None:
                self.channel.abort("a rank has no batch to predict, and others have: give each rank one")
                raise BatchError("this rank has no batch to predict, and others have: give each rank one")
            self._evaluations()
        self._evaluations = None

    @property
    def _meets(self) -> Channel | None:
        """The data ranks, where they gather parameters together, and may have unlike numbers of batches."""
        assert self.lightning_module is not None
        gathers = self.plan.sharding.stage == 3 and self.lightning_module.trainer.predicting
        return self._ranks.channel if gathers and self._ranks is not None else None

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

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's whole state on rank 0; {} elsewhere."""
        assert self.engine is not None
        model, self._states, self._own_state = gathered(self.engine, optimizers=bool(self.optimizers))
        return model

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Its whole state on rank 0; {} elsewhere."""
        found = self.optimizers.index(getattr(optimizer, "optimizer", optimizer))
        return self._states[found] if self._states and self.is_global_zero else {}

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
