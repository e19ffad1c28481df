"""The tree of a model's modules, as far as a placement looks at it."""

from collections.abc import Iterator
from dataclasses import dataclass


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

    @property
    def num_elements(self) -> int:
        """Elements of all parameters in it; a tie counts once, where it is met first."""
        return sum(num_elements for module in self.modules() for _, num_elements in module.own_parameters)

    def modules(self) -> Iterator["Outline"]:
        """It and every module in it, in the order of registration."""
        yield self
        for child in self.children:
            yield from child.modules()

    def parameter_names(self, parameter: str) -> tuple[str, ...]:
        """All full names that one of its own parameters has by its own names."""
        local = parameter[len(self.name) + 1 :] if self.name else parameter
        return tuple(f"{name}.{local}" if name else local for name in self.names)


def parents(name: str) -> Iterator[str]:
    """The names of the modules around a name, from the inside out, without the model: `a.b`, `a` of `a.b.c`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
