"""Folders of `torch.distributed.checkpoint`, read and written, with the training state of torch and of torchtitan."""

from functools import partial

from shardwise.checkpoint.formats.dcp.reading import parts_of, read_contents
from shardwise.checkpoint.formats.dcp.writing import TITAN_NAMES, TORCH_NAMES, plan_folder
from shardwise.checkpoint.formats.format import Format

FORMAT = Format(
    name="dcp",
    recognises=lambda names: bool(parts_of(names)),
    read=read_contents,
    targets={"dcp": partial(plan_folder, names=TORCH_NAMES), "torchtitan": partial(plan_folder, names=TITAN_NAMES)},
)
