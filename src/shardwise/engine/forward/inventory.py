"""What a model holds: its parameters by storage, its ties, its buffers.

    embedding.weight  --+
    head.weight       --+--> one storage, one object or several --> one `Parameter`, alias head.weight
    a.weight, b.weight = w[:4], w[2:]  --> share a part of a storage: refused, no plan could update both
    cache = weight.view(-1), a buffer  --> a view of a parameter: refused, its values move to a flat buffer

What belongs to a packed parameter is asked of its kind (`parameter_kinds`).
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dtype_name, extent, is_dtensor, share_elements
from shardwise.engine.parameter_kinds import AT_REST, Carried, ParameterKind, is_packed, is_shell, plain_class
from shardwise.engine.torch_private import (
    GRADIENT_HOOKS,
    DisableTorchFunctionSubclass,
    NormWithStatistics,
    SetValues,
    gradient_hooks,
    make_subclass,
    stand_around_set,
    storage_id,
)
from shardwise.errors import ModelError, few_of
from shardwise.plan import Parameter, Precision
from shardwise.plan.outlines import check_keep, describe
from shardwise.space import Portion

_T = TypeVar("_T", bound=torch.Tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The parameters of a model in the order of registration, each once, and its buffers."""

    parameters: dict[str, nn.Parameter]
    specs: tuple[Parameter, ...]
    buffers: dict[str, torch.Tensor]
    name_of: dict[nn.Parameter, str]
    """The name of every parameter object that the model was built with."""
    places: tuple[tuple[nn.Module, str, str], ...]
    """Every place that holds a parameter: (module, attribute, name of the parameter)."""
    found_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Full name of a place -> the names of what is there, where that is a packed weight."""
    views: tuple[tuple[torch.Tensor, str], ...] = ()
    """Tensors that show the elements of a packed weight, and its name."""

    def names_at(self, place: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names of the tensors that a place of a parameter holds."""
        return self.found_at[place] if place in self.found_at else (self.name_of[parameter],)

    def carried(self) -> dict[str, nn.Parameter]:
        """The tensors that belong to packed weights, and are no parameters of modules."""
        names = {name for _, _, name in self.places}
        return {name: each for name, each in self.parameters.items() if name not in names} if self.found_at else {}

    def tie(self) -> None:
        """Make every tie one parameter object, though the model was built with several that share a storage."""
        for module, attribute, name in self.places:
            # One object, so that autograd adds the gradients of all uses and the object can be moved to a buffer
            # once.
            if module._parameters[attribute] is not self.parameters[name]:
                module.register_parameter(attribute, self.parameters[name])

    def restricted(self, names: Collection[str]) -> "Inventory":
        """The inventory of these parameters alone: it keeps no other tensor alive."""
        names = frozenset(names)
        return Inventory(
            parameters={name: each for name, each in self.parameters.items() if name in names},
            specs=tuple(spec for spec in self.specs if spec.name in names),
            buffers={},
            name_of={each: name for each, name in self.name_of.items() if name in names},
            places=tuple(place for place in self.places if place[2] in names),
            found_at=self.found_at,
            views=tuple(each for each in self.views if each[1] in names),
        )

    def cut(self, portions: Mapping[str, Portion]) -> "Inventory":
        """The same parameters, cut to the given portions of this rank: name -> portion."""
        specs = [
            replace(spec, portion=portion, shape=portion.shape) if (portion := portions.get(spec.name)) else spec
            for spec in self.specs
        ]
        return replace(self, specs=tuple(specs))

    def uncut(self, names: Collection[str]) -> "Inventory":
        """The same parameters, with those of `names` whole."""
        specs = [
            replace(spec, portion=None, shape=spec.global_shape) if spec.name in names else spec for spec in self.specs
        ]
        return replace(self, specs=tuple(specs))

    def waiting(self) -> list[str]:
        """Names of parameters and buffers without values: they are on the meta device."""
        return [name for name, each in (*self.parameters.items(), *self.buffers.items()) if each.is_meta]

    def refuse_waiting_packed(self) -> None:
        """Raise ModelError for packed weights without values: nothing initialises them."""
        packed = {name for names in self.found_at.values() for name in names}
        if waiting := [name for name in self.waiting() if name in packed]:
            raise ModelError(
                f"{few_of(waiting)}: packed weights have no initial values, and these are on the meta device. Quantise "
                "the weights, or load quantised ones, before parallelize"
            )

    def num_bytes(self, *, but: Sequence[Callable[[str], bool]]) -> int:
        """Bytes of what is here of the parameters, without those by whose names one of `but` is true."""
        rest = [each.detach() for name, each in self.parameters.items() if not any(has(name) for has in but)]
        return sum(each.numel() * each.element_size() for each in rest)

    def ties(self) -> dict[str, str]:
        """Other names of parameters: alias -> name."""
        return {alias: spec.name for spec in self.specs for alias in spec.aliases}

    def replaced(self) -> list[str]:
        """Names of parameters in whose place the model now has another object, or none."""
        return [
            name
            for module, attribute, name in self.places
            if module._parameters.get(attribute) is not self.parameters[name]
        ]


def take_inventory(model: nn.Module, precision: Precision) -> Inventory:
    """List the parameters and buffers of `model`.

    Parameter objects that share the whole of one storage are one parameter with several names (a tie). Parameters that
    share a part of one raise ModelError, because no plan could update them.
    """
    see_parametrizations()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or 'the model'!r} is a script (torch.jit), and its parameters cannot move to flat buffers; "
                "give the original module"
            )
    names: dict[nn.Parameter, list[str]] = {}
    first_of: dict[nn.Parameter, nn.Parameter] = {}
    places: dict[tuple[object, ...], nn.Parameter] = {}
    held_by: list[tuple[nn.Module, str, nn.Parameter]] = []
    found = _PackedListing()
    listed = list(found.listed(model))
    for owner, attribute, name, parameter in listed:
        # An expanded parameter: in a flat buffer each element would get a place of its own, and a gradient of its
        # own.
        if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ModelError(
                f"parameter {name!r} has several elements in one place of memory (it was expanded). Make a parameter "
                "of the unexpanded shape, and expand it in forward"
            )
        first = places.setdefault(place_of(parameter), parameter)
        # One parameter is trained or frozen. Through two objects one process would train half of its uses.
        if first.requires_grad != parameter.requires_grad:
            raise ModelError(
                f"{names[first][0]!r} and {name!r} share one storage, and only one of them requires a gradient; "
                f"make them one parameter: model.{name} = model.{names[first][0]}"
            )
        if owner is not None:
            held_by.append((owner, attribute, first))
        first_of[parameter] = first
        if name not in (known := names.setdefault(first, [])):  # a module reached twice yields its names once each
            known.append(name)
    _refuse_partial_sharing(names)
    buffers = dict(model.named_buffers())
    _refuse_restless(listed)
    for name, buffer in buffers.items():
        _refuse_unfit(f"buffer {name!r}", buffer)
    check_keep(precision, [name for each in names.values() for name in each])
    # Batch norms keep float32 parameters under any plan: torch refuses narrower ones beside float32 statistics.
    beside_statistics = {first for owner, _, first in held_by if _has_statistics(owner)}
    beside_packed = {first for owner, _, first in held_by if owner in found.modules and not first.requires_grad}
    packed = {id(each) for held in found.tensors_at.values() for each in held}
    specs = tuple(
        describe(
            name=each[0],
            aliases=each[1:],
            shape=parameter.shape,
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad,
            precision=precision,
            beside_statistics=parameter in beside_statistics,
            is_packed=id(parameter) in packed or parameter in beside_packed,
        )
        for parameter, each in names.items()
    )
    parameters = {each[0]: parameter for parameter, each in names.items()}
    _refuse_buffers_in_parameters({spec.name: parameters[spec.name] for spec in specs if spec.fused}, buffers)
    return Inventory(
        parameters=parameters,
        specs=specs,
        buffers=buffers,
        name_of={each: names[first][0] for each, first in first_of.items()},
        places=tuple((owner, attribute, names[first][0]) for owner, attribute, first in held_by),
        found_at={
            place: tuple(names[first_of[each]][0] for each in tensors) for place, tensors in found.tensors_at.items()
        },
        views=tuple((view, names[first_of[parameter]][0]) for view, parameter in found.views),
    )


def _refuse_restless(listed: Sequence[tuple[nn.Module | None, str, str, nn.Parameter]]) -> None:
    """Raise ModelError for modules that have other parameters than they had a moment ago, when they were listed."""
    moved = [name for owner, key, name, each in listed if owner is not None and owner._parameters.get(key) is not each]
    if moved:
        raise ModelError(
            f"{few_of(moved)}: whenever the model's modules are listed, these are new parameters, and no plan can hold "
            "them. LoRA of peft does so with nn.MultiheadAttention; leave it out of target_modules, or use a module "
            "with a Linear for each projection"
        )


class _PackedListing:
    """The packed weights of a model: which tensors they are made of."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()
        """Those that hold one: they compute with its codes, and see to dtypes themselves."""
        self.tensors_at: dict[str, list[nn.Parameter]] = {}
        self.views: list[tuple[torch.Tensor, nn.Parameter]] = []

    def listed(self, model: nn.Module) -> Iterator[tuple[nn.Module | None, str, str, nn.Parameter]]:
        """As `named_places`; packed weights with what belongs to them, which has no module."""
        kind = kind_in(model)
        for owner, attribute, name, parameter in named_places(model):
            _refuse_unfit(f"parameter {name!r}", parameter)
            if not is_packed(parameter):
                yield owner, attribute, name, parameter
                continue
            carried = kind.carried_by(owner, attribute, name)
            held = {each.name: cast("nn.Parameter", each.tensor) for each in carried if not each.is_view}
            self.views += [(each.tensor, parameter) for each in carried if each.is_view]
            if not owner._modules:  # else other modules may compute with what stands beside the codes
                self.modules.add(owner)
            self.tensors_at[name] = [*([] if is_shell(parameter) else [parameter]), *held.values()]
            if not is_shell(parameter):
                yield owner, attribute, name, parameter
            yield from ((None, "", each, tensor) for each, tensor in held.items())


def kind_in(model: nn.Module) -> ParameterKind:
    """What the parameters of a model need besides their values."""
    if not any(map(is_packed, model.parameters())):
        return ParameterKind()
    from shardwise.engine.packed import PackedWeights

    return PackedWeights()


def all_carried(model: nn.Module, ties: Mapping[str, str] = MappingProxyType({})) -> Iterator[Carried]:
    """What belongs to the packed weights of a model, under each name that it has; without the names in `ties`."""
    kind = kind_in(model)
    for module, attribute, name, parameter in named_places(model):
        if is_packed(parameter):
            for each in kind.carried_by(module, attribute, name):
                yield replace(each, name=ties.get(each.name, each.name))


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether there is memory with elements behind a tensor."""
    return tensor.numel() > 0 and not tensor.is_meta


def named_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Every place that holds a parameter, ties included: (module, attribute, full name, parameter)."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, attribute, f"{prefix}.{attribute}" if prefix else attribute, parameter


def with_values(original: _T, values: torch.Tensor) -> _T:
    """A tensor that views `values`, with the class, the `requires_grad` and the attributes of `original`.

    A parameter that is not gathered (stage 3) gives one of the class that it has when it is.
    """
    made: torch.Tensor
    if isinstance(original, nn.Parameter):
        # The class of a parameter at rest (stage 3), or of a part between steps, refuses operations.
        kind = plain_class(type(original))
        # Not kind(values): constructors of subclasses take other arguments.
        made = make_subclass(kind, values.detach(), original.requires_grad)
    else:
        made = values.detach().requires_grad_(original.requires_grad)
    vars(made).update(vars(original))
    for own in AT_REST:
        vars(made).pop(own, None)
    return cast("_T", made)


def take_over(parameter: nn.Parameter, made: nn.Parameter) -> nn.Parameter:
    """What has the content of `made` from now on: `parameter` itself, so that code which holds it goes on with it.

    Where torch cannot exchange the two (something else holds what is behind the object), it is `made`.
    """
    try:
        exchange(parameter, made)
    except RuntimeError:
        return made
    return parameter


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let each of two parameters have the content of the other, with its hooks. Raises RuntimeError if torch cannot."""
    hooks = [gradient_hooks(each) for each in (one, other)]
    torch.utils.swap_tensors(one, other)
    # torch leaves the list of these hooks with the object, and what calls them with the content.
    for each, held in zip((other, one), hooks, strict=True):
        setattr(each, GRADIENT_HOOKS, held)


def places_in(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """(module, attribute) -> a full name, for every place that holds a parameter."""
    return {(module, attribute): name for module, attribute, name, _ in named_places(model)}


def refuse_replaced(names: Sequence[str]) -> None:
    """Raise ModelError where parameters are others than those that parallelize found."""
    if names:
        raise ModelError(
            f"{len(names)} parameters were replaced after parallelize, among them {names[0]!r}; "
            "do that before parallelize, which assigns owners"
        )


def refuse_moved(names: Sequence[str]) -> None:
    """Raise ModelError where parameters no longer view the buffers of the engine."""
    if names:
        raise ModelError(
            f"{len(names)} parameters were given other storage after parallelize, among them {names[0]!r}. Write "
            "values in place (load_state_dict, copy_), and move or convert the model before parallelize"
        )


def refuse_added(model: nn.Module, places: Collection[tuple[nn.Module, str]]) -> None:
    """Raise ModelError for parameters that are in other places than those: modules that were put into the model."""
    if added := [name for place, name in places_in(model).items() if place not in places]:
        raise ModelError(
            f"{len(added)} parameters came into the model after parallelize, among them {added[0]!r}, and no "
            "optimizer has them. Replace modules and add parameters before parallelize"
        )


class ModelContents:
    """The modules and parameters that a model had when this was made, and what may still be there.

    Asked before every step: one pass without names finds that nothing has changed, and names are for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        inventories: Sequence[Inventory],
        *,
        ties: Mapping[str, str],
        trainable: Collection[str],
    ) -> None:
        """`inventories`: of the parameters that this rank computes with. `ties`: other names of parameters, and their
        first. `trainable`: first names of those that the engine can train."""
        self._model = model
        self._inventories = inventories
        self._places = places_in(model)
        self.parameters: dict[str, nn.Parameter] = {}
        """Of the whole model by first name; those of other stages have no memory."""
        for _, _, name, parameter in named_places(model):
            self.parameters.setdefault(ties.get(name, name), parameter)
        self._listed = list(self.parameters.values())
        self._trainable = trainable
        self._flags = [name in trainable for name in self.parameters]
        self.frozen: frozenset[str] = frozenset()
        """What the engine can train, and does not at present: its `requires_grad` is off."""
        self.unfrozen: frozenset[str] = frozenset()
        """What was frozen when the engine was made, and is not any more."""
        self._known: list[nn.Module] = []
        """Every module of the model, and what they had when all was well."""
        self._held: list[object] = []

    def check(self) -> None:
        """Raise ModelError for parameters that came since, or are others; note which are frozen."""
        with DisableTorchFunctionSubclass():  # at rest or not
            flags = [each.requires_grad for each in self._listed]
        # Where the known modules hold what they held, no other one is reached.
        held = _held_by(self._known)
        is_known = bool(held) and len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if is_known and flags == self._flags:
            return
        refuse_replaced([name for inventory in self._inventories for name in inventory.replaced()])
        refuse_added(self._model, self._places)
        self._known = list(self._model.modules())  # a module without parameters came or went
        self._held = _held_by(self._known)
        self._flags = flags
        trained = {name for name, is_on in zip(self.parameters, flags, strict=True) if is_on}
        self.frozen = frozenset(name for name in self._trainable if name not in trained)
        self.unfrozen = frozenset(name for name in trained if name not in self._trainable)


def _held_by(modules: Sequence[nn.Module]) -> list[object]:
    """The names and objects of their parameters, and the modules inside."""
    # By identity: tensors compare element by element. The list keeps its objects alive, so that no other one has the
    # address of one that is gone.
    parameters = [each._parameters for each in modules if each._parameters]
    found: list[object] = [*chain.from_iterable(parameters)]
    found += chain.from_iterable([each.values() for each in parameters])
    found += chain.from_iterable([each._modules.values() for each in modules if each._modules])
    return found


def _has_statistics(module: nn.Module) -> bool:
    """Whether torch computes this module with float32 statistics, and accepts no narrower parameters with them."""
    return isinstance(module, NormWithStatistics) and module.running_mean is not None


def _refuse_unfit(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ModelError(
            f"{what} has no shape before the first forward; run the model once on a sample before parallelize"
        )
    if hasattr(type(tensor), "_is_sharded_param"):
        raise ModelError(
            f"{what} is cut over ranks by the model's present plan (stage 3). Change the plan with "
            "sw.relayout(engine, plan), or build the model anew"
        )
    if is_dtensor(tensor):
        raise ModelError(
            f"{what} is a DTensor, and shardwise cuts plain tensors. Give the model as it was before "
            "parallelize_module or fully_shard: sw.Tensor(rules=...) cuts it along tp, sw.Sharding(stage=...) over "
            "data ranks"
        )
    if is_shell(tensor) and tensor.requires_grad:
        raise ModelError(
            f"{what} is a {type(tensor).__name__}, a tensor around others, and requires a gradient. shardwise trains "
            "plain tensors: freeze it (requires_grad_(False)) and train adapters, or quantise after the training"
        )
    if tensor.layout != torch.strided:
        raise ModelError(f"{what} has layout {tensor.layout}; shardwise runs dense (strided) parameters and buffers")


def place_of(parameter: torch.Tensor) -> tuple[object, ...]:
    """Equal for parameters that are one: the same object, or another that shares the whole of its storage."""
    if parameter.numel() == 0 or is_shell(parameter):
        # Without memory, or in a shell of its own: it shares nothing unless it is the same object.
        return (id(parameter),)
    storage = parameter.untyped_storage()
    # On the meta device no storage has an address: all of them would be one tie.
    place = storage_id(storage) if parameter.is_meta else storage.data_ptr()
    return (place, parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype)


def _refuse_partial_sharing(names: dict[nn.Parameter, list[str]]) -> None:
    # A sweep over addresses: only spans that overlap are compared element by element, which pairs of all parameters
    # would make too slow.
    spans = sorted((*extent(parameter), index) for index, parameter in enumerate(names) if holds_values(parameter))
    listed = list(names)
    reaching: list[tuple[int, int]] = []  # spans that may still overlap a later one
    for start, stop, index in spans:
        reaching = [(other_stop, other) for other_stop, other in reaching if other_stop > start]
        for _, other in reaching:
            if share_elements(listed[other], listed[index]):
                raise ModelError(
                    f"{names[listed[other]][0]!r} and {names[listed[index]][0]!r} share a part of one storage. "
                    "shardwise runs parameters that share all elements or none: make one of them a copy, or compute "
                    "it from the other in forward"
                )
        reaching.append((stop, index))


def _refuse_buffers_in_parameters(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
    """Parameters move to flat buffers: what was a view of one would go on showing its first values."""
    in_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if holds_values(parameter):
            in_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    for name, buffer in buffers.items():
        for other in in_storage.get(buffer.untyped_storage().data_ptr(), ()) if holds_values(buffer) else ():
            if share_elements(parameters[other], buffer):
                raise ModelError(
                    f"buffer {name!r} and parameter {other!r} share a part of one storage, and the parameter's values "
                    "move. Compute the buffer from the parameter in forward, or make it a copy"
                )


def describe_model(inventory: Inventory) -> Sequence[str]:
    """One line per parameter and buffer: what must be equal on all ranks before values are looked at."""
    lines = [
        f"parameter {spec.name!r} {list(spec.shape)} {spec.dtype} {'trainable' if spec.trainable else 'frozen'}"
        + (" without values" if inventory.parameters[spec.name].is_meta else "")
        + (f" also {list(spec.aliases)}" if spec.aliases else "")
        for spec in inventory.specs
    ]
    return lines + [
        f"buffer {name!r} {list(buffer.shape)} {dtype_name(buffer.dtype)}{' without values' if buffer.is_meta else ''}"
        for name, buffer in inventory.buffers.items()
    ]


def describe_values(inventory: Inventory) -> Sequence[str]:
    """One line per parameter and buffer that has values, and all of them."""
    tensors = {**inventory.parameters, **inventory.buffers}
    return [
        f"{name!r} with digest {digest_of_values(tensor)}" for name, tensor in tensors.items() if not tensor.is_meta
    ]


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of what this rank has of a parameter, dense; the parameter does not keep it."""
    if type(parameter) is nn.Parameter:
        gradient, parameter.grad = parameter.grad, None
    else:
        with DisableTorchFunctionSubclass():  # at rest or not
            gradient, parameter.grad = parameter.grad, None
    # An embedding with `sparse=True` gives sparse gradients, which have no place in a flat buffer.
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def take_gradients(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of several parameters by name, as `take_gradient` has them; of those that have one."""
    found = {}
    with DisableTorchFunctionSubclass():  # once for all, at rest or not
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                parameter.grad = None
                found[name] = gradient
    for name, gradient in found.items():
        if gradient.layout is not torch.strided:
            found[name] = gradient.to_dense()
    return found


@functools.cache
def see_parametrizations() -> None:
    """From here on, in this process, a tensor that is set to itself counts as not written.

    Parametrizations that come and go in a forward (adapters of peft do so) set the weight under them to itself.
    """
    stand_around_set(_unless_same)


def _unless_same(set_to: SetValues) -> SetValues:
    def set_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            set_to(target, source)

    return set_unless_same
