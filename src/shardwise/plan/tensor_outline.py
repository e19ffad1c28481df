"""What a plan of tensor parallelism has to know of a model: its modules, what they compute, and their parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

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
class TensorOutline:
    """The modules of a model in the order of registration, and the shapes of its parameters."""

    modules: tuple[TensorModule, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of each parameter, by its first name."""
    carried: Mapping[str, str] = field(default_factory=dict)
    """The rules that the model itself carries: full name of a module or parameter -> rule."""

    def parameter_names(self) -> Iterator[tuple[str, TensorModule, str]]:
        """Every name that a parameter has: (name, module that holds it, attribute)."""
        for module in self.modules:
            for attribute in module.parameters:
                for name in module.names:
                    yield f"{name}.{attribute}" if name else attribute, module, attribute
