"""Rewrites: what users make, check, invert and compose; and those that come with the library as files."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from shardwise.errors import RewriteError
from shardwise.rewrite.explanation import explain
from shardwise.rewrite.inversion import gives_back
from shardwise.rewrite.metas import TensorLike, TensorMeta, metas_of
from shardwise.rewrite.nodes import Correspondence
from shardwise.rewrite.sections import (
    BOUNDARY,
    Proved,
    Section,
    agreeing,
    dropped_sources,
    fit,
    lasting_degrees,
    mismatches,
    parsed,
    refuse_losses,
    sections_of,
    ties_of,
    uncollected,
    with_parameters,
)
from shardwise.rewrite.spelling import text_of
from shardwise.rewrite.statements import Statement
from shardwise.rewrite.text_inverse import spelled_out
from shardwise.rewrite.verbs.registry import TextParameters

Lossy: TypeAlias = Literal["refuse", "allow"]


class Rewrite:
    """A declared transformation between the names and shapes of two state dicts. Immutable.

    `source` is text, a sequence of statements, or an AOA configuration: a mapping with `aoa_statements` and perhaps
    `aoa_config_reverse`. `parameters` are the values of what stands in braces in the text. Raises `RewriteError` with
    everything that is wrong in the text, and for parameters that it does not name.

    A line `---` parts the text into sections, as `then` composes them.
    `docs/guides/rewrite.md` describes the language.

    >>> fuse = Rewrite("q, k -> qk, axis=0")
    >>> fuse.check({"q": (2, 4), "k": (3, 4)}).outputs["qk"].shape
    (5, 4)
    >>> print(fuse.inverse())
    qk -> q, k, axis=0, sizes=recorded
    >>> print(fuse.inverse({"q": (2, 4), "k": (3, 4)}))
    qk -> q, k, axis=0, sizes='[2,3]'
    """

    __slots__ = ("_is_known", "_sections")

    def __init__(
        self,
        source: str | Sequence[str] | Mapping[str, object],
        *,
        parameters: TextParameters | None = None,
    ) -> None:
        self._set(sections_of(source, {} if parameters is None else parameters))

    def _set(self, sections: tuple[Section, ...]) -> None:
        self._sections = parsed(sections)
        self._is_known = all(each.parsed is not None for each in self._sections)
        """Whether no parameter is lacking: without them the text cannot be read."""

    @classmethod
    def _made(cls, sections: tuple[Section, ...]) -> "Rewrite":
        made = cls.__new__(cls)
        made._set(sections)
        return made

    @classmethod
    def file(cls, path: str | PathLike[str], *, parameters: TextParameters | None = None) -> "Rewrite":
        """Read a rewrite from a file: statements, or, if its name ends in `.json`, an AOA configuration.

        Raises RewriteError where the file cannot be read, or holds no statement, and with everything that is wrong in
        it.
        """
        if not isinstance(path, str | PathLike):
            raise RewriteError(f"a file is named by a path, not {path!r:.100}")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            source = json.loads(text) if Path(path).suffix == ".json" else text
        except (OSError, ValueError) as error:
            raise RewriteError(f"{path} cannot be read as a rewrite: {error}") from None
        try:
            made = cls(source, parameters=parameters)
        except RewriteError as error:
            raise RewriteError(*error.problems, about=str(path)) from None
        # An empty file is more likely a wrong path than a rewrite that changes nothing.
        if made._is_known and not any(section.statements for section in made._sections):
            raise RewriteError(f"{path} holds no statement: write one a line, such as `a -> b`")
        return made

    # What it says

    @property
    def parameters_needed(self) -> frozenset[str]:
        """What the text names in braces."""
        return frozenset(name for each in self._sections for name in each.needed)

    @property
    def parameters(self) -> Mapping[str, int | str]:
        """The values that were given.

        A composed rewrite has those that no side lacks; where sides have different values for a name, the last one's.
        """
        lacking = {name for each in self._sections for name in each.lacking}
        given = [pair for each in self._sections for pair in each.given]
        return MappingProxyType({name: value for name, value in given if name not in lacking})

    def with_parameters(self, parameters: TextParameters) -> "Rewrite":
        """Return the rewrite with more parameters given: all sides of a composed one have them that lack them.

        What was given before stays. Raises RewriteError as the class does, and for another value of what nothing lacks.
        """
        return self._made(with_parameters(self._sections, parameters))

    @property
    def stages(self) -> tuple[Section, ...]:
        """The sections of the text, carried out one after the other. Raises RewriteError without its parameters."""
        if not self._is_known:
            lacking = sorted(frozenset().union(*[each.lacking for each in self._sections]))
            names = ", ".join(f"{{{name}}}" for name in lacking)
            example = ", ".join(f"{name!r}: 8" for name in lacking)
            raise RewriteError(
                f"the rewrite has parameters without a value: {names}; give them, parameters={{{example}}} "
                "(--parameter)"
            )
        return self._sections

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, as far as text says them: of an inverse those that undo."""
        return tuple([statement for section in self.stages for statement in section.effective])

    def __str__(self) -> str:
        """The statements as text.

        Only a rewrite whose parameters are known is read into an equal one. Otherwise it is what was written; of an
        inverse the way there, under a line `# inverse of:`.
        """
        parts = list(map(str, self._sections))
        if self._is_known:
            parts = ["\n".join([text_of(statement) for statement in section.effective]) for section in self._sections]
        return f"\n{BOUNDARY}\n".join(parts)

    def to_record(self) -> dict[str, object]:
        """JSON values from which `from_record` makes it: the statements as written, and which sections go backward."""
        # What was written is recorded, not its inverse: with a target at hand the exact inverse is found again, and
        # text is less.
        parts = ["\n".join([text_of(statement) for statement in section.statements]) for section in self.stages]
        inverted = [place for place, section in enumerate(self.stages) if section.inverted]
        record: dict[str, object] = {"text": f"\n{BOUNDARY}\n".join(parts)}
        return {**record, "inverted": inverted} if inverted else record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Rewrite":
        """The reverse of `to_record`; inverses may lose what cannot be undone. Raises RewriteError for other texts."""
        inverted = record.get("inverted", ())
        written = enumerate(sections_of(record["text"], {}))
        return cls._made(
            tuple([replace(each, inverted=place in inverted, lossy=place in inverted) for place, each in written])
        )

    def __repr__(self) -> str:
        return f"Rewrite({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rewrite):
            return NotImplemented
        # By meaning: spaces, comments and line breaks do not make another rewrite.
        return self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self._canonical)

    @property
    def _canonical(self) -> tuple[object, ...]:
        if not self._is_known:
            return self._sections
        return tuple([tuple([text_of(statement) for statement in section.effective]) for section in self._sections])

    # What is made of it

    def then(self, other: "Rewrite") -> "Rewrite":
        """Return the rewrite that does this and then the other, which sees this one's outputs; also `self >> other`.

        Each keeps the parameters that it was given, and has none of the other's.
        """
        if not isinstance(other, Rewrite):
            raise RewriteError(f"a rewrite is followed by a rewrite, not {other!r:.100}; give sw.Rewrite(text)")
        return self._made(self._sections + other._sections)

    def __rshift__(self, other: "Rewrite") -> "Rewrite":
        return self.then(other)

    def inverse(self, sources: Mapping[str, TensorLike] | None = None, *, lossy: Lossy = "refuse") -> "Rewrite":
        """Return the rewrite that undoes this one.

        `sources`: the tensors that this is applied to; then the inverse is exact. Without them it has what the text
        says, and takes the rest from the target that it is checked against. What cannot be undone (a drop, a cast that
        loses values, a copy) is refused by name. With `lossy="allow"` the rest is undone: what was dropped keeps the
        value that it has in the target, of copies the first counts. Raises RewriteError.
        """
        allowed = _allowed(lossy)
        if sources is not None:
            return self.apply(sources).inverse(lossy=lossy)
        # Where parameters are lacking, what is lost is found when they are given.
        if not allowed and self._is_known:
            refuse_losses([loss for section in self._sections for loss in section.textual_losses])
        turned = [replace(each, inverted=not each.inverted, lossy=allowed) for each in reversed(self._sections)]
        return self._made(tuple(turned))

    # What it does

    def check(
        self,
        sources: Mapping[str, TensorLike],
        target: Mapping[str, TensorLike] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> "Checked":
        """Find out what the rewrite makes of tensors, without touching one, and prove that it can be undone.

        sources: what is rewritten, by name: shapes, pairs (shape, dtype), `TensorMeta` or tensors.
        target: what is to come out; names, shapes and dtypes are compared. It also says what stars and placeholders
            stand for that are on the right only.
        aliases: other names of sources: alias -> source.

        Raises RewriteError with all that does not fit.
        """
        wanted = None if target is None else metas_of(target, "tensors of the target")
        checked = self.apply(sources, wanted=wanted, aliases=aliases)
        if wanted is not None:
            problems = list(mismatches(checked.outputs, checked.added, checked.ties, wanted))
            if problems:
                # How many names stars stand for may be why a shape differs.
                notes = [f"note: {each}" for each in checked.notes]
                raise RewriteError(*problems, *notes, about="the rewrite does not make the target's tensors")
        return checked

    def apply(
        self,
        sources: Mapping[str, TensorLike],
        *,
        wanted: Mapping[str, TensorLike] | None = None,
        recorded: Mapping[str, TensorLike] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> "Checked":
        """Do as `check` does, but leave the comparison with a target to the caller.

        wanted: the tensors of the target. They resolve names and degrees, and bring out those that were read.
        recorded: of an inverse, the tensors to which it leads back, where more is known of them than `wanted` says.
        """
        with uncollected():
            metas = metas_of(sources, "sources")
            other_names = _other_names({} if aliases is None else aliases, metas)
            # A statement may name a tied tensor by any of its names.
            metas |= {alias: metas[name] for alias, name in other_names.items()}
            targets = None if wanted is None else metas_of(wanted, "tensors of the target")
            proved = fit(self.stages, metas, targets, metas_of(recorded or {}), other_names)
            return Checked(self, proved, targets, other_names)

    def explain(self, sources: Mapping[str, TensorLike], target: Mapping[str, TensorLike] | None = None) -> str:
        """Check, and return a table of what becomes of what: target, box, source, box, operations.

        Raises RewriteError as `check` does.
        """
        return self.check(sources, target).explain()


class Checked(Correspondence):
    """A rewrite and the tensors that it fits: the source element of every element of every output."""

    def __init__(
        self,
        rewrite: Rewrite,
        proved: Sequence[Proved],
        wanted: Mapping[str, TensorMeta] | None,
        aliases: Mapping[str, str],
    ) -> None:
        self.rewrite = rewrite
        """With its parameters."""
        self._proved = proved
        last = proved[-1].done.evaluation
        self.ties = ties_of(last.outputs, aliases, wanted)
        """Other names of outputs: alias -> output."""
        # Ties are written as ties, not twice.
        nodes = {name: node for name, node in last.outputs.items() if name not in self.ties}
        self.added = last.added
        """Targets that keep their current value (`_ -> b`)."""
        self.agree = agreeing(proved, aliases)
        """Groups of sources without dims; one stands for all, and their values have to be equal."""
        self.dropped = dropped_sources(proved, last.outputs, self.agree, aliases)
        """Sources that the rewrite drops (`a -> _`)."""
        self.losses = tuple([loss for each in proved for loss in each.undoing.losses])
        """What cannot be undone, in words."""
        self.notes = tuple([note for each in proved for note in (*each.done.evaluation.notes, *each.undoing.notes)])
        """What may be wrong though all fits: how many names a star stands for, what matched nothing or is cropped."""
        applied = [(each, ops) for done in proved for each in done.applied_instances if (ops := each.ops) is not None]
        self.quantises = any(ops.rescaling is not None and ops.rescaling.quantises for _, ops in applied)
        """Whether outputs are quantised, which takes the values of whole blocks."""
        cropped = {variable.node for each, ops in applied if ops.cropped for variable in each.left}
        self.cropped = frozenset(
            [aliases.get(leaf, leaf) for node in cropped if node is not None for leaf in node.leaves]
        )
        """Sources that are cropped, or joined with what is."""
        scales = {
            each.left[1].node for each, ops in applied if ops.rescaling is not None and not ops.rescaling.quantises
        }
        self.scales = frozenset(
            [aliases.get(leaf, leaf) for node in scales if node is not None for leaf in node.leaves]
        )
        """Sources by which others are multiplied."""
        sources = {name: meta for name, meta in proved[0].done.metas.items() if name not in aliases}
        super().__init__(sources=sources, nodes=nodes, aliases=aliases)

    @cached_property
    def lasting_degrees(self) -> Mapping[str, tuple[int, ...]]:
        """For how many ranks the dims of outputs are laid out that have elements of fused tensors, whatever cuts them
        later. 0 where that cannot be said of a whole dim.
        """
        with uncollected():
            return lasting_degrees([each.done for each in self._proved], self.rewrite.stages)

    @property
    def invertible(self) -> bool:
        """Whether nothing is lost: no drop, no narrowing cast, no copy; of NaNs that are cast not the payload."""
        return not self.losses

    def inverse(self, *, lossy: Lossy = "refuse") -> Rewrite:
        """Return the rewrite that makes the sources of the outputs, exactly. See `Rewrite.inverse`."""
        if not _allowed(lossy):
            refuse_losses(self.losses)
        undoing = [_undoing(each) for each in reversed(self._proved)]
        return Rewrite._made(tuple([Section("\n".join([each.text for each in back]), parsed=back) for back in undoing]))

    def explain(self) -> str:
        """Return a table of what becomes of what: target, box, source, box, operations; and the notes under it."""
        table = explain(self, self.ties, self.added, self.dropped)
        return "\n".join([table, *[f"note: {each}" for each in self.notes]])


def _undoing(proved: Proved) -> tuple[Statement, ...]:
    """The statements that undo a section: with placeholders, where those undo it too."""
    statements = spelled_out(proved.undoing.tasks, patterns=True)
    # Placeholders may also match tensors that no instance meant. Trying the statements is the only way to know.
    return statements if gives_back(proved.claim, statements) else spelled_out(proved.undoing.tasks, patterns=False)


def _allowed(lossy: object) -> bool:
    """Whether a loss is accepted."""
    if lossy not in ("refuse", "allow"):
        raise RewriteError(f"lossy is 'refuse' or 'allow', not {lossy!r:.100}")
    return lossy == "allow"


def _other_names(aliases: object, metas: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Aliases, if all of them are other names of sources."""
    if not isinstance(aliases, Mapping):
        raise RewriteError(f"aliases are a mapping of other names to names of sources, not {aliases!r:.100}")
    unknown = [
        f"{alias!r:.100} is given as another name of {name!r:.100}, which is no source"
        for alias, name in aliases.items()
        if not isinstance(alias, str) or name not in metas
    ]
    if unknown:
        raise RewriteError(*unknown, about="aliases")
    return dict(aliases)


_SUFFIX = ".rewrite"


def shipped_names() -> tuple[str, ...]:
    """The names of all rewrites that `shipped` knows.

    >>> "llama-qkv" in shipped_names()
    True
    """
    names = (each.name for each in _folder().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def shipped_text(name: str) -> str:
    """The text of a rewrite that comes with the library, with its comments. Raises RewriteError for an unknown name."""
    if not isinstance(name, str):
        raise RewriteError(f"a rewrite that comes with shardwise has a name, not {name!r:.100}")
    known = shipped_names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RewriteError(f"no rewrite named {name!r} comes with shardwise{hint}; there are {', '.join(known)}")
    return (_folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def shipped(name: str, *, parameters: Mapping[str, int | str] = MappingProxyType({})) -> Rewrite:
    """A rewrite that comes with the library, by the name of its file without `.rewrite`; see `shipped_names`.

    parameters: values for what stands in braces in its text, such as `num_attention_heads`. Imports, exports and
        conversions take those that are not given from the model's `config.json`.
    Raises RewriteError for an unknown name.
    """
    return Rewrite(shipped_text(name), parameters=parameters)


def find_rewrite(where: str, *, parameters: Mapping[str, int | str] = MappingProxyType({})) -> Rewrite:
    """The rewrite in the file `where`, or the one of this name that comes with the library.

    Raises RewriteError where there is neither, and for a file that is no rewrite.
    """
    if not isinstance(where, str | os.PathLike) or os.path.exists(where):
        return Rewrite.file(where, parameters=parameters)
    name = os.fspath(where)
    try:
        text = shipped_text(name)
    except RewriteError as error:
        raise RewriteError(f"there is no file {name}, and {error}") from None
    return Rewrite(text, parameters=parameters)


def _folder() -> Traversable:
    return files("shardwise") / "rewrites"
