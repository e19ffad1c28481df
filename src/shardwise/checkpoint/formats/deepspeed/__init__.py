"""Folders of DeepSpeed: read of all stages of ZeRO, written as universal checkpoints."""

from shardwise.checkpoint.formats.deepspeed.reading import is_deepspeed, read_contents
from shardwise.checkpoint.formats.deepspeed.universal import plan_folder
from shardwise.checkpoint.formats.format import Format

FORMAT = Format(
    name="deepspeed", recognises=is_deepspeed, read=read_contents, targets={"deepspeed-universal": plan_folder}
)
