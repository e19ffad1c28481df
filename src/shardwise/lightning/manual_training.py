"""Manual optimisation in a strategy: sections of the user's programs, and the steps of the engine that run them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from shardwise.comm import Channel
from shardwise.engine import Engine, StepReport
from shardwise.engine.step.channels import StepLeft
from shardwise.errors import ModelError
from shardwise.lightning.held_modules import StandIns
from shardwise.lightning.manual_programs import ManualProgram
from shardwise.lightning.step_logs import StepLogs
from shardwise.lightning.trainer_ranks import TrainerRanks
from shardwise.lightning.trainer_settings import check_clip, clip_setting
from shardwise.plan import Plan
from shardwise.runs.run_trace import Tracer


class ManualTraining(TrainerRanks):
    """What of a strategy concerns manual optimisation."""

    def __init__(self, plan: Plan | None, channel: Channel | None) -> None:
        super().__init__(plan, channel)
        self.report: StepReport | None = None
        """What the last update reported: `grad_norm`, `skipped`, `ranks`."""
        self._program: ManualProgram | None = None
        """The `training_step` that runs now."""
        self._logs = StepLogs()
        self._tracer: Tracer | None = None
        """Of a fit that leaves a trace."""
        self._waits_for_toggle = False
        """Whether the last `training_step` began with one optimizer of several."""

    def _train_by_hand(self, engine: Engine[Any], parts: list[dict[str, Any]]) -> Any:
        module, has_stages = self.lightning_module, engine.pipeline is not None
        assert module is not None
        programs = [
            ManualProgram(
                partial(module.training_step, *part["args"]),
                number=part["number"],
                begins=() if self._waits_for_toggle else self.optimizers,
                looks_at_graphs=not has_stages,
            )
            for part in parts
        ]
        stand_ins = StandIns()
        wrapped = zip(self._lightning_optimizers, self.optimizers, strict=True)
        for owner, optimizer in ((module, None), *wrapped, *zip(self.optimizers, self.optimizers, strict=True)):
            stand_ins.put(owner, zero_grad=partial(self._forget, owner, optimizer))
        try:
            while True:
                wanted = [self._run(each, each.go_on) for each in programs]
                if not (asked := [each for each in wanted if each is not None]):
                    return None if has_stages else programs[0].output
                if any(each != asked[0] for each in wanted):
                    raise ModelError("training_step toggles different optimizers for the microbatches of a batch")
                section, count = asked[0], len(self.optimizers)
                only = None if len(section) == count else [str(self.optimizers.index(each)) for each in section]
                try:
                    self._step(engine, parts, only=only, loss=partial(self._loss_of_section, programs))
                    assert self.report is not None
                except StepLeft:
                    toggled = [each.left(section) for each in programs]
                    self._waits_for_toggle = any(toggled)
                    continue
                for each in programs:
                    each.ended(self.report.loss)
                self._logs.log_step(partial(type(module).log, module), self.report, _none)
        finally:
            stand_ins.remove()
            for each in programs:
                each.abandon()

    def _step(self, engine: Engine[Any], parts: list[dict[str, Any]], **given: Any) -> StepReport:
        with nullcontext() if self._tracer is None else self._tracer.update():
            self.report = report = engine.step(parts, **given)
        return report

    def _forget(self, owner: Any, optimizer: Any, *given: Any, **settings: Any) -> None:
        """In the place of `zero_grad` of an optimizer, or of the module: None."""
        if self._program is not None:
            self._program.forget(optimizer)
        else:
            type(owner).zero_grad(owner, *given, **settings)

    def _run(self, program: ManualProgram, what: Callable[[], Any]) -> Any:
        self._program = program
        # Lightning counts updates in its optimizers, and a program may step schedulers: one microbatch does it for all.
        quiet = [config.scheduler for config in self.lr_scheduler_configs] if program.number else []
        counting = [(each, each._on_before_step, each._on_after_step) for each in self._lightning_optimizers]
        for scheduler in quiet:
            vars(scheduler)["step"] = _none
        for each, _, _ in counting if program.number else ():
            each._on_before_step = each._on_after_step = _none
        try:
            with self.precision_plugin.train_step_context():
                return what()
        finally:
            self._program = None
            for scheduler in quiet:
                vars(scheduler).pop("step")
            for each, before, after in counting:
                each._on_before_step, each._on_after_step = before, after

    def _loss_of_section(self, programs: list[ManualProgram], part: Mapping[str, Any]) -> Any:
        program = programs[part["number"]]
        with self._logs.noting() as values:
            try:
                loss = self._run(program, program.loss)
            except StepLeft:
                # Before a toggle, or where nothing is trained: of no step.
                module: Any = self.lightning_module
                self._logs.log(_none if program.number else partial(type(module).log, module), values, {})
                raise
            return {"loss": loss, **self._logs.entries(values, part["weight"])}

    def _toggle(self, optimizer: Any) -> None:
        """In the place of `module.toggle_optimizer`."""
        if self._program is not None:
            self._program.begin((getattr(optimizer, "optimizer", optimizer),))

    def _clip_by_hand(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        """In the place of `module.clip_gradients`."""
        inner, program = getattr(optimizer, "optimizer", optimizer), self._program
        is_alone = program is None or len(program.section) < 2
        group = str(self.optimizers.index(inner))
        check_clip(self.plan, gradient_clip_val, gradient_clip_algorithm, group=group, is_alone=is_alone)
        if program is not None and gradient_clip_val and clip_setting(gradient_clip_algorithm) == "clip_grad_value":
            program.clipped.append(inner)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Where Lightning accumulates, which the engine does; by hand it would train nothing."""
        if self._program is not None:
            raise ModelError(
                "toggle_model(sync_grad=False): give Plan(merge=sw.Merge(microbatches=...)) larger batches"
            )
        yield


def _none(*_: Any, **__: Any) -> None:
    """Nothing is done."""
