"""Adapters of the library peft: saved and loaded alone, and merged into the model that they adapt, tensor by tensor.

    save      [1] rank 0: peft names what it saves      [2] these tensors go to rank 0      [3] peft writes them
    load      [1] rank 0: the same                      [2] the same                        [3] peft writes to them,
              and `Engine.whole` gives the values to the ranks that hold them
    merge     units of modules, some at a time: their tensors go to rank 0, where peft merges a copy of the modules

All of it is peft's own code on whole tensors. What is not named stays where it is, and has no values on rank 0.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import aborting, agreed, texts_in, understood
from shardwise.engine.engine import Engine
from shardwise.engine.forward.inventory import all_carried
from shardwise.engine.model.rank_parts import ModelNames
from shardwise.engine.torch_private import NOT_IN_FILES, not_in_files
from shardwise.errors import CheckpointError, ModelError, ShardwiseError, few_of, in_words
from shardwise.plan import Parameter
from shardwise.plan.names import BASE_LAYER, COPIES, ORIGINAL, TOKENS

Folder = str | os.PathLike[str]


def save_adapters(engine: Engine[nn.Module], folder: Folder, *, adapters: Sequence[str] | None = None) -> None:
    """Write the adapters of the engine's model to `folder`, as the model's own `save_pretrained(folder)` writes them.

    adapters: their names; None: all. "default" is written to the folder, each other one to a folder in it.

    All ranks call it together. Only tensors of adapters travel, and rank 0 writes them: `adapter_config.json` and
    `adapter_model.safetensors`, which `PeftModel.from_pretrained(model, folder)` loads. Raises ModelError for a model
    without adapters and for a name that it does not have, and CheckpointError where peft cannot write.
    """

    def save(model: Any, names: Sequence[str]) -> None:
        model.save_pretrained(os.fspath(folder), selected_adapters=list(names))

    _on_rank_0(engine, adapters, "sw.save_adapters", save)


def load_adapters(engine: Engine[nn.Module], folder: Folder, *, adapter: str = "default") -> None:
    """Load an adapter that peft or `save_adapters` has written to `folder` into the adapter of that name in the model.

    The model has it already, of the same kind and the same sizes; masters take the values, and the state of optimizers
    stays. All ranks call it together, and rank 0 reads. Raises ModelError as `save_adapters`, and CheckpointError for a
    folder that cannot be read, or whose tensors are not those of the adapter.
    """
    _on_rank_0(
        engine, [adapter], "sw.load_adapters", lambda model, _: _load(model, os.fspath(folder), adapter), goes_on=True
    )


def _on_rank_0(
    engine: Engine[Any],
    adapters: Sequence[str] | None,
    doing: str,
    act: Callable[[Any, Sequence[str]], None],
    *,
    goes_on: bool = False,
) -> None:
    """Do something on rank 0 while what peft reads of these adapters is whole there; all ranks raise what it raises.

    goes_on: training goes on with what is read.
    """
    failure: Exception | None = None
    with aborting(engine.channel, doing):
        with agreed(engine.channel, purpose=f"verdict on {doing}", doing=doing):
            model = adapted_model(engine.model)
            chosen = list(model.peft_config) if adapters is None else list(adapters)
            _check_names(model, chosen, goes_on=goes_on)
        names: list[str] = []
        # Nothing is gathered: peft asks modules for their state dicts, and looks at the names alone.
        with engine.whole(optimizer=False, rank0_only=True, only=()):
            if engine.channel.rank == 0:
                names = sorted({name for each in chosen for name in _read_by_peft(model, each)})
        answers = engine.channel.exchange(json.dumps(names).encode(), purpose=f"tensors of {doing}")
        (names,) = understood(answers[:1], texts_in, purpose=f"tensors of {doing}")
        with engine.whole(optimizer=False, rank0_only=True, only=names):
            if engine.channel.rank == 0:
                try:
                    act(model, chosen)
                except Exception as error:
                    failure = error
        with agreed(engine.channel, purpose=f"the end of {doing}", doing=doing):
            if isinstance(failure, ShardwiseError):
                raise failure
            if failure is not None:
                raise CheckpointError(f"{doing}: rank 0 raised {in_words(failure)}") from failure


def _check_names(model: Any, adapters: Sequence[str], *, goes_on: bool) -> None:
    if unknown := [each for each in adapters if each not in model.peft_config]:
        raise ModelError(f"the model has no adapter {unknown[0]!r}; it has {few_of(list(model.peft_config))}")
    for each in adapters:
        if not goes_on or not model.peft_config[each].is_prompt_learning:
            continue
        held = [name for name, _ in model.prompt_encoder[each].named_parameters() if name != "embedding.weight"]
        if held:
            raise ModelError(
                f"peft saves of {each!r} what its encoder computes, without {held[0]!r}, so training cannot go on from "
                "it. Resume with sw.save and sw.load; PeftModel.from_pretrained loads it for inference"
            )


def _load(model: Any, folder: str, adapter: str) -> None:
    from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    # Local files only, and no pickle: peft would ask a hub for another name, and read adapter_model.bin.
    for each in ("adapter_config.json", "adapter_model.safetensors"):
        if not os.path.isfile(os.path.join(folder, each)):
            raise CheckpointError(f"{folder} holds no {each}; name a folder that save_pretrained of peft has written")
    config, own = PeftConfig.from_pretrained(folder), model.peft_config[adapter]
    if config.peft_type != own.peft_type:
        raise CheckpointError(
            f"{folder} holds an adapter of the kind {config.peft_type}, and {adapter!r} is {own.peft_type}; build the "
            "model with that configuration, PeftConfig.from_pretrained(folder)"
        )
    weights = load_peft_weights(folder, device="cpu")
    wanted = get_peft_model_state_dict(model, adapter_name=adapter)
    # peft takes what fits and leaves the rest as it is, with a warning.
    if problems := [
        *(f"{name!r} is not there" for name in wanted.keys() - weights.keys()),
        *(f"{name!r} is no tensor of {adapter!r}" for name in weights.keys() - wanted.keys()),
        *(
            f"{name!r} has the shape {tuple(each.shape)}, and {tuple(wanted[name].shape)} in the model"
            for name, each in weights.items()
            if name in wanted and each.shape != wanted[name].shape
        ),
    ]:
        raise CheckpointError(
            f"{folder} does not fit the adapter {adapter!r}: {few_of(sorted(problems), quotes=False)}; build the model "
            "with its configuration, PeftConfig.from_pretrained(folder)"
        )
    set_peft_model_state_dict(model, weights, adapter_name=adapter)


def adapted_model(model: nn.Module) -> Any:
    """The model, which peft has made. Raises ModelError for another."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError('adapters need the library peft: pip install "shardwise[peft]"') from error
    if not isinstance(model, PeftModel):
        raise ModelError(
            f"the model is a {type(model).__name__}, which has no adapters of peft; give parallelize what "
            "peft.get_peft_model(model, config) returns"
        )
    return model


def _read_by_peft(model: Any, adapter: str) -> Iterator[str]:
    from peft import get_peft_model_state_dict

    here = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if model.peft_config[adapter].is_prompt_learning:
        # What is saved is computed from these.
        yield from (name for name, _ in here if name.startswith("prompt_encoder."))
        return
    # peft picks from a state dict, by names alone: tensors without values tell which ones.
    given = {name: torch.empty(0, device="meta") for name, _ in here}
    name_of = {id(each): name for name, each in given.items()}
    picked = get_peft_model_state_dict(model, state_dict=given, adapter_name=adapter)
    yield from (name_of[id(each)] for each in picked.values() if id(each) in name_of)


# Merging --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedTensor:
    """A tensor of the model without adapters."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    """The name, in the model with adapters, of the tensor that becomes this one."""
    module: str
    """The module that peft merges for it, or that holds it."""
    key: str
    """Its name in that module when it is merged."""


class MergedModel:
    """What `merge_and_unload` of the engine's model gives, tensor by tensor, on rank 0."""

    def __init__(self, engine: Engine[Any], names: ModelNames) -> None:
        """names: of the engine. Nothing is sent yet. Raises ModelError for adapters that cannot be merged."""
        model = adapted_model(engine.model)
        if model.active_peft_config.is_prompt_learning:
            raise ModelError(
                f"a prompt ({model.active_peft_config.peft_type}) cannot be merged into a model; save it with "
                "sw.save_adapters(engine, folder)"
            )
        if not hasattr(model.base_model, "_check_merge_allowed"):
            raise ModelError(
                f"peft merges no {model.active_peft_config.peft_type} into a model; save it with "
                "sw.save_adapters(engine, folder)"
            )
        model.base_model._check_merge_allowed()
        self.base: nn.Module = model.get_base_model()
        self.ties: dict[str, str] = {}
        """Other names of tensors: alias -> name."""
        self._engine = engine
        self._prefix = next(name for name, each in model.named_modules() if each is self.base)
        self._first = names.ties
        self._specs: Mapping[str, Parameter] = {spec.name: spec for spec in names.specs}
        if scales := [each.name for each in all_carried(self.base) if not each.is_view]:
            raise ModelError(
                f"{few_of(scales)}: packed weights belong with such tensors, which peft makes anew where it merges. "
                "Save the adapters with sw.save_adapters(engine, folder). Or merge a copy of the whole model: "
                "copy.deepcopy(engine.model).merge_and_unload() inside `with engine.whole(optimizer=False, "
                "rank0_only=True):`"
            )
        self.tensors = list(self._listed())
        self._adapters = {each.module for each in self.tensors if _is_adapter(self.base.get_submodule(each.module))}

    def is_untied(self) -> bool:
        """Whether the model's embedding and head are two tensors now, though its configuration ties them."""
        base: Any = self.base
        config = getattr(base, "config", None)
        if not getattr(config, "tie_word_embeddings", False) or not hasattr(base, "get_output_embeddings"):
            return False
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        paths = [next((path for path, each in base.named_modules() if each is end), None) for end in ends]
        names = [f"{path}.weight" for path in paths if path is not None]
        return len(names) == 2 and len({self.ties.get(name, name) for name in names}) == 2

    def _listed(self) -> Iterator[MergedTensor]:
        seen: dict[str, str] = {}
        inside: tuple[str, ...] = ()
        for path, module in self.base.named_modules():
            if path.startswith(inside) and inside:
                continue
            # Of an adapter, what it gives back when it is unloaded; of any other module, what it holds itself.
            within, held = _unloaded(module)
            if held is not module or _is_adapter(module):
                inside += (f"{path}.",)
            for key, tensor in _own_tensors(held, recurse=held is not module):
                place = ".".join(filter(None, (self._prefix, path, within, key)))
                source = self._first.get(place, place)
                name = ".".join(filter(None, (path, key)))
                if (first := seen.setdefault(source, name)) != name:
                    self.ties[name] = first
                    continue
                spec = self._specs.get(source)
                yield MergedTensor(
                    name=name,
                    shape=tuple(tensor.shape) if spec is None else spec.shape,
                    dtype=tensor.dtype if spec is None else getattr(torch, spec.dtype),
                    source=source,
                    module=path,
                    key=key,
                )

    def values(self, names: Sequence[str], *, window_bytes: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The tensors of these names, in this order: on rank 0, and None on the others. All ranks call it together.

        window_bytes: of the tensors that travel together; one that is larger travels alone.
        """
        by_name = {each.name: each for each in self.tensors}
        window: list[MergedTensor] = []
        size = 0
        for name in names:
            each = by_name[name]
            num_bytes = each.dtype.itemsize * torch.Size(each.shape).numel()
            if window and size + num_bytes > window_bytes:
                yield from self._merged(window)
                window, size = [], 0
            window.append(each)
            size += num_bytes
        yield from self._merged(window)

    @cached_property
    def _adapters_of(self) -> dict[str, list[str]]:
        """The adapters of each tensor."""
        found: dict[str, list[str]] = {}
        for path in self._adapters:
            for name in self._names_in(path, self.base.get_submodule(path)):
                found.setdefault(name, []).append(path)
        return found

    def _merged(self, window: Sequence[MergedTensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
        modules = {each.module: self.base.get_submodule(each.module) for each in window}
        # An adapter of a tied tensor is merged into it wherever it stands.
        sources = {each.source for each in window}
        for path in {path for source in sources for path in self._adapters_of.get(source, ())} - modules.keys():
            modules[path] = self.base.get_submodule(path)
        needed = {name for path, module in modules.items() for name in self._names_in(path, module)}
        found: dict[str, torch.Tensor] = {}
        failure: ModelError | None = None
        with self._engine.whole(optimizer=False, rank0_only=True, only=sorted(needed)):
            if self._engine.channel.rank == 0:
                memo: dict[int, Any] = {}
                try:
                    merged = {path: _merge(path, copy.deepcopy(_lone(each), memo)) for path, each in modules.items()}
                    found = {each.name: _checked(merged[each.module], each) for each in window}
                except ModelError as error:
                    failure = error
        with agreed(self._engine.channel, purpose="verdict on a merge", doing="sw.save_merged"):
            if failure is not None:
                raise failure
        for each in window:
            yield each.name, found.get(each.name)

    def _names_in(self, path: str, module: nn.Module) -> list[str]:
        around = ".".join(filter(None, (self._prefix, path)))
        is_adapter = _is_adapter(module)
        keys = [key for key, _ in _own_tensors(module, recurse=is_adapter)]
        # To merge, peft also reads buffers that no file has.
        keys += [key for key, _ in module.named_buffers(remove_duplicate=False) if is_adapter]
        places = [f"{around}.{key}" for key in keys]
        return [self._first.get(each, each) for each in places]


def _checked(merged: nn.Module, wanted: MergedTensor) -> torch.Tensor:
    """The tensor that peft has made. Raises ModelError for another than was planned."""
    tensor = dict(_own_tensors(merged)).get(wanted.key)
    if tensor is None or tuple(tensor.shape) != wanted.shape or tensor.dtype != wanted.dtype:
        made = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ModelError(
            f"merging {wanted.module!r}, peft made {made} of {wanted.name!r}, not {wanted.dtype} {wanted.shape}. Merge "
            "the whole model inside `with engine.whole(optimizer=False, rank0_only=True):`, in a copy"
        )
    return tensor.detach()


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "unload_and_optionally_merge_module") or BASE_LAYER in module._modules


def _unloaded(module: Any) -> tuple[str, nn.Module]:
    """What peft puts in the place of a module when it unloads it, and its name in it."""
    if not _is_adapter(module):
        return "", module
    if TOKENS in module._modules:
        within, held = TOKENS, module.token_adapter
    elif COPIES in module._modules and module.active_adapters:
        within, held = f"{COPIES}.{module.active_adapters[0]}", module.modules_to_save[module.active_adapters[0]]
    elif ORIGINAL in module._modules:
        within, held = ORIGINAL, module.original_module
    else:
        within, held = "", module
    while BASE_LAYER in held._modules:
        within, held = f"{within}.{BASE_LAYER}".lstrip("."), held.base_layer
    return within, held


def _own_tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the buffers that files have."""
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    for path, each in module.named_modules() if recurse else [("", module)]:
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in not_in_files(each):
                yield f"{path}.{key}".lstrip("."), buffer


def _lone(module: nn.Module) -> nn.Module:
    """An adapter; of another module what it holds itself, without the modules inside."""
    if _is_adapter(module) or not module._modules:
        return module
    alone = nn.Module()
    alone._parameters, alone._buffers = module._parameters, module._buffers
    setattr(alone, NOT_IN_FILES, not_in_files(module))
    return alone


def _merge(path: str, module: Any) -> nn.Module:
    """As `merge_and_unload` of peft does with each module. Raises ModelError for an adapter that it cannot merge."""
    merged: nn.Module = module
    try:
        if hasattr(module, "unload_and_optionally_merge_module"):
            merged = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif BASE_LAYER in module._modules:
            module.merge(safe_merge=False, adapter_names=None)
            merged = module.get_base_layer()
    except Exception as error:
        raise ModelError(
            f"peft cannot merge {path!r}: {in_words(error)}. Save the adapters with sw.save_adapters(engine, folder)"
        ) from error
    return merged
