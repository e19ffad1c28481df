"""A fresh process of a benchmark, joined with the others of its cell: by gloo for the peers, by a channel for ours."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm import Channel
from shardwise.comm.process.world import processes


@contextmanager
def joined(rank: int, num_ranks: int, folder: str, *, timeout_seconds: float) -> Iterator[tuple[Path, Channel]]:
    """Join the ranks that meet in `folder`; leave when all have come to the end of the body."""
    os.dup2(2, 1)  # what libraries print is no part of the table
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    channel = processes(timeout_seconds=timeout_seconds)
    try:
        yield Path(folder), channel
        dist.barrier()
    finally:
        channel.close()
        dist.destroy_process_group()
