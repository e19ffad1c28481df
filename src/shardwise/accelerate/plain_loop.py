"""accelerate's Accelerator, whose prepared objects train an engine.

The loop stays as it is. `model(batch)` in training mode opens a step of the engine, and `optimizer.step()`, or
`clip_grad_norm_` before it, runs its backward and its update: see `OpenStep`. Wherever the loop goes on without the
model, or is left, its thread is as in a plain loop.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from shardwise.accelerate.open_steps import OpenStep
from shardwise.checkpoint import load, save
from shardwise.comm import Channel, default_channel
from shardwise.comm.timed import Timed
from shardwise.data import Data
from shardwise.engine import Engine, StepReport
from shardwise.engine.engine import full_state_dict
from shardwise.engine.parallelize import parallelize
from shardwise.errors import CheckpointError, ModelError, OptimizerError, PlanError
from shardwise.plan import Merge, Plan
from shardwise.runs.run_trace import Tracer
from shardwise.trainers.data_batches import DataBatches
from shardwise.trainers.data_ranks import DataRanks
from shardwise.trainers.rank_calls import RankCalls


class Accelerator(RankCalls):
    """Runs the loop of accelerate under a plan: `prepare`, `backward`, `clip_grad_norm_`, `save_state`, ..."""

    def __init__(
        self, *args: Any, plan: Plan, channel: Channel | None = None, trace: Path | str | None = None, **kwargs: Any
    ) -> None:
        """plan: with the clip that the loop asks for. channel: see `parallelize`. Others: as accelerate takes them.

        trace: a folder for the trace of the last updates on all ranks, which `end_training` writes.
        """
        super().__init__(*args, **kwargs)
        problems = []
        if self.mixed_precision != "no":
            problems.append(
                f"mixed_precision={self.mixed_precision!r}: leave it out, and give Plan(precision=sw.Precision("
                "compute='bfloat16')), precision.compute in TOML"
            )
        if plan.merge != Merge():
            problems.append(
                "merge.microbatches and merge.average: a loop of accelerate calls the model once for each batch, and "
                "its losses count as gradient_accumulation_steps says; leave them out"
            )
        if plan.pipeline.num_chunks > 1:
            problems.append(
                "pipeline.schedule: a loop of accelerate stops inside of forwards. Stages of a rank cannot take turns "
                "then; give each rank one, schedule='1f1b'"
            )
        if (kind := self.distributed_type.value) in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
            problems.append(f"accelerate's {kind} would train in the place of the plan; start the script by torchrun")
        if self.state.dynamo_plugin.backend.value != "NO":
            problems.append(
                f"dynamo_backend={self.state.dynamo_plugin.backend.value}: leave it out, and compile modules of the "
                "model before prepare: block.compile()"
            )
        if problems:
            raise PlanError(*problems)
        self.plan = plan
        self.channel = default_channel() if channel is None else channel
        """All ranks."""
        self._trace = None if trace is None else Path(trace)
        self._tracer: Tracer | None = None
        if trace is not None:
            self.channel = Timed(self.channel)
        plan.mesh.check_world(self.channel.size)
        self.take_ranks(DataRanks(plan, self.channel))
        self._engine: Engine[Any] | None = None
        self._open: OpenStep | None = None
        self._is_claimed = True
        """Whether the loop has called `optimizer.step()` for the last update."""
        self.report: StepReport | None = None
        """What the last update reported: `loss`, the mean over ranks, and `grad_norm`."""

    @property
    def engine(self) -> Engine[Any]:
        """What trains the prepared model. Raises ModelError before `prepare`."""
        if self._engine is None:
            raise ModelError("no model is prepared yet; call accelerator.prepare(model, optimizer, ...)")
        return self._engine

    # Prepared objects -----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """The objects of a loop under the plan, in the same order. Raises ModelError and OptimizerError."""
        models = [each for each in args if isinstance(each, nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if models or optimizers:
            if self._engine is not None or len(models) != 1 or len(optimizers) != 1:
                raise ModelError(
                    f"prepare was given {len(models)} models and {len(optimizers)} optimizers"
                    f"{' after others' if self._engine is not None else ''}; give one model and its optimizer in one "
                    "call. Put several models into one nn.Module, and call engine.step(batch, only=...) for each"
                )
            self._engine = parallelize(
                models[0], self.plan, optimizer=optimizers[0], loss_weight=_one, channel=self.channel
            )
            if self._trace is not None:
                self._tracer = Tracer(self._engine)
        return super().prepare(*(self._batches_of(each) if isinstance(each, Data) else each for each in args))

    def _batches_of(self, data: Data) -> Any:
        """A loader of an `sw.Data`, which `save_state` saves."""
        loader = DataBatches(data, lambda: self.engine, parts=lambda: self.gradient_accumulation_steps)
        self.register_for_checkpointing(loader)
        return watched(loader, self.pause)

    def end_training(self) -> None:
        """As in accelerate, and leave the trace. All ranks call it together."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None and self._trace is not None:
            for line in tracer.leave(self._trace, title=self._trace.name):
                self.print(line)
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Let go of what is prepared, and of an update that has begun; others can be prepared then."""
        self._leave()
        self._engine, self._is_claimed, self.report = None, True, None
        return super().free_memory(*objects)

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The model, whose forwards are the engine's."""
        self._models.append(prepared := PreparedModel(self, model))
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        """The optimizer, whose step is the engine's."""
        self._optimizers.append(prepared := PreparedOptimizer(self, optimizer))
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, which steps once for each update, whatever the number of ranks."""
        is_with_optimizer = self.step_scheduler_with_optimizer
        prepared = AcceleratedScheduler(scheduler, self._optimizers, is_with_optimizer, split_batches=True)
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **kwargs: Any) -> Any:
        """The loader, with the batches of this data rank."""
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=config.split_batches,
            put_on_device=True,
            dispatch_batches=False,  # it asks the processes of torch for its ranks, not the mesh
            rng_types=None if self.rng_types is None else [*self.rng_types],
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
        )
        self._dataloaders.append(watched(prepared, self.pause))
        return self._dataloaders[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches."""
        return watched(super().skip_first_batches(dataloader, num_batches), self.pause)

    # Updates --------------------------------------------------------------------------------------------------------

    @property
    def open_step(self) -> OpenStep | None:
        """The update whose first forward has run."""
        return None if self._open is None or self._open.is_over else self._open

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Around a batch. Where more batches come before the update, its backward is over at the end."""
        with super().accumulate(*models):
            try:
                yield
            except BaseException:
                self.pause()
                raise
        if (step := self.open_step) is not None:
            if not self.sync_gradients:
                step.end_batch()
            step.pause()

    def pause(self) -> None:
        """The loop goes on without the model."""
        if (step := self.open_step) is not None:
            step.pause()

    def begin(self, inputs: Any) -> None:
        """A forward of the training begins."""
        if not self._is_claimed:
            raise OptimizerError(
                "clip_grad_norm_ has updated the model, and optimizer.step() did not follow; call it after each clip"
            )
        if (step := self.open_step) is not None:
            step.begin()
        else:
            around = nullcontext if self._tracer is None else self._tracer.update
            self._open = OpenStep(self.engine, inputs, num_batches=self.gradient_accumulation_steps, around=around)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Keep the loss for the update."""
        if kwargs:
            raise ModelError(f"backward({', '.join(kwargs)}=...) is not for an engine; give it a loss alone")
        step = self.open_step
        if step is None or not step.is_in_batch:
            raise ModelError(
                "accelerator.backward(loss) came without a forward of the prepared model in training mode; compute the "
                "loss from model(batch), after model.train()"
            )
        # Not divided by `gradient_accumulation_steps`: the engine takes the mean over so many batches.
        step.losses.append(loss)
        step.pause()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Run the update, which clips as the plan says; the norm before the clip. `optimizer.step()` has to follow."""
        if norm_type != 2 or self.plan.clip_grad_norm != max_norm:
            raise PlanError(
                f"clip_grad_norm_(..., {max_norm}, norm_type={norm_type}) is not the clip of the plan, "
                f"clip_grad_norm={self.plan.clip_grad_norm}; give Plan(clip_grad_norm={max_norm}), clip_grad_norm in "
                "TOML, and leave this call as it is"
            )
        if not self.sync_gradients:
            raise OptimizerError(
                "clip_grad_norm_ was called for a batch that accumulates: its update comes with a later batch. Call it "
                "under `if accelerator.sync_gradients:`"
            )
        report = self._finish()
        self._is_claimed = False
        return torch.tensor(report.grad_norm, device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Nothing: the plan clips. Raises PlanError where it does not."""
        if self.plan.clip_grad_value != clip_value:
            raise PlanError(
                f"clip_grad_value_(..., {clip_value}) is not the clip of the plan, "
                f"clip_grad_value={self.plan.clip_grad_value}; give Plan(clip_grad_value={clip_value}), "
                "clip_grad_value in TOML, and leave this call as it is"
            )

    def forget(self) -> None:
        """`zero_grad()`: what `backward` was called on since the last update does not count."""
        if (step := self.open_step) is None:
            return
        if not step.num_ended:
            step.losses.clear()
            return
        if self.engine.pipeline is not None or (step.is_in_batch and not step.losses):
            raise OptimizerError(
                f"zero_grad() would drop the gradients of {step.num_ended} batches that this update has accumulated; "
                "call it after optimizer.step()"
            )
        self._leave()

    def update(self) -> None:
        """`optimizer.step()`."""
        if not self._is_claimed:
            self._is_claimed = True
        elif self.sync_gradients:
            self._finish()

    def _finish(self) -> StepReport:
        step = self.open_step
        if step is None or not (step.losses if step.is_in_batch else step.num_ended):
            raise OptimizerError(
                "the update came without accelerator.backward(loss), and would train nothing; call it first, with a "
                "loss from model(batch) in training mode"
            )
        self._open = None
        self.report = step.finish()
        return self.report

    def _leave(self) -> None:
        if (step := self.open_step) is not None:
            step.leave()
        self._open = None

    # Saves ----------------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model that was given to `prepare`. Its parameters are this rank's."""
        return model.module if isinstance(model, PreparedModel) else model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole state dict of the model on rank 0; {} elsewhere. All ranks call it together."""
        return full_state_dict(self.engine)

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole model from rank 0, in the files of accelerate. All ranks call it together."""
        if self.is_main_process:
            # It asks the model only whether parameters are of the meta device, as those of other stages are here.
            super().save_model(nn.Module(), save_directory, *args, **kwargs)
        else:
            self.get_state_dict(model)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save model, optimizer, schedulers and registered objects: `sw.save`, which loads into any layout."""
        if output_dir is None:
            raise ModelError("save_state() needs a folder: accelerator.save_state('saves/10')")
        if self.open_step is not None and self.engine.pipeline is not None:
            raise ModelError(
                "save_state in the middle of an update: stages wait for the backward of a forward in training mode. "
                "Save after optimizer.step(); where the loop accumulates, under `if accelerator.sync_gradients:`"
            )
        objects = [*self._schedulers, *self._custom_objects]
        save(output_dir, self.engine, extra={"accelerate": {"step": self.step, "states": [_state(e) for e in objects]}})
        return output_dir

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Go on from what `save_state` saved, under this plan or another one."""
        if input_dir is None:
            raise ModelError("load_state() needs the folder of a save: accelerator.load_state('saves/10')")
        extra: Mapping[str, Any] = load(input_dir, self.engine)
        found = extra.get("accelerate", {"step": 0, "states": []})
        self.step = found["step"]
        objects = [*self._schedulers, *self._custom_objects]
        if len(objects) != (count := len(found["states"])):
            raise CheckpointError(
                f"{input_dir} has the states of {count} schedulers and registered objects, and this loop has "
                f"{len(objects)}; prepare and register the same ones before load_state"
            )
        for each, state in zip(objects, found["states"], strict=True):
            each.load_state_dict(state)

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Raises ModelError: `save_state` makes no state dicts that a hook could change."""
        raise ModelError(_NO_HOOKS)

    def register_load_state_pre_hook(self, hook: Any) -> Any:
        """Raises ModelError, as for saves."""
        raise ModelError(_NO_HOOKS)


class PreparedModel(nn.Module):
    """A model in a loop of accelerate."""

    def __init__(self, accelerator: Accelerator, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        vars(self)["_accelerator"] = accelerator

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In training mode the first forward of an update opens it; in evaluation mode a prediction of the engine."""
        accelerator: Accelerator = vars(self)["_accelerator"]
        if self.training and torch.is_grad_enabled():
            accelerator.begin((args, kwargs))
            return self.module(*args, **kwargs)
        if (step := accelerator.open_step) is not None:
            # Its ranks go through the step now. In a batch, its loss may have a part of this forward.
            if step.is_in_batch:
                step.begin()
            elif accelerator.engine.pipeline is not None or accelerator.plan.sharding.stage == 3:
                raise ModelError(
                    "the model is evaluated in the middle of an update, where ranks wait for its next batch. Evaluate "
                    "after optimizer.step(); where the loop accumulates, under `if accelerator.sync_gradients:`"
                )
            return self.module(*args, **kwargs)
        if self.training:
            raise ModelError("the model is in training mode, without gradients; call model.eval() for an evaluation")
        with torch.inference_mode(False):
            return accelerator.engine.predict({"args": args, "kwargs": kwargs}, partial(_called, self.module))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        vars(self)["_accelerator"].forget()


class PreparedOptimizer(AcceleratedOptimizer):
    """An optimizer in a loop of accelerate."""

    def __init__(self, accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:
        """The engine's update, where the loop does not accumulate."""
        self._accelerator.update()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the losses of the update to come, where the loop does not accumulate."""
        if self._accelerator.sync_gradients:
            self._accelerator.forget()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last gradient was not finite."""
        report = self._accelerator.report
        return report is not None and report.skipped


def watched(loader: Any, left: Callable[[], None]) -> Any:
    """The prepared loader as one that calls `left` where a loop over it ends, also by a break or an error."""
    kind = type(loader)

    def batches(self: Any) -> Iterator[Any]:
        try:
            yield from kind.__iter__(self)
        finally:
            left()

    # A subclass, as accelerate asks for the classes of its loaders; their `__class__` is a property that hides them.
    made: Any = object.__new__(type(kind.__name__, (kind,), {"__iter__": batches}))
    vars(made).update(vars(loader))
    return made


_NO_HOOKS = (
    "hooks of save_state and load_state would not be called: a save has the tensors of each rank. Write what the hook "
    "writes next to the call, from get_state_dict(model) or sw.full_state_dict(engine)"
)


def _called(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    return module(*inputs["args"], **inputs["kwargs"])


def _one(part: Mapping[str, Any]) -> float:
    return float(part["weight"])


def _state(owner: Any) -> dict[str, Any]:
    """Of a scheduler, what JSON can hold: functions come from the program again."""
    return {name: each for name, each in owner.state_dict().items() if not callable(each)}
