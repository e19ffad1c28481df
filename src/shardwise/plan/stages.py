"""Which module runs on which stage of a pipeline: given by names, or balanced by load (`balance`).

What a user gives may name a module by any of its names, a container, a glob or a bare parameter. A key claims a module
with all its contents. Keys for a module and for a part of it contradict each other unless they agree:

    stages={"layers.[0-1]": 0, "layers.2": 1, "head": 1, "scale": 0}
    layers.0, layers.1 -> 0    layers.2, head -> 1    parameter scale of the model itself -> 0
    plus {"layers.2.mlp": 0}   refused: layers.2.mlp is given stage 1 by 'layers.2' and stage 0 by 'layers.2.mlp'
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError, few_of
from shardwise.plan.balance import balanced_stages
from shardwise.plan.names import meant_by, nearest
from shardwise.plan.outlines import Outline, parents
from shardwise.plan.specs import Pipeline, toml_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """On which stage each part of a model is. Stage s is run by the rank at coordinate `s % num_ranks` of `pp`.

    Modules that are neither placed nor inside a placed module run on every rank, as the code between modules does.
    """

    num_ranks: int
    num_stages: int
    modules: Mapping[str, int]
    """Placed module, by its first name -> stage; everything inside it belongs to the same stage."""
    parameters: Mapping[str, int]
    """Parameter that a module outside the placed ones holds itself -> stage."""

    def rank_of(self, stage: int) -> int:
        """The coordinate along `pp` of the rank that runs a stage."""
        return stage % self.num_ranks

    def text(self) -> str:
        """The placement as TOML, a line for each module and parameter in the order of the model."""
        lines = [f"num_ranks = {self.num_ranks}", f"num_stages = {self.num_stages}"]
        for kind, stages in (("modules", self.modules), ("parameters", self.parameters)):
            lines += [f"{kind}.{toml_text(name)} = {stage}" for name, stage in stages.items()]
        return "\n".join(lines) + "\n"


def place(
    outline: Outline,
    pipeline: Pipeline,
    *,
    num_ranks: int,
    work: Mapping[str, float] | None = None,
    order: Sequence[str] | None = None,
) -> Placement:
    """The stage of every module that holds parameters: as `pipeline.stages` says, else balanced.

    `work`: the load of each module with all that is in it, by its first name; None: its parameters' elements.
    `order`: names of the modules in the order in which they are first called; None: the order of registration.
    Raises PlanError with every finding: keys without a match or in contradiction, empty stages, parameters without a
    stage, more stages than modules.
    """
    num_stages = num_ranks * pipeline.num_chunks
    if pipeline.stages is not None:
        modules, parameters = given_stages(outline, pipeline, num_ranks=num_ranks)
    else:
        modules, parameters = balanced_stages(outline, num_stages=num_stages, work=work, order=order)
    return Placement(num_ranks=num_ranks, num_stages=num_stages, modules=modules, parameters=parameters)


_SHOWN_NAMES = 4

Claims = dict[int, str]
"""Stage -> the first key that claims it."""


def given_stages(outline: Outline, pipeline: Pipeline, *, num_ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """The stage of every placed module, and of every parameter that a module outside them holds itself.

    Raises PlanError with every finding.
    """
    stages = pipeline.stages or {}
    claimed = _Claimed(outline)
    problems = pipeline.foreign_stages(num_ranks)
    for key, stage in stages.items():
        names = meant_by(key, claimed.names)
        for name in names:
            claimed.claim(name, stage, key)
        if not names:
            near = nearest(key, claimed.names)
            hint = f"; the nearest name is {near!r}" if near is not None else ""
            problems.append(f"pipeline.stages: {key!r} names no module and no parameter of the model{hint}")
    # Collected to the end, so that one error shows the user all keys that need a change.
    loose = claimed.loose_parameters()
    problems += claimed.contradictions()
    if names := [name for name, stage in loose.items() if stage is None]:
        problems.append(
            f"pipeline.stages: no stage owns {len(names)} of the model's {claimed.num_parameters} parameters: "
            f"{few_of(names, _SHOWN_NAMES, quotes=False)}; give their modules a stage"
        )
    num_stages = num_ranks * pipeline.num_chunks
    problems += [
        f"pipeline.stages: stage {stage} of {num_stages} owns nothing; give it a module, or use fewer stages"
        for stage in range(num_stages)
        if stage not in claimed.stages
    ]
    if problems:
        raise PlanError(*problems)
    return claimed.placed_modules(), {name: stage for name, stage in loose.items() if stage is not None}


class _Claimed:
    """The modules and parameters of a model by all their names, and which keys claim them for which stage."""

    def __init__(self, outline: Outline) -> None:
        self._model = outline
        self._module_of = {name: module for module in outline.modules() if module.name for name in module.names}
        self._parameter_of = {
            name: parameter
            for module in outline.modules()
            for parameter, _ in module.own_parameters
            for name in module.parameter_names(parameter)
        }
        self.names = [*self._module_of, *self._parameter_of]
        self.num_parameters = len(set(self._parameter_of.values()))
        self._claims: dict[str, Claims] = {}
        self.stages: set[int] = set()
        """The stages that own something."""

    def claim(self, name: str, stage: int, key: str) -> None:
        """A key claims what has this name for a stage; of a container, what it holds."""
        # The forward of a ModuleList is never called, so nothing could move the work to its stage: members are placed.
        module = self._module_of.get(name)
        if module is not None and module.is_container:
            for each in (*(child.name for child in module.children), *(own for own, _ in module.own_parameters)):
                self.claim(each, stage, key)
        else:
            # Under its first name: a module object has one place, however many names it has.
            first = self._parameter_of[name] if module is None else module.name
            self._claims.setdefault(first, {}).setdefault(stage, key)
            self.stages.add(stage)

    def placed_modules(self) -> dict[str, int]:
        """The modules with a stage that are, under one of their names, in no other module with a stage."""
        return {
            module.name: min(claims)  # the only one: several are a finding of `contradictions`
            for module in self._model.modules()
            if not module.is_container and (claims := self._claims_of_module(module))
            if not all(self._inside_placed(name) for name in module.names)
        }

    def loose_parameters(self) -> dict[str, int | None]:
        """The parameters whose own module has no stage, with the stage that they have themselves."""
        return {
            parameter: min(self._claims.get(parameter, ()), default=None)
            for module in self._model.modules()
            if not self._claims_of_module(module)
            for parameter, _ in module.own_parameters
        }

    def contradictions(self) -> list[str]:
        """A finding for each group of keys that claim the same things for several stages."""
        found: dict[tuple[tuple[int, str], ...], list[str]] = {}
        for module in self._model.modules():
            claims = self._claims_of_module(module)
            around = [self._claims_of_module(self._module_of[name]) for name in list(parents(module.name))[:1]]
            # What is inside inherits the fault: it is reported where it begins, once for all with the same keys.
            if len(claims) > 1 and claims not in around:
                names = f"{module.name!r} (also {', '.join(map(repr, module.aliases))})" if module.aliases else None
                found.setdefault(tuple(sorted(claims.items())), []).append(names or repr(module.name))
            for parameter, _ in module.own_parameters:
                both = {**self._claims.get(parameter, {}), **claims}
                if len(both) > 1 and both != claims:
                    found.setdefault(tuple(sorted(both.items())), []).append(repr(parameter))
        return [_contradiction(claims, things) for claims, things in found.items()]

    def _claims_of_module(self, module: Outline) -> Claims:
        """What is claimed of a module, or of one around it, under any of its names."""
        # By all its names: what is around any of them decides on which stage it is called.
        around = dict.fromkeys(
            self._module_of[outer].name
            for name in module.names
            for outer in (name, *parents(name))
            if outer in self._module_of
        )
        claims: Claims = {}
        for name in around:
            for stage, key in self._claims.get(name, {}).items():
                claims.setdefault(stage, key)
        return claims

    def _inside_placed(self, name: str) -> bool:
        """Whether the nearest module around this name that is called has a stage."""
        for outer in parents(name):
            if not self._module_of[outer].is_container:
                return bool(self._claims_of_module(self._module_of[outer]))
        return False


def _contradiction(claims: Iterable[tuple[int, str]], things: Sequence[str]) -> str:
    said = " and ".join(f"stage {stage} by {key!r}" for stage, key in claims)
    more = f" (and {len(things) - 1} more)" if len(things) > 1 else ""
    return (
        f"pipeline.stages: {things[0]}{more} is given {said}. A module runs on one stage, with all its parts: give "
        "the parts their stages, or change a key"
    )
