"""Folders of Megatron: read in both of its formats, written as `torch_dist`."""

from shardwise.checkpoint.formats.format import Format
from shardwise.checkpoint.formats.megatron.reading import check_common, is_megatron, read_contents
from shardwise.checkpoint.formats.megatron.writing import plan_folder

FORMAT = Format(
    name="megatron",
    recognises=is_megatron,
    read=read_contents,
    completes=check_common,
    targets={"megatron": plan_folder},
)
