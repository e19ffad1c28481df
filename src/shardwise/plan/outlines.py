"""A model as the planners see it: the tree of its modules, what they compute, and its parameters with their dtypes.

`engine` makes these values from live modules, and the planners read nothing else of a model. `Outline` is the tree that
placements and units look at. `TensorOutline` is the flat list of modules that tensor parallelism looks at. `Parameter`
is what buckets hold. In all of them a thing with several names is listed once, under the name that comes first:

    model            Outline ""            own_parameters ()
      embedding        "embedding"           (("embedding.weight", 1000),)
      layers           "layers"              is_container: a ModuleList is never called
        0                "layers.0"          aliases ("layers.1",): one module object, reached twice
      head             "head"                (("head.weight", 0),)   tied to the embedding: counted there
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import PlanError
from shardwise.plan.dtypes import CHECKPOINT_ONLY_DTYPES, COMPUTE_DTYPES, ITEMSIZE_BYTES, is_complex, promote
from shardwise.plan.names import any_matches, unmatched
from shardwise.plan.specs import Precision
from shardwise.space import Portion


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A module and what is in it; a module object that is reached by several names is listed once."""

    name: str
    """The full name under which it is met first; "" for the model itself."""
    kind: str
    """The name of its class."""
    is_container: bool = False
    """Its forward is never called, as of a ModuleList: what it holds is placed, not it."""
    children: tuple["Outline", ...] = ()
    own_parameters: tuple[tuple[str, int], ...] = ()
    """(full name, elements) of each parameter that it holds itself; 0 elements where an earlier name holds the same."""
    aliases: tuple[str, ...] = ()
    """Its other names."""
    is_indivisible: bool = False
    """It is one of torch's own modules that compute with the parameters of what is in them (attention, say)."""

    @property
    def num_places(self) -> int:
        """Places in it that hold a parameter; a tie counts wherever it is met."""
        return sum(len(module.own_parameters) for module in self.modules())

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name, *self.aliases)

    def modules(self) -> Iterator["Outline"]:
        """It and every module in it, in the order of registration."""
        yield self
        for child in self.children:
            yield from child.modules()

    def parameter_names(self, parameter: str) -> tuple[str, ...]:
        """All full names of a parameter of the module."""
        # By length, not at the last dot: a compiled module lists the parameters of all that is inside, `0.weight`.
        local = parameter[len(self.name) + 1 :] if self.name else parameter
        return tuple(f"{name}.{local}" if name else local for name in self.names)


def parents(name: str) -> Iterator[str]:
    """The names of the modules around a name, from the inside out, without the model: `a.b`, `a` of `a.b.c`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def inside_of(names: Iterable[str]) -> dict[str, list[str]]:
    """For each module around some of these names, those in it, without itself, in their order; "" is around all."""
    found: dict[str, list[str]] = {}
    for name in names:
        for around in (*parents(name), *([""] if name else [])):
            found.setdefault(around, []).append(name)
    return found


Computes = Literal["linear", "transposed linear", "embedding", "other"]
"""What a module makes of its parameters `weight` and `bias`: x W^T + b, x W + b, rows of W, or something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorModule:
    """One module; a module object that is reached by several names is listed once."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: str
    """The name of its class."""
    computes: Computes = "other"
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Attribute -> name of the parameter, in the order of registration."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Whole numbers that it has as attributes."""
    configured: Mapping[str, int] = field(default_factory=dict)
    """Whole numbers that its `config` has."""
    output_sizes: tuple[str, ...] = ()
    """Attributes with the number of outputs that its forward reads."""
    problem: str = ""
    """Why this module cannot be cut, though it computes what can be."""
    column_problem: str = ""
    """Why its outputs cannot be cut, though its inputs or tokens can be."""

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMap:
    """A map and its adapters."""

    base: TensorModule
    downs: tuple[TensorModule, ...]
    ups: tuple[TensorModule, ...]
    others: tuple[tuple[TensorModule, str], ...]
    """The other parameters: of each the module that holds it, and its attribute."""
    foreign: str | None
    """A parameter that shows that the adapter may read the base layer's weight; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOutline:
    """The modules of a model in the order of registration, and the shapes of its parameters."""

    modules: tuple[TensorModule, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of each parameter, by its first name."""
    carried: Mapping[str, str] = field(default_factory=dict)
    """The rules that the model itself carries: full name of a module or parameter -> rule."""
    adapters: Mapping[str, AdaptedMap | tuple[TensorModule, ...]] = field(default_factory=dict)
    """By the module that stands for them: a map and its adapters; a module and the copies that are trained instead."""

    def parameter_names(self) -> Iterator[tuple[str, TensorModule, str]]:
        """Every name that a parameter has: (name, module that holds it, attribute)."""
        for module in self.modules:
            for attribute in module.parameters:
                for name in module.names:
                    yield f"{name}.{attribute}" if name else attribute, module, attribute


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of the model; names that share its storage (ties) are aliases of the first."""

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    """Of the tensor that this rank computes with."""
    dtype: str
    """The dtype in which the model was built."""
    trainable: bool = True
    working: str
    """The dtype that forward and backward read."""
    master: str
    """The dtype in which the owner updates it and a checkpoint holds it."""
    portion: Portion | None = None
    """Which part of it the ranks along this tensor-parallel coordinate have; None: all of it."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.shape if self.portion is None else self.portion.global_shape

    @property
    def num_elements(self) -> int:
        """Number of elements, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def fused(self) -> bool:
        """Whether it lives in a flat buffer: it is trained, or it computes in another dtype than it came in."""
        return self.trainable or self.working != self.dtype


def describe(
    *,
    name: str,
    aliases: Sequence[str],
    shape: Sequence[int],
    dtype: str,
    trainable: bool,
    precision: Precision,
    beside_statistics: bool = False,
    is_packed: bool = False,
) -> Parameter:
    """The parameter with the dtypes that `precision` gives it.

    Working copies of real floating parameters take `precision.compute`, unless `keep` names them; other dtypes stay. A
    master is never narrower than the working copy; a frozen parameter keeps its values as they were given. A parameter
    that works `beside_statistics` (of a batch norm, which are never cast) is kept like those that `keep` names. What
    `is_packed`, or is frozen in the module of a packed weight, keeps its dtype.
    """
    if dtype not in ITEMSIZE_BYTES or dtype in CHECKPOINT_ONLY_DTYPES:
        raise PlanError(f"parameter {name!r} has dtype {dtype}, which no plan can hold; convert it before parallelize")
    if is_packed or (dtype not in COMPUTE_DTYPES and not is_complex(dtype)):
        # Integers, and float8 weights that their module scales itself: never trained, never cast. Nor are the scales,
        # which belong to the codes, and a bias, which the module brings to the dtype in which it computes.
        working = master = dtype
    else:
        kept = beside_statistics or any_matches(precision.keep, (name, *aliases))
        # A cast from complex to a real dtype would drop the imaginary part, so `compute` does not reach those.
        wanted = dtype if precision.compute is None or is_complex(dtype) else precision.compute
        working = promote(precision.master, wanted) if kept else wanted
        # Nothing updates a frozen parameter, so it needs no float32 master. Its own dtype is kept even where it
        # computes in a narrower one: a save then holds the values that were given, and not rounded ones.
        master = promote(precision.master, working) if trainable else promote(dtype, working)
    return Parameter(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(shape),
        dtype=dtype,
        trainable=trainable,
        working=working,
        master=master,
    )


def check_keep(precision: Precision, names: Sequence[str]) -> None:
    """Raise PlanError when a `keep` pattern means no parameter."""
    if findings := unmatched(precision.keep, names, role="precision.keep"):
        raise PlanError(*findings)
