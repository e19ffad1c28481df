"""A Trainer whose steps are an engine's: its loop, callbacks and files are those of transformers.

    _run_epoch          get_batch_samples    k batches of this data rank; items are counted over all of them
      k times           training_step        takes a batch; with the last one, engine.step of all k:
                          compute_loss       in each forward; the losses of all data ranks add up as in one process
                          on_pre_optimizer_step   with the gradients there, before the update
                        optimizer.step       has happened
                        _maybe_log_...       losses and norms come in where they are logged

The microbatches of D data ranks are those of one process with D times as many gradient accumulation steps: the same
rows, the same losses, the same sum. So its loss curve is that of the plain Trainer.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.trainer_callback import CallbackHandler

from shardwise.comm import Channel, default_channel
from shardwise.comm.accelerators import empty_cache
from shardwise.comm.channel import alone
from shardwise.comm.timed import Timed
from shardwise.engine import Engine, StepReport
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ConfigError, ModelError, OptimizerError
from shardwise.hf.arguments import check_arguments
from shardwise.hf.data_order import DataOrder
from shardwise.hf.evaluation_rounds import EvaluationRounds
from shardwise.hf.generated_inputs import GeneratedInputs, PredictedModel
from shardwise.hf.logged_losses import StepToLog
from shardwise.hf.plan_arguments import compile_blocks, plan_of
from shardwise.hf.rank_accelerator import ArgumentsState, PlanAccelerator
from shardwise.hf.rank_batches import take_uneven_rounds
from shardwise.hf.refusals import check_generation, check_overrides, generates
from shardwise.hf.run_services import RunServices
from shardwise.hf.stops_on_signals import StopsOnSignals
from shardwise.hf.trainer_checkpoints import TrainerCheckpoints
from shardwise.plan import Plan
from shardwise.trainers.data_ranks import DataRanks

_MOST_PENDING = 64
"""Steps whose losses may wait for a look."""


class EngineOptimizer(AcceleratedOptimizer):
    """The engine's optimizer, as the loop of a Trainer sees it: its `step` has happened in `engine.step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self.has_stepped = False
        """Whether the engine made an update since the last `step`."""

    def step(self, closure: Any = None) -> None:
        """Nothing. Raises OptimizerError where the engine made no update."""
        self.check()
        self.has_stepped = False

    def check(self) -> None:
        """Raise OptimizerError where the engine made no update."""
        if not self.has_stepped:
            raise OptimizerError(
                "optimizer.step() follows, and the engine made no update: training_step was not reached. Call "
                "super().training_step(model, inputs, num_items_in_batch) for every batch"
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine has the gradients."""


class _UpdateEvents(CallbackHandler):
    """The events of a loop whose update comes with the last backward: the one before it has been called by then."""

    sw_engine: Engine[nn.Module]
    sw_ranks: DataRanks

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers, on all ranks with the numbers of rank 0: they choose a model, stop and set the rate."""
        self.sw_ranks.take_numbers(metrics)
        return super().on_evaluate(args, state, control, metrics, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """As in transformers; where a reference follows the weights in this step, the model has them whole."""
        every = args.ref_model_sync_steps if getattr(args, "sync_ref_model", False) else 0
        plan = self.sw_engine.plan
        is_cut = plan.sharding.stage == 3 or plan.mesh.tp > 1 or plan.mesh.pp > 1
        is_due = every and is_cut and state.global_step % every == 0
        with self.sw_engine.whole(optimizer=False, offload=False) if is_due else nullcontext():
            return super().on_step_end(args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Nothing."""
        return control


class EngineTrainer(
    EvaluationRounds, GeneratedInputs, RunServices, TrainerCheckpoints, DataOrder, transformers.Trainer
):
    """`transformers.Trainer` for a model that trains under a plan; the last base of a class of trainers.

    The plan is the attribute `plan` of the class or of the object, or comes by `args.shardwise_plan`. What only this
    class and its parts use begins with _sw_: classes of other libraries have attributes too.
    """

    plan: Any = None
    """A Plan, or the path of a TOML file with one; a Plan from the constructor on."""
    channel: Channel | None = None
    """The ranks that train together."""
    _sw_ranks: DataRanks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_overrides(type(self), EngineTrainer)
        self._sw_engine: Engine[nn.Module] | None = None
        self._sw_collected: list[dict[str, Any]] = []
        self._sw_pending: list[StepToLog] = []
        self._sw_losses: list[torch.Tensor] = []
        self._sw_num_in_update = self._sw_num_collected = 0
        self._sw_zero = torch.zeros(())
        self._sw_report: StepReport | None = None
        self._sw_last_batch: Any = None
        self._sw_is_uneven = False
        self._sw_has_own_loss = type(self).compute_loss is not transformers.Trainer.compute_loss
        super().__init__(*args, **kwargs)
        if self._sw_stops_on_signals:
            self.args.enable_jit_checkpoint = True
            self.add_callback(StopsOnSignals(lambda: self.preemption.requested(self.engine)))
        self.callback_handler.__class__ = _UpdateEvents
        events: Any = self.callback_handler
        events.sw_ranks = self._sw_ranks
        self._sw_refuse_model()
        self._sw_refuse_data()

    def _sw_refuse_model(self) -> None:
        model: Any = self.model
        if getattr(model, "is_distributed_loading_by_transformers", False) or self.is_model_parallel:
            raise ConfigError(
                "the model is cut over devices already (device_map or distributed_config of from_pretrained); load it "
                "whole, or on the meta device: the plan cuts it"
            )

    # The plan and the engine ----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator of transformers, over the plan's data ranks."""
        args = self.args
        device = args.device  # joins the process group, where torchrun started several
        if self.channel is None:
            self.channel = _channel_on(device)
        if getattr(args, "shardwise_trace", False):
            self.channel = Timed(self.channel)
        self.plan = plan_of(self.plan, args, self.channel.size)
        check_arguments(args, self.plan.mesh)
        self._sw_ranks = DataRanks(self.plan, self.channel)
        if self.channel.size > 1 and generates(type(self), EngineTrainer):
            check_generation(self, self.plan)
            self._sw_generate_over_ranks(EngineTrainer)
        super().create_accelerator_and_postprocess()
        PlanAccelerator.take_over(self.accelerator, self._sw_ranks)
        self.gather_function = self.accelerator.gather_for_metrics
        args.distributed_state = ArgumentsState(args.distributed_state, self._sw_ranks)
        args._n_gpu = min(1, args.n_gpu)
        # Not seen by the constructor of transformers, which would install the handler of a single process.
        self._sw_stops_on_signals, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine moves what a rank holds."""

    @property
    def engine(self) -> Engine[nn.Module]:
        """The engine of the model; made at its first use, by all ranks together."""
        model: Any = self.model
        if type(model) is PredictedModel:  # inside of a prediction
            model = model.predicted
        if self._sw_engine is None or self._sw_engine.model is not model:
            self._sw_engine = self._sw_parallelized(model)
            if not self.is_in_train:  # else they come with the state of the optimizer
                self._sw_take_over_weights(self._sw_engine)
        return self._sw_engine

    def _sw_parallelized(self, model: nn.Module) -> Engine[nn.Module]:
        plan: Plan = self.plan
        count = getattr(model, "num_parameters", None)
        # Of whole tensors: afterwards this rank has parts.
        self._sw_num_parameters = None if count is None else count(exclude_embeddings=True)
        # One that has another engine is not of this model.
        if isinstance(self.optimizer, EngineOptimizer):
            self.optimizer = None
        self.create_optimizer()
        compile_blocks(model, self.args)
        optimizer: Any = self.optimizer
        engine = parallelize(
            model,
            plan,
            optimizer=optimizer,
            loss=self._sw_loss_of,
            # The Trainer scales losses itself.
            loss_weight=lambda microbatch: 1.0,
            channel=self.channel,
            seed=self.args.seed,
        )
        self.optimizer = self._sw_stepped = EngineOptimizer(optimizer)
        return engine

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """The engine in the place of `accelerator.prepare`."""
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        self._sw_check_loader(train_dataloader)
        model = self.engine.model
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = model
        self._sw_collected.clear()
        self._sw_num_collected = 0
        self._sw_pending.clear()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._sw_take_over_weights(self.engine)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        events: Any = self.callback_handler
        events.sw_engine = self.engine
        self.callback_handler.train_dataloader = train_dataloader
        self._sw_begin_loop(max_steps)
        return model, train_dataloader

    def _sw_check_loader(self, loader: Any) -> None:
        if self._sw_ranks.count > 1 and not getattr(loader, "_is_accelerate_prepared", False):
            raise ConfigError(
                f"get_train_dataloader gave a {type(loader).__name__} that the accelerator has not seen: each of "
                f"{self._sw_ranks.count} data ranks would train on all rows. Return "
                "self.accelerator.prepare(DataLoader(...))"
            )
        take_uneven_rounds(loader, shares_rows=self._sw_generates)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of an update: of all data ranks and microbatches."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._sw_ranks.count)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler: Any = super()._get_train_sampler(train_dataset)
        if type(sampler).__name__ == "LengthGroupedSampler":
            # Grouped within the update of all data ranks, as one process groups.
            sampler.batch_size *= self._sw_ranks.count
        elif type(sampler).__name__ == "BatchRebalanceSampler":
            sampler.rank = self._sw_ranks.rank
        return sampler

    # Steps ----------------------------------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # On the host: nothing waits for a device to add zeros.
        self._tr_loss = self._tr_loss.cpu()
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of an update, and its items over all data ranks."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        ranks = self._sw_ranks.count
        count = len(batches) * ranks
        counts_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        # Asked of what all ranks know: one of them may have no batch to look into.
        if ranks > 1 and (counts_items or self._sw_has_own_loss):
            present = sum(map(bool, batches))
            own = -math.inf if items is None and present else float(items or 0)
            found, total = self._sw_ranks.sums([own, float(present)], purpose="items of an update")
            count = int(total)
            if counts_items and self.args.average_tokens_across_devices:
                items = None if found == -math.inf else torch.tensor(int(found), device=device)
        self._sw_is_uneven = count < len(batches) * ranks
        self._sw_num_in_update = count
        self._sw_num_collected += count
        return batches, items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # `get_batch_samples` adds over ranks; an evaluation counts each batch for itself.
        world_size = self.args.distributed_state.num_processes
        self.args.distributed_state.num_processes = 1
        try:
            return super()._get_num_items_in_batch([each for each in batch_samples if each], device)
        finally:
            self.args.distributed_state.num_processes = world_size

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take a batch; with the last one of an update, `engine.step` of all.

        Returns zero for the batches before. Where a subclass extends this, the last one gives the loss of the update.
        """
        # Before the inputs are prepared: simulated ranks share what accelerate knows of it.
        is_update = self.accelerator.sync_gradients
        # Also before: some trainers do there what depends on it.
        if not model.training:
            model.train()
        if inputs or self._sw_ranks.count == 1:
            if type(self)._prepare_inputs is not transformers.Trainer._prepare_inputs or not inputs:
                with self._sw_preparing(self.state.global_step, len(self._sw_collected)):
                    inputs = self._prepare_inputs(inputs)
            taken = {"inputs": inputs, "items": num_items_in_batch, "of": self._sw_num_in_update, "factor": 1.0}
            self._sw_collected.append(taken)
        if not is_update:
            return self._sw_zero
        return self._sw_step()

    def _sw_step(self) -> torch.Tensor:
        engine, accelerator = self.engine, self.accelerator
        batches, self._sw_collected = self._sw_collected, []
        # Batches of an update that never came (a stream that ended) count in the next one, as in the plain Trainer.
        number, self._sw_num_collected = self._sw_num_collected, 0
        for each in batches:
            each["factor"] = self._sw_factor(each["items"], each["of"], number)
            each["is_last"] = each is batches[-1]
        self._sw_losses = []
        # Only where the filter of logs may ask for them.
        engine.see_losses = self._sw_see_losses if number > 1 and self.args.logging_nan_inf_filter else None
        if not self._sw_generates:
            # A loss that divides by it has all microbatches in mind, as in one process.
            self.current_gradient_accumulation_steps = self._sw_num_in_update
        is_first = self._sw_report is None
        with accelerator.computing(alone=self._sw_is_uneven, together=self._sw_generates, first=is_first):
            sees = engine.see_gradients = self._sw_before_update if self._sw_shows_gradients() else None
            self._sw_is_asked = False
            with nullcontext() if self._sw_tracer is None else self._sw_tracer.update():
                report = engine.step(batches, stop=None if sees else self._sw_before_update)
            if not self._sw_is_asked:  # a skipped update
                self._sw_before_update()
        self._sw_stepped.has_stepped = True
        if engine.plan.precision.loss_scale is not None:
            accelerator.step_was_skipped = report.skipped
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and accelerator.device.type != "cpu":
            empty_cache(accelerator.device)
        self._sw_report = report
        if type(self).training_step is not EngineTrainer.training_step:
            return torch.tensor(report.loss)
        self._sw_pending.append(StepToLog(report, self.state.global_step, number, self._sw_losses))
        if len(self._sw_pending) > _MOST_PENDING:
            self._sw_settle(1)
        return self._sw_zero

    def _sw_factor(self, items: Any, num_in_update: int, number: int) -> float:
        """What the engine's mean over `number` microbatches needs, so that losses add up as the Trainer scales them."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        if not is_scaled:
            return number / num_in_update
        # Where each data rank counts its own items, or knows of the others, the mean over data ranks is taken.
        is_sum = self.args.average_tokens_across_devices and not self._sw_generates
        return float(number) if is_sum else number / self._sw_ranks.count

    def _sw_loss_of(self, batch: dict[str, Any]) -> Any:
        """The loss function of the engine."""
        model: Any = self.model
        # As in a loop over microbatches: some losses do something with the last one.
        self.accelerator.is_in_last = batch["is_last"]
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch["inputs"], num_items_in_batch=batch["items"])
        factor = batch["factor"]
        return loss if factor == 1.0 else loss * factor

    def _sw_see_losses(self, losses: list[torch.Tensor]) -> None:
        self._sw_losses = losses

    def _sw_before_update(self) -> bool:
        """Asked by the engine when gradients are there, before the update."""
        self._sw_is_asked = True
        handler = self.callback_handler
        self.control = CallbackHandler.on_pre_optimizer_step(handler, self.args, self.state, self.control)
        return False

    def _sw_shows_gradients(self) -> bool:
        """Whether a callback may look at gradients; those that come with the libraries do not."""
        own = (type(each).on_pre_optimizer_step for each in self.callback_handler.callbacks)
        return any(each.__module__.partition(".")[0] not in ("transformers", "trl") for each in own)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._sw_stepped.check()
        # Looked at where it is logged: the look waits for a device.
        return self._sw_report

    def _sw_settle(self, count: int | None = None) -> None:
        """Bring in the losses of the first steps that wait; None: of all."""
        ready, self._sw_pending = self._sw_pending[:count], self._sw_pending[count:] if count is not None else []
        for each in ready:
            for loss in each.losses(self._sw_ranks) if self.args.logging_nan_inf_filter else [each.report.loss]:
                if math.isfinite(loss) or not self.args.logging_nan_inf_filter:
                    self._tr_loss += loss
                else:
                    self._tr_loss += self._tr_loss / (1 + each.step - self._globalstep_last_logged)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        is_due, num_logs = self.control.should_log, len(self.state.log_history)
        if is_due:
            self._sw_settle()
        if isinstance(grad_norm, StepReport):
            grad_norm = grad_norm.grad_norm if is_due else None
        with self._sw_loop.paused():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        self._sw_hand_over(self.state.log_history[num_logs:], is_due=is_due)
        if self._sw_copies is not None:
            self._sw_copies.save()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._sw_settle()
        self._sw_hand_over([], is_due=True)
        return super()._finalize_training(*args, **kwargs)

    # Counts ---------------------------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> int:
        """As in transformers, of the whole model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs or self._sw_engine is None or self._sw_num_parameters is None:
            return 0
        return int(6 * inputs[name].numel() * self._sw_num_parameters)

    def store_flos(self) -> None:
        """As in transformers, over the data ranks."""
        (total,) = self._sw_ranks.sums([float(self.current_flos)], purpose="floating point operations")
        self.state.total_flos += total
        self.current_flos = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        if inputs:
            super()._track_num_input_tokens(inputs)
        else:
            nothing = torch.zeros((), dtype=torch.int64, device=self.args.device)
            self.state.num_input_tokens_seen += int(self.accelerator.gather(nothing).sum())

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, in one process. Raises ModelError on several ranks."""
        if self._sw_ranks.world.size > 1:
            raise ModelError(
                "a search for hyperparameters on several ranks would give each of them other trials; search in one "
                "process per trial"
            )
        return super().hyperparameter_search(*args, **kwargs)


def _channel_on(device: torch.device) -> Channel:
    """The ranks that a launcher started, else this process on the device of the arguments."""
    found = default_channel()
    return found if found.size > 1 else alone(device)
