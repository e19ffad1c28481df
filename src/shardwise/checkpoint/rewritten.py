"""Rewritten: pieces on one side of a rewrite, as pieces of the other side and views of the memory that holds them.

A save asks where the elements go that a rank holds. A load and a conversion ask where the wanted elements are stored.
Writers, readers and senders then work with plain pieces and tensors, and know of no rewrite.

Figure 1. A rank wants rows 1 and 2 of `qkv` (3, 4), which the rewrite makes of `q`, `k` and `v` (1, 4) each. It asks
for pieces of `k` and `v`, and the tensors that take them are views of the one that it wants filled::

    wanted                 asked for             filled through
    qkv[1:3, 0:4]    ->    k[0:1, 0:4]           tensor[0:1]
                           v[0:1, 0:4]           tensor[1:2]

The other way round, what a rank holds of `k` is a piece of `qkv`. A view may be transposed, or step over elements.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch

from shardwise.checkpoint.contents import Contents, Effects, Place, StoredTensor, model_name_of_master
from shardwise.checkpoint.renamed_settings import names_state, recorded_metas, renamed_settings, with_degrees
from shardwise.checkpoint.state_pieces import Held
from shardwise.checkpoint.windows import padding_value
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import PlanError, RewriteError, few_of
from shardwise.plan import Plan
from shardwise.plan.names import is_state_name, split_state_name, state_name
from shardwise.rewrite import Checked, Fragment, Rewrite, TensorMeta
from shardwise.rewrite.metas import KEPT_FILL, needed_casts
from shardwise.rewrite.strided_views import fill_of, scales_of
from shardwise.space import Box, Piece, Run
from shardwise.space.boxes import row_major_strides
from shardwise.space.pieces import blocks_of, known_piece

# What a rewrite has to know of tensors


def metas_of_contents(contents: Contents) -> dict[str, TensorMeta]:
    """What a rewrite has to know of the tensors of a checkpoint."""
    num_ranks = ranks_along_tp(contents.settings)
    pieces_of = {name: [stored.piece for stored in each.pieces] for name, each in contents.tensors.items()}
    # Ranks along tp always cut something: where nothing is cut, tensors were put together when they were saved.
    is_joined = num_ranks is not None and num_ranks > 1 and all(len(_boxes(each)) <= 1 for each in pieces_of.values())
    metas = {
        name: TensorMeta(
            each.shape,
            each.dtype,
            (0,) * len(each.shape) if is_joined else _degrees(each.shape, pieces_of[name], num_ranks),
        )
        for name, each in contents.tensors.items()
    }
    return with_degrees(metas, contents.settings)


def metas_of_pieces(pieces: Iterable[Piece], *, num_ranks: int | None) -> dict[str, TensorMeta]:
    """What a rewrite has to know of tensors, given all pieces of them, in the order in which they come.

    num_ranks: see `ranks_along_tp`.
    """
    tensors: dict[str, list[Piece]] = {}
    for piece in pieces:
        tensors.setdefault(piece.name, []).append(piece)
    return {
        name: TensorMeta(held[0].global_shape, held[0].dtype, _degrees(held[0].global_shape, held, num_ranks))
        for name, held in tensors.items()
    }


def ranks_along_tp(settings: Mapping[str, Any]) -> int | None:
    """Over how many ranks the engine that holds or has saved a state cuts tensors into boxes.

    None where no engine did, or where a rewrite has made other tensors: their boxes may come from anything. Data
    parallelism cuts the tensors of an engine into runs, never into boxes.
    """
    if not isinstance(text := settings.get("plan"), str) or "rewrite" in settings:
        return None
    try:
        return Plan.parse(text).mesh.tp
    except PlanError:  # of a version that knows other settings
        return None


def _boxes(pieces: Iterable[Piece]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(piece.offset, piece.shape) for piece in pieces if 0 not in piece.shape}


def _degrees(shape: tuple[int, ...], pieces: Iterable[Piece], num_ranks: int | None) -> tuple[int, ...]:
    """For how many ranks along `tp` each dim is laid out; 0 where that is not known.

    A rank that has one box of an even cut has what is fused for it. A rank with several has a part of each of several
    stretches, which follow one another in the whole tensor as they do without tensor parallelism: degree 1.
    """
    boxes = _boxes(pieces)
    if len(boxes) <= 1:
        return ()
    degrees = []
    for dim, whole in enumerate(shape):
        parts = {(offset[dim], size[dim]) for offset, size in boxes}
        sizes = {size for _, size in parts}
        is_even = len(sizes) == 1 and sizes.pop() * len(parts) == whole
        if len(parts) == 1 or (num_ranks is not None and len(parts) > num_ranks):
            degrees.append(1)
        else:
            degrees.append(len(parts) if len(parts) == num_ranks and is_even else 0)
    return tuple(degrees)


# Pieces of one side, as pieces of the other


def kept_in(checked: Checked) -> list[str]:
    """The outputs of which a target keeps some elements."""
    return [name for name in checked.outputs if any(fill_of(each.other) == KEPT_FILL for each in checked.padding(name))]


_InOrder = dict[tuple[str, tuple[int, ...], tuple[int, ...]], Sequence[Fragment] | None]
"""Fragments of boxes whose runs stay runs, by name, offset and shape; None for other boxes. Ranks have runs of one."""


def _places(
    piece: Piece,
    name: str,
    ask: Callable[[str, Box], Sequence[Fragment]],
    others: Mapping[str, TensorMeta],
    in_order: _InOrder,
) -> list[Place]:
    """The pieces of the other side that have the elements of `piece`; what has no elements has none.

    name: what the tensor of the piece is called on this side of the rewrite. ask: `Checked.resolve` or `Checked.push`.
    others: the tensors of the other side. in_order: what was found before, to which this adds.
    """

    def of(fragment: Fragment, run: Run | None = None) -> Piece:
        # Padding is as if it were a box of a tensor of its own.
        is_padding = fill_of(fragment.other) is not None
        meta = TensorMeta(fragment.shape, fragment.dtypes[0]) if is_padding else others[fragment.other]
        return known_piece(fragment.other, meta.dtype, meta.shape, fragment.offset, fragment.shape, run)

    if not piece.num_elements:
        return []
    if piece.run is not None:
        # A run that is the same run on the other side stays one. Others are taken apart into boxes, which every
        # rewrite maps to boxes: the rows of one side may be the columns of the other.
        key = name, piece.offset, piece.shape
        if key not in in_order:
            fragments = ask(name, piece.box)
            # Scales are those of boxes.
            has_scales = any(scales_of(each.dtypes) for each in fragments)
            keeps = not has_scales and all(_keeps_order(each, piece.box) for each in fragments)
            in_order[key] = fragments if keeps else None
        if (kept := in_order[key]) is not None:
            return [Place(of(each, piece.run), each.dtypes) for each in kept]
    return [
        Place(of(each), each.dtypes, each, offset, None if piece.run is None else (start, shape))
        for start, shape, offset in blocks_of(piece)
        for each in ask(name, Box(offset, shape))
    ]


def _keeps_order(fragment: Fragment, box: Box) -> bool:
    """Whether the other side has all elements of a box in one box, in the same order.

    A run of the one is the same run of the other then.
    """
    strides = zip(
        fragment.shape,
        fragment.view_strides(row_major_strides(box.shape)),
        row_major_strides(fragment.shape),
        strict=True,
    )
    return fragment.num_elements == box.num_elements and all(size == 1 or one == other for size, one, other in strides)


# States


def checked_for_state(
    rewrite: Rewrite, sources: Mapping[str, TensorMeta], aliases: Mapping[str, str], layout: Mapping[str, Any]
) -> Checked:
    """Apply a rewrite to what ranks hold. layout: `layout_of` the settings of all ranks.

    Raises RewriteError where it does not fit, and where it makes what no rank holds.
    """
    # A live state that was loaded through a rewrite knows what that was applied to, as its save will.
    recorded = recorded_metas(layout, rewrite)
    checked = rewrite.apply(with_degrees(sources, layout), recorded=recorded, aliases=aliases)
    if checked.quantises or checked.scales:
        raise RewriteError(f"the rewrite quantises or dequantises, and ranks hold parts of blocks. {_NOT_HERE}")
    if checked.added:
        raise RewriteError(
            f"{', '.join(sorted(checked.added))}: the rewrite adds a tensor that keeps its current value (`_ -> "
            "b`), and nothing here has one. Use it for loads into a state"
        )
    if kept := kept_in(checked):
        raise RewriteError(
            f"fill='{KEPT_FILL}' keeps what the target of a load has in {few_of(kept)}, and here is no load; give a "
            "number"
        )
    return checked


_NOT_HERE = "Save or load without it, and convert (shardwise ckpt convert) with it"


def places_in_outputs(checked: Checked, lists: Iterable[Sequence[Piece]]) -> list[list[tuple[Piece, list[Place]]]]:
    """For each piece of a source the pieces of outputs that have its elements; none where they are dropped."""
    # Ranks that hold runs of one box ask the same.
    ask, outputs, in_order = cache(checked.push), checked.outputs, _InOrder()
    return [[(piece, _places(piece, piece.name, ask, outputs, in_order)) for piece in pieces] for pieces in lists]


def beside_pieces(checked: Checked) -> dict[Piece, torch.Tensor]:
    """What every rank holds of outputs: padding, in the memory of one value, and tensors without elements."""
    found: dict[Piece, torch.Tensor] = {}
    wholes = [Piece(name=name, dtype=each.dtype, global_shape=each.shape) for name, each in checked.outputs.items()]
    for whole in wholes:
        for each in checked.padding(whole.name):
            value = padding_value(fill_of(each.other) or "", needed_casts(each.dtypes))
            found[replace(whole, offset=each.first, shape=each.shape)] = value.expand(each.shape)
    empty = [each for each in wholes if 0 in each.shape]
    return found | {each: torch.empty(each.shape, dtype=torch_dtype(each.dtype)) for each in empty}


def rewritten_held(checked: Checked, places: Iterable[tuple[Piece, Iterable[Place]]], held: Held) -> Held:
    """What a rank holds, under the names of a rewrite. places: of its pieces, see `places_in_outputs`."""
    tensors: dict[Piece, torch.Tensor] = {}
    casts: dict[Piece, tuple[str, ...]] = {}
    for piece, found in places:
        for each in found:
            # A view of the state's own memory: nothing is copied before it is written or sent.
            tensors[each.piece] = each.view(held.tensors[piece])
            if len(dtypes := needed_casts(each.dtypes)) > 1:
                casts[each.piece] = dtypes[1:]
    return Held(tensors={**tensors, **beside_pieces(checked)}, aliases=dict(checked.ties), casts=casts)


# Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenContents(Contents):
    """A checkpoint as it would be if it had been saved under the names of a rewrite. Only metadata has been read.

    Its tensors have no pieces in any file: `places` tells where their elements are.
    """

    of: Contents
    """The checkpoint to which the rewrite is applied."""
    checked: Checked
    unfit: tuple[str, ...]
    """What of the stored settings cannot be carried over."""
    _in_order: _InOrder = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def stored(self) -> Contents:
        """The checkpoint whose files have the elements."""
        return self.of

    @property
    def effects(self) -> Effects:
        """What the rewrite did besides giving tensors names."""
        checked = self.checked
        dropped = frozenset(checked.dropped)
        return Effects(
            checked=checked,
            dropped=dropped,
            added=checked.added,
            joined=checked.agree,
            unfit=self.unfit,
            notes=checked.notes,
        )

    def places(self, piece: Piece, name: str) -> Sequence[Place]:
        """See `Contents`."""
        return _places(piece, name, self.checked.resolve, self.checked.sources, self._in_order)


def rewritten_contents(
    stored: Contents,
    rewrite: Rewrite,
    *,
    sources: Mapping[str, TensorMeta] | None = None,
    wanted: Mapping[str, TensorMeta] | None = None,
    recorded: Mapping[str, TensorMeta] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RewrittenContents:
    """Apply a rewrite to a checkpoint.

    sources: the tensors to which it is applied; the default is all. wanted, recorded: as for `Rewrite.apply`;
    `recorded` adds to what the checkpoint itself has a record of. settings: instead of those of the checkpoint.
    Raises RewriteError with every finding, and CheckpointError for settings that are not understood.
    """
    checked = rewrite.apply(
        metas_of_contents(stored) if sources is None else sources,
        wanted=wanted,
        recorded={**recorded_metas(stored.settings, rewrite), **(recorded or {})},
        aliases=stored.aliases,
    )
    renamed, findings = renamed_settings(stored.settings if settings is None else settings, checked)
    tensors = {
        name: StoredTensor(name=name, dtype=meta.dtype, shape=meta.shape, pieces=())
        for name, meta in checked.outputs.items()
    }
    kept = {each.name: getattr(stored, each.name) for each in fields(Contents)}
    made = {"tensors": tensors, "aliases": checked.ties, "settings": renamed}
    return RewrittenContents(**{**kept, **made}, of=stored, checked=checked, unfit=tuple(findings))


def rewritten_for_load(
    contents: Contents, rewrite: Rewrite, live: Mapping[str, TensorMeta], *, takes_state: bool
) -> RewrittenContents:
    """What `contents` are under the names of a rewrite, for a load into a state.

    live: the tensors of the target on all ranks, those that are tied under every name. takes_state: whether it takes
    over the state of optimizers. Raises RewriteError, with every finding, where the rewrite does not fit.
    """
    sources = metas_of_contents(contents)
    says_state = names_state(rewrite)
    # Stored optimizer state is nothing to a target without optimizers, and must not refuse its load. Masters stay: a
    # parameter and its master stand for each other.
    if not (takes_state or says_state or any(map(is_state_name, live))):
        sources = {
            name: meta
            for name, meta in sources.items()
            if not is_state_name(name) or model_name_of_master(name) is not None
        }
    known = {name: meta for name, meta in live.items() if says_state or not is_state_name(name)}
    # All that the target may want: the state of its optimizers is made when it is loaded, if it is not there.
    keys = {split[1]: None for split in map(split_state_name, sources) if split is not None}
    state = {state_name(name, key): meta for name, meta in live.items() if not is_state_name(name) for key in keys}
    made = rewritten_contents(contents, rewrite, sources=sources, wanted={**state, **live}, recorded=known)
    if made.checked.quantises:
        raise RewriteError(f"the rewrite quantises, and ranks want parts of blocks. {_NOT_HERE}")
    return made
