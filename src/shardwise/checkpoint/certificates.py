"""Certificates: what was converted comes back, tensor by tensor, to the bit, or why it does not.

    source     --- rewrite ---> destination               (what `convert` has written, read again from the disk)
       |                            |  inverse of the rewrite
    sha256 of w     == ?        sha256 of what comes back as w

That proves that a conversion can be undone. It does not know the origin of a save. If the original is given, the
written tensors are compared with it too.

A difference is fine where the rewrite drops or rounds: the tensor is lossy, with the reason. Any other difference is a
fault of ours, an error, and leaves no save.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from shardwise.checkpoint.comparison import compared
from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.elements import Elements, with_one_nan
from shardwise.checkpoint.outputs import Outputs, outputs_of, way_back_of
from shardwise.checkpoint.passing_digests import PassingDigests
from shardwise.checkpoint.reading import DataFiles
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError
from shardwise.rewrite import Checked
from shardwise.rewrite.metas import holds_nans, keeps_values
from shardwise.rewrite.strided_views import scales_of
from shardwise.rewrite.verbs.quantise import Rescaling

_FORMAT = "shardwise round trip 1"

_LOSSES = ("why", "max_error", "max_relative_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedTensor:
    """A tensor of the source, and what came back of it."""

    name: str
    """Its name in the source."""
    shape: tuple[int, ...]
    """Its shape in the source."""
    dtype: str
    """Its dtype in the source, by torch's name for it."""
    sha256: str
    """Of its elements in the source: row-major, little-endian."""
    returned_sha256: str | None
    """Of what the inverse of the rewrite makes of the destination; None where nothing comes back."""
    verdict: Literal["equal", "lossy"]
    """equal: every bit came back; lossy: the rewrite drops or rounds it."""
    why: str = ""
    """What was lost, where it is lossy."""
    max_error: float | None = None
    """Of what was quantised: the largest difference between an element and what came back of it."""
    max_relative_error: float | None = None
    """The same divided by the magnitude of the element; elements of 0 are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """A tensor that was written, and the tensor of the same name in the original."""

    name: str
    sha256: str | None
    """Of its elements as they were written; None where no tensor of this name was."""
    original_sha256: str | None
    """None where the original has no such tensor."""
    verdict: Literal["equal", "differs", "not written", "not in the original"]
    """Equal are dtype, shape and every bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What came back of a conversion: the proof that it can be undone. With an original, also how it compares."""

    source: str
    """Path or address of what was converted."""
    destination: str
    """Path or address of what was written."""
    rewrite: str
    """Its statements; empty where there was none."""
    tensors: tuple[CertifiedTensor, ...]
    """All tensors of the source."""
    is_of_save: bool = False
    """Whether the source is a save: then what comes back is what it held, whatever that was made of."""
    original: str = ""
    """What was compared with what was written; empty where nothing was given."""
    compared: tuple[ComparedTensor, ...] = ()
    """The tensors that were written, each with its original; empty where none was given."""

    @property
    def differing(self) -> tuple[ComparedTensor, ...]:
        """What was written and is not in the original as it is, or the other way round."""
        return tuple(each for each in self.compared if each.verdict != "equal")

    @property
    def lossy(self) -> tuple[CertifiedTensor, ...]:
        """The tensors that do not come back as they were."""
        return tuple(each for each in self.tensors if each.verdict != "equal")

    def __str__(self) -> str:
        lossy = self.lossy
        equal = len(self.tensors) - len(lossy)
        if lossy:
            text = f"{equal} of {len(self.tensors)} tensors come back to the bit; lossy: " + _listed(
                [f"{each.name} ({each.why})" for each in lossy]
            )
        else:
            text = "the tensor comes back to the bit" if equal == 1 else f"all {equal} tensors come back to the bit"
        return f"round trip: {text}{self._comparison}"

    @property
    def _comparison(self) -> str:
        """What is known of an original, to be appended."""
        if not self.original:
            return "; compared with no original" if self.is_of_save else ""
        differing = self.differing
        if not differing:
            return f"; all {len(self.compared)} are as in {self.original}"
        listed = _listed([f"{each.name} ({each.verdict})" for each in differing])
        return (
            f"; {len(self.compared) - len(differing)} of {len(self.compared)} are as in {self.original}; not: {listed}"
        )

    @property
    def proves(self) -> str:
        """What this proves, in a sentence."""
        back = "the written files give back every tensor of the source, and to the bit those with the verdict equal"
        if self.original:
            return f"{back}; a written tensor is as in the original if its verdict in the comparison is equal"
        return f"{back}; the origin of the source is not known here" if self.is_of_save else back

    def pack(self) -> bytes:
        """As JSON, a line for each tensor."""
        head: dict[str, Any] = {
            "format": _FORMAT,
            "source": self.source,
            "destination": self.destination,
            "rewrite": self.rewrite.splitlines(),
            "proves": self.proves,
        }
        rows = [
            # A row has a loss only where its tensor lost something, and errors only where they were measured.
            {key: value for key, value in asdict(each).items() if key not in _LOSSES or value not in ("", None)}
            for each in self.tensors
        ]
        tables = {"tensors": rows}
        if self.original:
            head["original"] = self.original
            tables["compared"] = [asdict(each) for each in self.compared]
        # Behind the fields of the head, whose closing brace is cut
        # off: a line for each tensor, to be compared by line.
        lines = {key: ",\n".join(f"  {json.dumps(row)}" for row in each) for key, each in tables.items()}
        parts = ",\n".join(f' "{key}": [\n{each}\n ]' for key, each in lines.items())
        return f"{json.dumps(head, indent=1)[:-2]},\n{parts}\n}}\n".encode()


def _listed(texts: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    return "; ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def certify_return(
    source: Store,
    made: Contents,
    store: Store,
    written: Contents,
    *,
    location: str,
    known: Mapping[str, str],
    original: tuple[Store, Contents] | None = None,
) -> Certificate:
    """Read both sides, and compare the digests of their tensors.

    made: what was written of what `source` holds. written: what `store` holds of it now, and `location` what to call
        that.
    known: digests of the source that were taken when it was read to be converted. original: what the source was once
    made of, which is compared with what was written.
    Raises CheckpointError, naming them, for tensors that do not come back though the rewrite loses nothing of them.
    """
    trip = _RoundTrip(
        checked=made.effects.checked,
        source=source,
        sent=outputs_of(made.stored),
        store=store,
        back=outputs_of(way_back_of(made, written)),
    )
    # Out of the store, and not from memory: what was written is what a certificate is about.
    passing = PassingDigests(written.tensors)
    digests, returned = trip.digests(known, passing)
    # Bytes may be equal where the kind is not: [2, 3] and [3, 2], or int32 and float32.
    differing = [name for name, digest in digests.items() if returned.get(name) != digest or trip.changes_kind(name)]
    whys = trip.losses(differing)
    problems = [
        f"{name} ({trip.sent.tensors[name].dtype} {list(trip.sent.tensors[name].shape)}) does not come back out of "
        f"{location} as it was in {made.location}: sha256 {returned.get(name, 'of nothing')} instead of "
        f"{digests[name]}"
        for name in differing
        if name not in whys
    ]
    if problems:
        raise CheckpointError(
            *problems, about="the conversion is not to be trusted; please report this fault of shardwise"
        )
    return Certificate(
        source=made.location,
        destination=location,
        rewrite="" if trip.checked is None else str(trip.checked.rewrite),
        tensors=tuple(trip.rows(digests, returned, whys, trip.errors(whys))),
        is_of_save=made.format == "shardwise",
        original="" if original is None else original[1].location,
        compared=() if original is None else _compared(store, written, *original, passing.found),
    )


def _compared(
    store: Store, written: Contents, source: Store, original: Contents, known: Mapping[str, str]
) -> tuple[ComparedTensor, ...]:
    """Each tensor that was written, compared with the tensor of its name in the original; `known`: see `_digests`."""
    made = _digests(store, outputs_of(written), known)
    there = _digests(source, outputs_of(original), {})

    def verdict(name: str) -> Literal["equal", "differs", "not written", "not in the original"]:
        if name not in made:
            return "not written"
        if name not in there:
            return "not in the original"
        # sha256 is of bare elements; an equal digest of another shape is another tensor.
        same = made[name] == there[name] and _kind(written.tensors[name]) == _kind(original.tensors[name])
        return "equal" if same else "differs"

    return tuple(
        ComparedTensor(name=name, sha256=made.get(name), original_sha256=there.get(name), verdict=verdict(name))
        for name in dict.fromkeys([*there, *made])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundTrip:
    """Both sides of a certificate."""

    checked: Checked | None
    source: Store
    sent: Outputs
    store: Store
    back: Outputs

    def digests(self, known: Mapping[str, str], passing: PassingDigests) -> tuple[dict[str, str], dict[str, str]]:
        """sha256 of the elements of every tensor, and of what came back of it where something did.

        known: those that need not be read. passing: sees what is read of the destination.
        """
        # The two sides are different files, and sha256 lets go of the interpreter: two cores take half the time.
        with ThreadPoolExecutor(1, thread_name_prefix="shardwise-digest") as thread:
            awaited = thread.submit(_digests, self.source, self.sent, known)
            found = _digests(self.store, self.back, {}, passing)
            there = awaited.result()
        return there, {name: found[self._found(name)] for name in there if self._found(name) in found}

    def rows(
        self,
        digests: Mapping[str, str],
        returned: Mapping[str, str],
        whys: Mapping[str, str],
        errors: Mapping[str, tuple[float, float]],
    ) -> Iterator[CertifiedTensor]:
        """What is said of each tensor; `whys` are losses, `errors` those that were measured."""
        for name, digest in digests.items():
            error, relative = errors.get(name, (None, None))
            measured = "" if error is None else f"; off by at most {error:.3g}, relative to the element {relative:.3g}"
            yield CertifiedTensor(
                name=name,
                shape=self.sent.tensors[name].shape,
                dtype=self.sent.tensors[name].dtype,
                sha256=digest,
                returned_sha256=returned.get(name),
                verdict="lossy" if name in whys else "equal",
                why=whys.get(name, "") + measured,
                max_error=error,
                max_relative_error=relative,
            )

    def errors(self, names: Iterable[str]) -> dict[str, tuple[float, float]]:
        """For tensors that were quantised the largest error, and the largest in relation to the element."""
        checked = self.checked
        if checked is None or not checked.quantises:
            return {}
        found = [name for name in names if _quantised_to(checked, self.sent.tensors[name])]
        different = self._compared(found)
        return {
            name: (different[name].max_difference, different[name].max_relative) if name in different else (0.0, 0.0)
            for name in found
        }

    def _compared(
        self, names: Iterable[str], changed: Callable[[torch.Tensor], torch.Tensor] = lambda elements: elements
    ) -> dict[str, Elements]:
        """How some tensors, or what `changed` makes of their elements, differ from what came back of them."""
        wholes = {name: self.sent.tensors[name].whole for name in names}
        files = DataFiles(self.source)
        sent, back = self.sent.reader(files), self.back.reader(DataFiles(self.store, turns_with=files))
        return compared(
            {name: (whole, replace(whole, name=self._found(name))) for name, whole in wholes.items()},
            lambda pieces: list(map(changed, sent(pieces))),
            lambda pieces: list(map(changed, back(pieces))),
        )

    def changes_kind(self, name: str) -> bool:
        """Whether a tensor comes back in another dtype or shape."""
        return _kind(self.sent.tensors[name]) != _kind(self.back.tensors[self._found(name)])

    def losses(self, names: Collection[str]) -> dict[str, str]:
        """Why the rewrite loses something of these tensors, which do not come back as they were; by name.

        A tensor that should lose nothing has no entry. Reads those again whose NaNs may be the only difference.
        """
        if self.checked is None:
            return {}
        whys, casts = {}, {}
        for name in names:
            tensor, returns = self.sent.tensors[name], self._found(name) in self.back.tensors
            if why := _loss(self.checked, tensor, returns=returns):
                whys[name] = why
            # Casts to a wider dtype and back keep every value. But the hardware may change the payload of NaNs, which
            # are equal as values and not as bytes: these are read once more.
            elif returns and not self.changes_kind(name) and (cast := _cast_of_nans(self.checked, tensor)):
                casts[name] = f"the payload of NaNs (cast from {cast[0]} to {cast[1]})"
        if casts:
            different = self._compared(casts, lambda elements: torch.cat([*with_one_nan(elements)]))
            # Only if all else is equal: a lost payload excuses no other difference.
            whys |= {name: why for name, why in casts.items() if name not in different}
        return whys

    def _found(self, name: str) -> str:
        """Under which name a tensor comes back."""
        # Of tied tensors one is stored, maybe under another of the names that the source has.
        return self.back.aliases.get(name, name)


def _loss(checked: Checked, tensor: StoredTensor, *, returns: bool) -> str:
    """What a rewrite loses of a source; empty where it loses nothing. `returns`: whether its inverse makes it again."""
    if tensor.name in checked.dropped:
        return "dropped"
    # Where each part of the source goes, and through which dtypes: losses follow from the rewrite alone.
    fragments = checked.push(tensor.name, tensor.whole.box)
    lost = []
    if not returns and checked.losses:
        is_part = sum(each.num_elements for each in fragments) < tensor.whole.num_elements
        # A tensor that is joined with a dropped one does not come back, though nothing of itself was dropped.
        lost.append("a part is dropped" if is_part else "a part of the tensor that it is joined with is dropped")
    elif returns and tensor.name in checked.cropped:
        total = tensor.whole.num_elements
        lacking = total - sum(each.num_elements for each in fragments)
        lost.append(
            f"{lacking:,} of {total:,} elements are cropped" if lacking > 0 else "cropped in the copy that counts"
        )
    if any(scales_of(each.dtypes) for each in fragments) or tensor.name in checked.scales:
        lost.append("dequantised: what is quantised anew may have other scales")
    if step := _quantised_to(checked, tensor):
        lost.append(f"quantised to {step.element_dtype} by blocks of {list(step.block)}")
    casts = (pair for each in fragments if not scales_of(each.dtypes) for pair in pairwise(each.dtypes))
    # The first cast that rounds is the loss; a wider dtype behind it brings nothing back.
    if narrow := next((pair for pair in casts if not keeps_values(*pair)), None):
        lost.append(f"cast from {narrow[0]} to {narrow[1]}")
    return ", ".join(lost)


def _quantised_to(checked: Checked, tensor: StoredTensor) -> Rescaling | None:
    """How a source, or a part of it, is quantised; None where it is not."""
    fragments = checked.push(tensor.name, tensor.whole.box)
    return next(filter(None, [checked.quantised(each.other) for each in fragments]), None)


def _kind(tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _cast_of_nans(checked: Checked, tensor: StoredTensor) -> tuple[str, str] | None:
    """The first cast of a tensor by which its NaNs, if it can have any, lose what else they say."""
    fragments = checked.push(tensor.name, tensor.whole.box) if holds_nans(tensor.dtype) else ()
    plain = [each.dtypes for each in fragments if not scales_of(each.dtypes)]
    return next((pair for dtypes in plain for pair in pairwise(dtypes) if pair[0] != pair[1]), None)


def _digests(
    store: Store, outputs: Outputs, known: Mapping[str, str], passing: PassingDigests | None = None
) -> dict[str, str]:
    """sha256 of the elements of every output. Some are known: only the others are read. passing: sees what is read."""
    unknown = {name: each for name, each in outputs.tensors.items() if name not in known}
    found = PassingDigests(unknown)
    read = outputs.reader(DataFiles(store, digests=passing))
    for window in outputs.windows([each.whole for each in unknown.values()]):
        for piece, elements in zip(window, read(window), strict=True):
            found.see(piece, elements)
    sums = {**known, **found.found}
    return {name: sums[name] for name in outputs.tensors}
