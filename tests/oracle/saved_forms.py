"""The forms in which the state of an engine goes to another one: files of every kind, and memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver
from tests.checkpoint.layouts import odd

Give = Callable[[sw.Engine, Path, sw.Channel], object]
Take = Callable[[Path, Any, sw.Channel], object]

REWRITE = sw.Rewrite("""
    up.weight, gates.weight -> wide.weight, axis=0
    up.bias, gates.bias -> wide.bias, axis=0
    down.weight^T -> narrow
    embedding.weight -> words, pad='[16,-1]', fill='0.25'
    """)
"""Joins, a transposition, padding and a tied name, for the model of `tests.checkpoint.layouts`."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How it is written by all ranks, what one process makes of that, and how all ranks read it."""

    give: Give
    take: Take = lambda path, state, channel: sw.load(path, state, channel=channel)
    convert: str = ""
    """To another format, by one process."""
    weights_only: bool = False
    """Then it has what a layout computes with, in bfloat16, and not the masters."""
    is_foreign: bool = False
    """Whether it says nothing of random numbers: an engine that has drawn some goes on from its own."""

    def finished(self, path: Path) -> Path:
        """Where it lies in the end."""
        if not self.convert:
            return path
        made = path.with_name(f"{path.name} made")
        checkpoint.convert(path, made, to=self.convert)  # type: ignore[arg-type]
        return made


def _save(engine: sw.Engine, path: Path, channel: sw.Channel, **options: Any) -> None:
    sw.save(path, engine, extra={"at": 2}, channel=channel, **options)


def _in_background(engine: sw.Engine, path: Path, channel: sw.Channel) -> None:
    with AsyncSaver(path, layout="whole", channel=channel) as saver:
        saver.save(engine, extra={"at": 2})


def _full(engine: sw.Engine, path: Path, channel: sw.Channel) -> None:
    tensors = {name: each.clone() for name, each in sw.full(engine, channel=channel, to=0)}
    if channel.rank == 0:
        assert list(tensors) == list(odd().state_dict()), "names come in the order of the model"
        path.mkdir()
        safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _torch_file(engine: sw.Engine, path: Path, channel: sw.Channel) -> None:
    state = sw.full_state_dict(engine, optimizer=True)
    if channel.rank == 0:
        path.mkdir()
        torch.save({"model": state[0], "optimizer": state[1]}, path / "last.pt")


def _cast(path: Path, state: Any, channel: sw.Channel) -> None:
    sw.load(path, state, cast=True, channel=channel)


FORMS = {
    "hf": Form(give=_save, take=_cast, convert="hf", weights_only=True),
    "full": Form(give=_full, take=_cast, weights_only=True),
    "pieces": Form(give=_save),
    "whole": Form(give=partial(_save, layout="whole")),
    "in the background": Form(give=_in_background),
    "rewritten": Form(
        give=partial(_save, rewrite=REWRITE),
        take=lambda path, state, channel: sw.load(path, state, rewrite=REWRITE.inverse(), channel=channel),
    ),
    "converted": Form(give=partial(_save, layout="whole"), convert="pieces"),
    "torch's file": Form(
        give=_torch_file,
        take=lambda path, state, channel: sw.load(path / "last.pt", state, channel=channel),
        is_foreign=True,
    ),
    "dcp": Form(give=_save, convert="dcp", is_foreign=True),
    "torchtitan": Form(give=_save, convert="torchtitan", is_foreign=True),
    "deepspeed-universal": Form(give=_save, convert="deepspeed-universal", is_foreign=True),
}
"""Those of weights alone come first: an engine takes them only before its first update."""
