"""The parts of a model whose norms are asked for, next to that of the whole gradient: in a report, or to clip by them.

Parts may overlap. The squares of each atom are summed, in the pass that takes the whole norm; a part is some atoms.

    parts    "first" = a.w, a.b      "weights" = a.w, c.w
    atoms    0: a.b (first)    1: a.w (first, weights)    2: c.w (weights)    3: all others
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.engine.forward.trained_parameters import Groups, TrainedSet, groups_in, meant_by_globs
from shardwise.engine.zero.flat_params import Owned, Run, runs_of
from shardwise.errors import PlanError, few_of
from shardwise.plan import Ownership, Parameter

Norms: TypeAlias = str | Mapping[str, str | Sequence[str]]
"""What a step reports: "groups", "layers" or "parameters", or {name: glob or globs of parameters or modules}."""

Key: TypeAlias = tuple[str, str]
"""("report" or "clip", the name of the part)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormParts:
    """Some parts; alike on all ranks but for `runs`."""

    members: Mapping[Key, frozenset[str]]
    """Of each part its parameters that can be trained."""
    numbers: Mapping[Key, frozenset[int]]
    """The same by their numbers among all of those."""
    atoms: Mapping[Key, tuple[int, ...]]
    num_atoms: int
    runs: Sequence[Run[int]]
    """What this rank owns, in as few runs of memory as can be; each with its atom, or ~atom where another counts it."""

    def reported(self, norms: Mapping[Key, float], trained: TrainedSet) -> dict[str, float]:
        """Those that a report has, by name: of parts with something that is trained."""
        shown = {key for key, each in self.members.items() if key[0] == "report" and each and trained.meets(each)}
        return {key[1]: norm for key, norm in norms.items() if key in shown}


def norm_parts(
    members: Mapping[Key, Collection[str]],
    names: Sequence[str],
    owned: Sequence[Owned],
    ownership: Ownership,
    *,
    counts: Callable[[str], bool],
) -> NormParts:
    """The parts with these parameters. names: all that are trained. counts: whether this rank counts a parameter."""
    held = {key: frozenset(names).intersection(each) for key, each in members.items()}
    signatures = {name: tuple(key for key, each in held.items() if name in each) for name in names}
    atom_of = {signature: at for at, signature in enumerate(dict.fromkeys(signatures.values()))}

    def mark(name: str) -> int:
        atom = atom_of[signatures[name]]
        return atom if counts(name) else ~atom

    return NormParts(
        members=held,
        numbers={key: frozenset(at for at, name in enumerate(names) if name in each) for key, each in held.items()},
        atoms={key: tuple(at for signature, at in atom_of.items() if key in signature) for key in held},
        num_atoms=len(atom_of),
        runs=runs_of(owned, ownership, counts=mark),
    )


def reported_parts(asked: Norms, groups: Groups, specs: Sequence[Parameter]) -> dict[Key, Collection[str]]:
    """The parts that a report shows. Raises PlanError for what names none."""
    if isinstance(asked, Mapping):
        return {("report", name): group.names for name, group in groups_in(asked, specs, setting="norms").items()}
    if asked == "groups":
        if not groups:
            raise PlanError('step(norms="groups"): parallelize was given no groups; give groups={"name": "glob"}')
        return {("report", name): group.names for name, group in groups.items()}
    if asked not in ("layers", "parameters"):
        raise PlanError(
            f"step(norms={asked!r}) is neither 'groups', 'layers' nor 'parameters'; a mapping of names to globs of "
            "parameters gives others"
        )
    found: dict[Key, list[str]] = {}
    for spec in specs:
        name = spec.name if asked == "parameters" else spec.name.rpartition(".")[0]
        found.setdefault(("report", name), []).append(spec.name)
    return dict(found)


def clipped_parts(
    limits: Mapping[str, float], groups: Groups, specs: Sequence[Parameter]
) -> dict[Key, Collection[str]]:
    """The parts that a plan clips by their norms. Raises PlanError for names without a match, and for an overlap."""
    found: dict[Key, Collection[str]] = {}
    for name in limits:
        group = groups.get(name)
        members = meant_by_globs((name,), specs, role="clip_grad_norm") if group is None else group.names
        found["clip", name] = members
    seen: dict[str, str] = {}
    for (_, name), held in found.items():
        if twice := [each for each in held if seen.setdefault(each, name) != name]:
            raise PlanError(
                f"clip_grad_norm: {few_of(sorted(twice))} belongs to {seen[twice[0]]!r} and to {name!r}; a gradient is "
                "clipped by one norm"
            )
    return found
