"""Which parameters a step trains: those of the groups that it names, without the frozen ones.

groups={"generator": "g", "critic": ("d", "shared")}, and `shared` was frozen between two steps:

                                        g      d      shared    head      untrained parameters: no gradient, no update,
    step(batch)                         yes    yes    frozen    yes       state and master as they are; buckets without
    step(batch, only="critic")          -      yes    frozen    -         a trained one are not reduced or sent

For the time of a step the `requires_grad` of what it leaves out is off, as a plain loop would have it for this loss.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.engine.forward.batch_digests import digest_of_lines
from shardwise.engine.forward.inventory import ModelContents
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.errors import ModelError, PlanError, few_of
from shardwise.plan import Parameter
from shardwise.plan.names import any_matches, unmatched

GivenGroups: TypeAlias = Mapping[str, str | Sequence[str]]
"""As users write them: {name: glob or globs of parameters or modules}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedGroup:
    """Some parameters of a model."""

    globs: tuple[str, ...]
    names: frozenset[str]


Groups: TypeAlias = Mapping[str, NamedGroup]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedSet:
    """What one step trains. The same object for equal steps."""

    names: frozenset[str] | None = None
    """None: all parameters that can be trained."""
    chosen: frozenset[str] | None = None
    """The same with those that are frozen: optimizers and groups that hold one of them step."""
    described: str = ""
    """Equal where ranks train the same; empty where they train all."""

    def __contains__(self, name: str) -> bool:
        return self.names is None or name in self.names

    def meets(self, names: Iterable[str]) -> bool:
        """Whether one of the names is trained."""
        return self.names is None or not self.names.isdisjoint(names)


ALL = TrainedSet()

MOST_TRAINED = 64
"""Of how many kinds of steps something is remembered: a loop with more freezes others all the time."""


def groups_in(given: GivenGroups | None, specs: Sequence[Parameter], *, setting: str = "groups") -> Groups:
    """The groups of a model. Raises PlanError for other things than names with globs, and for globs without a match."""
    groups = {}
    for name, given_globs in (given or {}).items():
        globs = (given_globs,) if isinstance(given_globs, str) else given_globs
        if not isinstance(name, str) or not isinstance(globs, Sequence) or not all(isinstance(g, str) for g in globs):
            raise PlanError(
                f"{setting}: {name!r}: {globs!r} is not a name with globs of parameters; write "
                f"{setting}={{'generator': 'g.*', 'critic': ('d.*', 'shared.*')}}"
            )
        if not globs:
            raise PlanError(f"{setting}: {name!r} names no parameter; give it names or globs, or leave it out")
        groups[name] = NamedGroup(globs=tuple(globs), names=meant_by_globs(globs, specs, role=f"{setting}[{name!r}]"))
    return groups


def meant_by_globs(globs: Sequence[str], specs: Sequence[Parameter], *, role: str) -> frozenset[str]:
    """The first names of the parameters that globs mean. Raises PlanError for globs without a match."""
    names = {spec.name: (spec.name, *spec.aliases) for spec in specs}
    if problems := unmatched(globs, [each for alike in names.values() for each in alike], role=role):
        raise PlanError(*problems)
    return frozenset(name for name, alike in names.items() if any_matches(globs, alike))


class TrainedParameters:
    """The named groups of an engine's parameters, and what each of its steps trains."""

    def __init__(self, groups: Groups, trainable: Collection[str], contents: ModelContents) -> None:
        """`trainable`: what the engine can train."""
        self.groups = groups
        self._trainable = frozenset(trainable)
        self._contents = contents
        self._known: dict[object, TrainedSet] = {}

    def of(self, only: str | Sequence[str] | None) -> TrainedSet:
        """What a step with `only` trains now. Raises ModelError for a group that is unknown, or has nothing to train.

        The flags are those that `ModelContents.check` saw last.
        """
        frozen, unfrozen = self._contents.frozen, self._contents.unfrozen
        if only is None and not frozen and not unfrozen:
            return ALL
        if not (only is None or (isinstance(only, str | Sequence) and all(isinstance(name, str) for name in only))):
            raise ModelError(f"step(only={only!r}) is neither the name of a group nor several; write only='generator'")
        chosen = (only,) if isinstance(only, str) else None if only is None else tuple(only)
        key = chosen, frozen, unfrozen
        if (found := self._known.get(key)) is None:
            if len(self._known) > MOST_TRAINED:
                self._known.clear()
            found = self._known[key] = self._made(chosen, frozen, unfrozen)
        return found

    def _made(self, chosen: tuple[str, ...] | None, frozen: frozenset[str], unfrozen: frozenset[str]) -> TrainedSet:
        names, held = (self._trainable | unfrozen) - frozen, None
        if chosen is not None:
            held = frozenset().union(*map(self._group, chosen))
            names &= held
            if not names:
                raise ModelError(
                    f"step(only={chosen!r}): no parameter of it can be trained now; all of them are frozen"
                    if chosen
                    else "step(only=()) trains nothing; name a group, or leave `only` out"
                )
        described = [] if chosen is None else [f"only {' and '.join(map(repr, chosen))}"]
        for what, found in (("frozen", frozen), ("unfrozen", unfrozen)):
            if found:
                described.append(f"{few_of(sorted(found))} {what} (digest {digest_of_lines(sorted(found))[:8]})")
        return TrainedSet(names=names, chosen=held, described=", ".join(described))

    def _group(self, name: str) -> frozenset[str]:
        if (found := self.groups.get(name)) is None:
            known = f"the groups are {few_of(list(self.groups))}" if self.groups else "parallelize was given no groups"
            raise ModelError(
                f"step(only={name!r}): there is no such group; {known}. Name them at parallelize: "
                "groups={'generator': 'g.*'}"
            )
        return found.names

    @contextmanager
    def alone(self, trained: TrainedSet) -> Iterator[None]:
        """Inside, nothing but what is trained gets gradients."""
        if trained.names is None:
            yield
            return
        with DisableTorchFunctionSubclass():  # at rest or not
            off = [
                each
                for name, each in self._contents.parameters.items()
                if each.requires_grad and name not in trained.names
            ]
            for each in off:
                each.requires_grad_(False)
        try:
            yield
        finally:
            with DisableTorchFunctionSubclass():
                for each in off:
                    each.requires_grad_(True)
