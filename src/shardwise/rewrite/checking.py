"""Checking: what a rewrite makes of tensors is gathered, its ties too, and compared with what a target wants."""

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NamedTuple

from shardwise.errors import RewriteError
from shardwise.rewrite.inverse_proof import Claim, prove
from shardwise.rewrite.inversion import Undoing
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.sections import AppliedSection, Metas, Section, carry_out
from shardwise.rewrite.strided_views import ViewedTensor

__all__ = ["Proved", "agreeing", "dropped_sources", "fit", "mismatches", "ties_of", "uncollected"]


class Proved(NamedTuple):
    """A section that was carried out, its way back, and what was proved of that."""

    done: AppliedSection
    undoing: Undoing
    claim: Claim


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no cyclic garbage meanwhile: all that is planned stays, and looking takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fit(
    sections: Sequence[Section],
    sources: Metas,
    wanted: Metas | None,
    recorded: Metas | None,
    aliases: Mapping[str, str],
) -> list[Proved]:
    """Carry sections out and prove each one's way back. Raises RewriteError with all findings."""
    proved = []
    done = carry_out(sections, sources, wanted, recorded)
    findings = done[-1].evaluation.findings
    if findings:
        problems = [str(each) for each in sorted(findings, key=lambda each: (each.place.line, each.place.column))]
        if done[-1].unfit:
            hint = "what the target tells of this inverse could not be used, since the rewrite does not fit the target"
            problems.append(f"{hint}: {done[-1].unfit[0]}")
        raise RewriteError(*problems)
    for place, each in enumerate(done):
        other_names = {} if place else aliases
        undoing = each.undoing(other_names)
        evaluation = each.evaluation
        applied_instances = [applied for instances in evaluation.trace for applied in instances]
        claim = Claim(
            sources=each.sources,
            outputs=evaluation.outputs,
            agree=evaluation.agree,
            lost=undoing.lost | other_names.keys(),
            aliases=other_names,
        )
        prove(claim, applied_instances, undoing.tasks)
        proved.append(Proved(each, undoing, claim))
    return proved


def mismatches(outputs: Metas, added: Collection[str], ties: Mapping[str, str], target: Metas) -> Iterator[str]:
    """Say what of the outputs is not as a target wants it."""
    for name, meta in target.items():
        made = outputs.get(name)
        if made is None:
            if name not in added:
                close = get_close_matches(name, outputs, n=1) if len(outputs) < 4000 else []
                hint = f"; it makes {close[0]}" if close else ""
                yield f"{name}: the target wants it, and the rewrite does not make it{hint}"
        elif made.shape != meta.shape:
            yield f"{name}: shape {list(meta.shape)} in the target, {list(made.shape)} by the rewrite"
        elif made.dtype != meta.dtype:
            here = f"{made.dtype} by the rewrite; cast it by dtype={meta.dtype!r}"
            yield f"{name}: dtype {meta.dtype} in the target, {here}"
    for name in (*outputs, *added):
        if name not in target and name not in ties:
            what = "adds it" if name in added else "makes it"
            yield f"{name}: the rewrite {what}, and the target has no such tensor; drop it by `{name} -> _`"


def agreeing(proved: Sequence[Proved], aliases: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The groups of sources without dims of which one stands for all."""
    groups = []
    for each in proved:
        for nodes in each.done.evaluation.agree:
            names = dict.fromkeys([aliases.get(leaf, leaf) for node in nodes for leaf in node.leaves])
            if len(names) > 1:
                groups.append(tuple(names))
    return tuple(dict.fromkeys(groups))


def dropped_sources(
    proved: Sequence[Proved], outputs: Mapping[str, Node], groups: Sequence[Sequence[str]], aliases: Mapping[str, str]
) -> frozenset[str]:
    """The sources of which nothing comes out."""
    if not any(each.undoing.lost for each in proved):
        return frozenset()
    used: set[str] = set()
    for node in outputs.values():
        used.update(node.used)
    for group in groups:
        if not used.isdisjoint(group):
            used.update(group)
    used = {aliases.get(name, name) for name in used}
    return frozenset([name for name in proved[0].done.sources if name not in aliases and name not in used])


def ties_of(outputs: Mapping[str, Node], aliases: Mapping[str, str], wanted: Collection[str] | None) -> dict[str, str]:
    """Return alias -> output for outputs that have the same elements as another only through a tie of the sources.

    A statement that copies a tensor makes a tensor of its own. Of tied outputs the one that the target wants stands for
    the others, else the one whose sources are no aliases.
    """
    tied = set(aliases.values())
    groups: list[tuple[ViewedTensor, dict[tuple[str, ...], str]]] = []
    for name, node in outputs.items():
        if tied.isdisjoint([aliases.get(leaf, leaf) for leaf in node.leaves]):
            continue
        value = node.value_under(aliases)
        for other, members in groups:
            if other.same_elements(value):
                members.setdefault(node.leaves, name)
                break
        else:
            groups.append((value, {node.leaves: name}))
    ties = {}
    for _, members in groups:

        def rank(each: tuple[tuple[str, ...], str]) -> tuple[bool, bool]:
            leaves, name = each
            return wanted is not None and name not in wanted, any(leaf in aliases for leaf in leaves)

        (_, first), *others = sorted(members.items(), key=rank)
        ties.update({name: first for _, name in others})
    return ties
