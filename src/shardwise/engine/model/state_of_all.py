"""The state of all ranks under the names of the plain model, for what moves between them without a file.

a rank's state                 under the names of the model                  here
w, optimizer/w/master          w: the master, where it is held apart         a move casts
optimizer/w/exp_avg            the same
buffers                        also those that checkpoints leave out
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.model.state import EngineRestoration, HandOver
from shardwise.engine.zero.flat_params import whole
from shardwise.moving import Gathering
from shardwise.moving.piece_exchange import pack_pieces, tables_of, tensors_in
from shardwise.plan.names import MASTER, split_state_name
from shardwise.plan.saved_settings import merge_apart, settings_apart
from shardwise.space import Piece

Pieces = dict[Piece, torch.Tensor]


def sources_of(handed: HandOver) -> Pieces:
    """This rank's state, each value once: a master held apart stands for its parameter, under the parameter's name."""
    # Another plan may hold masters apart where this one does not, or the other way round. Under one name the two
    # meet, and the move casts.
    masters = {split[0] for piece in handed.state if (split := split_state_name(piece.name)) and split[1] == MASTER}
    given = {_of_parameter(piece): tensor for piece, tensor in handed.state.items() if piece.name not in masters}
    return given | _buffers(handed.rank.model)


def targets_of(restoration: EngineRestoration, model: nn.Module) -> Mapping[Piece, torch.Tensor | None]:
    """What takes them over, with buffers."""
    wanted = {_of_parameter(piece): tensor for piece, tensor in restoration.wanted.items()}
    return _buffers(model) | wanted


def _of_parameter(piece: Piece) -> Piece:
    split = split_state_name(piece.name)
    return piece if split is None or split[1] != MASTER else replace(piece, name=split[0])


def _buffers(model: nn.Module) -> Pieces:
    """All buffers that are here, also those that checkpoints leave out."""
    pieces: Pieces = {}
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            pieces |= whole(name, buffer.detach())
    return pieces


def stored_of_all(channel: Channel, pieces: Pieces, gathering: Gathering) -> dict[str, Piece]:
    """Every tensor that ranks hold together in these pieces, as one piece, as a checkpoint would hold it.

    gathering: knows afterwards what each rank holds, for the move.
    """
    (texts,) = gathering.gather(channel, [pack_pieces(list(pieces))])
    return tensors_in(texts)


def settings_texts(settings: Mapping[str, Any]) -> list[bytes]:
    """The settings of a rank, as they travel."""
    return [json.dumps(each).encode() for each in settings_apart(settings)]


def merged_settings(texts: Sequence[Sequence[bytes]], *, purpose: str) -> dict[str, Any]:
    """What `merge_apart` makes of the settings of all ranks, from what each has given of `settings_texts`."""
    return merge_apart([tables_of(each, purpose=purpose) for each in texts])
