"""Plain calls: what a plain training program calls on a model and its optimizers, and an engine has to refuse.

    optimizer.step()          trains nothing: the engine alone gives gradients to the masters
    optimizer.state_dict()    is a part, where ranks own slices
    optimizer.state[weight]   is nothing, since the optimizer has masters: it gives that of the master, if it is whole
    model.state_dict()        is a part, where this rank holds portions of parameters or has only its own stages
    torch.save(model)         the same, as is copy.deepcopy(model)

Each would go on in silence. What is whole on every rank is left as torch has it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.part_watch import ReadsBetweenSteps
from shardwise.engine.optimizers.known import follow_states
from shardwise.engine.optimizers.traits import has_own_step
from shardwise.engine.torch_private import (
    TAKES_SCALE,
    hooks_after_all_steps,
    hooks_before_all_steps,
    load_state_dict_pre_hooks,
    not_in_files,
    optimizer_hooks,
    state_dict_pre_hooks,
)
from shardwise.errors import ModelError, OptimizerError

_SAVE = (
    "Save with sw.save(path, engine), which loads into any layout. Inside `with engine.whole():` the model is whole on "
    "a rank; sw.full(engine) gives whole tensors, one after the other. sw.checkpoint.export_hf(path, folder) makes "
    "files for from_pretrained of a save"
)


CHANGED_LINES = """A loop of accelerate changes one line, and its prepare gets the plain model and optimizer:
-    accelerator = accelerate.Accelerator()
+    accelerator = shardwise.accelerate.Accelerator(plan=plan)
A loop without it changes these:
-    loss = loss_of(model(inputs), targets)
-    accelerator.backward(loss)
-    optimizer.step()
-    optimizer.zero_grad()
+    report = engine.step((inputs, targets))
Lightning takes strategy=shardwise.lightning.Strategy(plan)"""
"""Of a loop that is not the engine's own."""


class PlainCalls:
    """What is refused on the model and the optimizers of one engine, from `refuse` on."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        cut: Collection[nn.Parameter],
        owns_all: bool,
        master_of: Callable[[Any], nn.Parameter | None],
    ) -> None:
        """`cut`: parameters with a portion on this rank. `owns_all`: whether each rank has all optimizer state.
        `master_of`: see `MasterOf`.

        Nothing is refused yet.
        """
        self.model = model
        self._optimizers = optimizers
        self._cut = frozenset(cut)
        self.reads = ReadsBetweenSteps([*cut, *(each for each in model.parameters() if each.is_meta)])
        self.owns_all = owns_all
        self._master_of = master_of
        self.is_engine_step = False
        """Whether the engine is stepping the optimizers."""
        self.is_whole = False
        """Whether model and optimizers are whole on some rank (`Engine.whole`), and the engine has to wait."""
        self._sizes = [_sizes_of(optimizer) for optimizer in optimizers]

    def refuse(self) -> None:
        """Refuse from now on, in the place of the engine that had the model before."""
        self.reads.turn(on=True)
        everything: dict[str, str] = {}
        for path, module in self.model.named_modules():
            # Of the engine before this one: the model may be whole now.
            _take_off(state_dict_pre_hooks(module))
            _take_off(load_state_dict_pre_hooks(module))
            # On every module, not on the model alone: users save submodules, too.
            if found := self._parts(module):
                everything |= {f"{path}.{key}".lstrip("."): why for key, why in found.items()}
                module.register_state_dict_pre_hook(_Parts(found))
                module.register_load_state_dict_pre_hook(_WholeGiven(found))
        if everything:  # the whole model says it first, with full names
            self.model.register_state_dict_pre_hook(_Parts(everything))
        follow_states(self._optimizers, self._master_of)
        for optimizer in self._optimizers:
            if (of_steps := optimizer_hooks(optimizer, "step_pre", None)) is None:
                continue  # a class that left out Optimizer.__init__
            _take_off(of_steps)
            optimizer.register_step_pre_hook(_StepOutside(self))
            # GradScaler then calls `step`, which is refused, and does not look for gradients that are not there.
            # Not True: that says of an optimizer that it skips steps on the device (`can_skip_on_device`).
            vars(optimizer).setdefault(TAKES_SCALE, "a step is refused")
            for kind in ("state_dict", "load_state_dict"):
                # The optimizer is the user's and outlives an engine: the one before may have owned parts, and this
                # one all.
                hooks = optimizer_hooks(optimizer, f"{kind}_pre", None)
                _take_off(hooks or {})
                # A class that left out Optimizer.__init__ has hooks of steps from its defaults alone.
                if hooks is not None and not self.owns_all:
                    getattr(optimizer, f"register_{kind}_pre_hook")(_OptimizerParts(kind))

    def waiting(self) -> AbstractContextManager[None]:
        """The engine refuses to go on inside: see `is_whole`."""
        return attributes_set(self, {"is_whole": True})

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Refuse nothing of the optimizers but steps: they are whole inside."""
        for optimizer in self._optimizers:
            for kind in ("state_dict", "load_state_dict"):
                _take_off(optimizer_hooks(optimizer, f"{kind}_pre", {}))
        try:
            yield
        finally:
            self.refuse()

    def engine_step(self) -> AbstractContextManager[None]:
        """Let the engine step the optimizers."""
        return attributes_set(self, {"is_engine_step": True})

    def check_left(self) -> None:
        """Raise ModelError inside of `Engine.whole`."""
        if self.is_whole:
            raise ModelError("engine.whole() has put whole tensors into the model; leave it before the engine goes on")

    def added(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[int, Mapping[int, Sequence[str]]]:
        """What came into groups since: {number of the optimizer: {number of its group: names}}.

        parameters: of the model. Raises OptimizerError for what is not the model's, and where masters left a group.
        """
        follow_states(self._optimizers, self._master_of)  # a load of torch's makes another
        found: dict[int, Mapping[int, Sequence[str]]] = {}
        for at, (optimizer, sizes) in enumerate(zip(self._optimizers, self._sizes, strict=True)):
            # Counts, not names: asked once per step, so it has to be cheap.
            if (now := _sizes_of(optimizer)) != sizes:
                found[at] = names = _names_in_groups(optimizer, parameters)
                known = [count - len(names.get(group, ())) for group, count in enumerate(now)]
                if known != [*sizes, *[0] * (len(now) - len(sizes))]:
                    raise OptimizerError(
                        f"the groups of {type(optimizer).__name__} have {now} parameters here, and had {sizes} after "
                        f"the last step; {sum(map(len, names.values()))} of them are the model's. Give "
                        "add_param_group parameters that the model has now, and take none out"
                    )
        return found

    def _parts(self, module: nn.Module) -> dict[str, str]:
        """What the module itself holds that is not whole here, and why."""
        found = {}
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if hasattr(type(parameter), "_is_sharded_param"):
                found[key] = "is cut over ranks (sharding stage 3)"
            elif parameter in self._cut:
                found[key] = "is cut over ranks (mesh.tp)"
            elif parameter.is_meta:
                found[key] = "is of a pipeline stage of another rank (mesh.pp)"
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and key not in not_in_files(module):
                found[key] = "is of a pipeline stage of another rank (mesh.pp)"
        return found


class _RefusalHook:
    """A hook of ours, which stands on a module or an optimizer until it has another engine."""


class _StepOutside(_RefusalHook):
    """Before `optimizer.step`."""

    def __init__(self, calls: PlainCalls) -> None:
        self._calls = calls

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._calls.is_engine_step:
            return
        for key in ("grad_scale", "found_inf"):  # GradScaler's, by which the engine's next step would divide
            vars(optimizer).pop(key, None)
        raise OptimizerError(
            f"{type(optimizer).__name__}.step() was called outside of engine.step, and would train nothing: this "
            "optimizer has the engine's masters, which have gradients in engine.step alone. Call engine.step(batch) "
            "instead of the forward, loss.backward() and optimizer.step(); precision.loss_scale does the work of a "
            f"GradScaler. {CHANGED_LINES}"
        )


class _OptimizerParts(_RefusalHook):
    """Before `optimizer.state_dict` and `optimizer.load_state_dict`, where ranks own parts."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        name = type(optimizer).__name__
        if self._kind == "state_dict":
            raise OptimizerError(
                f"{name}.state_dict() would give the part of the optimizer state that this rank owns. Save all of it "
                "with sw.save(path, engine), which loads into any layout (sw.load). "
                "sw.full_state_dict(engine, optimizer=True) gives what the plain optimizer would"
            )
        raise OptimizerError(
            f"{name}.load_state_dict() takes state by position and in the shapes of this rank's slices. Load the state "
            "of a plain optimizer inside `with engine.whole():`. Or load with sw.load(path, engine): a plain program "
            "saves for it with sw.save(path, sw.checkpoint.TorchState(model, optimizer))"
        )


@dataclass(frozen=True, slots=True)
class _Parts(_RefusalHook):
    """Before the `state_dict` of a module that holds parts, and where it is copied or pickled."""

    why: dict[str, str]
    """For each attribute that is not whole."""

    refuses_parts = True
    """Asked by `TorchState`, which takes parameters without a state dict of values."""

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # asks for the parameters themselves, not for values of a model
            return
        key, why = next(iter(self.why.items()))
        raise ModelError(f"state_dict() of this model would hold parts of it: {prefix + key!r} {why}. {_SAVE}")

    # Hooks are pickled and copied with their module: the refusal needs no hold on torch.save or deepcopy.
    def __reduce__(self) -> Any:
        key, why = next(iter(self.why.items()))
        raise ModelError(f"the model would be pickled (torch.save) in parts: {key!r} {why}. {_SAVE}")

    # deepcopy would use `__reduce__`, whose message speaks of torch.save.
    def __deepcopy__(self, memo: object) -> "_Parts":
        key, why = next(iter(self.why.items()))
        raise ModelError(
            f"the model would be copied in parts: {key!r} {why}. Copy it inside `with engine.whole():`, or build it "
            "again and fill it: sw.full(engine) gives whole tensors, one after the other"
        )


@dataclass(frozen=True, slots=True)
class _WholeGiven(_RefusalHook):
    """Before the `load_state_dict` of a module that holds parts.

    What is of another rank is left alone there, without torch's warning, whose advice (`assign=True`) would not do. Of
    sizes that do not fit it says what to do about them.
    """

    why: dict[str, str]

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, strict: Any, *lists: Any
    ) -> None:
        error_messages: list[str] = lists[-1]
        for key, why in self.why.items():
            given, held = state_dict.get(prefix + key), {**module._parameters, **module._buffers}.get(key)
            if not isinstance(given, torch.Tensor) or held is None:
                continue
            # torch would report two shapes and leave the reader to guess why.
            if given.shape != held.shape:
                error_messages.append(
                    f"{prefix + key!r} {why}; load the whole inside `with engine.whole():`, or with sw.load(path, "
                    "engine) from a save or from files of Hugging Face"
                )
            elif held.is_meta:
                # The module's own tensor: torch copies nothing into a tensor without memory, and does not call the
                # key missing.
                state_dict[prefix + key] = held


def _take_off(hooks: MutableMapping[int, Callable[..., Any]]) -> None:
    """Remove the hooks of any engine; torch wraps some hooks once more."""
    for number in [each for each, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), _RefusalHook)]:
        del hooks[number]


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code of the user sees each call of `step`: hooks, or a `step` of the object's own."""
    hooks = [
        *optimizer_hooks(optimizer, "step_pre", {}).values(),
        *optimizer_hooks(optimizer, "step_post", {}).values(),
        *hooks_before_all_steps.values(),
        *hooks_after_all_steps.values(),
    ]
    return has_own_step(optimizer) or any(not isinstance(each, _RefusalHook) for each in hooks)


def _names_in_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[int, Sequence[str]]:
    """The model's own parameters in the groups of an optimizer, which has masters else."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[int, Sequence[str]] = {}
    for at, group in enumerate(optimizer.param_groups):
        if names := [name_of[id(each)] for each in group["params"] if id(each) in name_of]:
            found[at] = names
    return found


def _sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
