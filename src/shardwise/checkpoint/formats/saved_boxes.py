"""Saved boxes: what `torch.distributed.checkpoint` says in the metadata of safetensors files of the boxes in them."""

import json
from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.contents import MAX_INDEX
from shardwise.errors import CheckpointError

SHARDING_INFO = "DCP_SHARDING_INFO"


def boxes_in(metadata: Mapping[str, str]) -> Mapping[str, Any] | None:
    """What `torch.distributed.checkpoint` says in a file of the boxes in it, by name; None where it says nothing.

    Raises `CheckpointError` when it is not understood.
    """
    if SHARDING_INFO not in metadata:
        return None
    try:
        boxes = json.loads(metadata[SHARDING_INFO])
    except (ValueError, RecursionError):
        boxes = None
    if not isinstance(boxes, dict):
        raise CheckpointError(f"{SHARDING_INFO} in its metadata is no JSON object")
    return boxes


def saved_offsets(name: str, boxes: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Where the box of a tensor starts by `boxes_in`; None when the file says nothing of boxes.

    Raises `CheckpointError` when it says something else than offsets.
    """
    if boxes is None:
        return None
    box = boxes.get(name)
    offsets = box.get("saved_offsets") if isinstance(box, dict) else None
    if not isinstance(offsets, list) or not all(type(each) is int and 0 <= each <= MAX_INDEX for each in offsets):
        raise CheckpointError(f"{SHARDING_INFO} in its metadata has no start for the box of {name}")
    return tuple(offsets)
