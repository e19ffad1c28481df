"""Messages say on which host a rank is, where ranks are on more than one."""

import re
from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.hosts import with_hosts
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.connections import HostRecord, host_names
from shardwise.errors import CheckpointError, ShardwiseError
from tests.comm.boards import on_threads

HOSTS = ("node07", "node07", "node09")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank 2 is gone (its process died)", "rank 2 (node09) is gone (its process died)"),
        ("ranks 0, 1 and 2 differ", "ranks 0 (node07), 1 (node07) and 2 (node09) differ"),
        ("  - rank 0: all_gather\n  - rank 2: send", "  - rank 0 (node07): all_gather\n  - rank 2 (node09): send"),
        ("Rank 0 has 5, rank 1 of 3 has 6", "Rank 0 (node07) has 5, rank 1 (node07) of 3 has 6"),
        ("it waits for rank 1, 2 in send", "it waits for rank 1 (node07), 2 (node09) in send"),
        ("data rank 1 and data ranks 0, 2", "data rank 1 and data ranks 0, 2"),
        ("ranks 0 to 2 of 8, ranks 0-2", "ranks 0 to 2 of 8, ranks 0-2"),
        ("rank 7 of another world", "rank 7 of another world"),
        ("rank 0 on node07 writes to /a; rank 2 (node09) too", "rank 0 on node07 writes to /a; rank 2 (node09) too"),
    ],
)
def test_each_rank_has_its_host_behind_it(text: str, named: str) -> None:
    assert with_hosts(text, HOSTS) == named
    assert with_hosts(named, HOSTS) == named  # an error may pass two places that name hosts
    assert with_hosts(text, ("node07",) * 3) == text
    assert with_hosts(text, ()) == text


def abort(channel: ProcessChannel) -> None:
    if channel.rank == 2:
        channel.abort("no more")
    channel.exchange(b"", purpose="words")


def call_otherwise(channel: ProcessChannel) -> None:
    channel.exchange(b"", purpose="one" if channel.rank == 2 else "another")


def refuse(channel: ProcessChannel) -> None:
    recorded = sw.Recorded(channel)
    with aborting(recorded, "a save"), agreed(recorded, purpose="verdict on the disk"):
        if channel.rank == 2:
            raise CheckpointError("no room")


def give_other_models(channel: ProcessChannel) -> None:
    model = torch.nn.Linear(2, 2 + channel.rank // 2)
    sw.parallelize(model, sw.Plan(mesh=sw.Mesh(dp_shard=3)), optimizer=torch.optim.SGD, channel=channel)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (abort, r"rank 2 \(node09\) stopped: no more, while rank 0 \(node07\) was in exchange for 'words'"),
        (call_otherwise, r"rank 0 \(node07\): .*\n  - rank 2 \(node09\): "),
        (refuse, r"rank 2 \(node09\): no room"),
        (give_other_models, r"rank 2 \(node09\) and rank 0 \(node07\) were given different"),
    ],
)
def test_what_ranks_are_told_names_hosts(body: Callable[[ProcessChannel], None], words: str) -> None:
    def told(channel: ProcessChannel) -> str:
        with pytest.raises(ShardwiseError) as caught:
            body(channel)
        return str(caught.value)

    assert re.search(words, on_threads(3, told, remote=(2,), hosts=HOSTS)[0])


def test_hosts_of_one_name_are_told_apart_by_an_address() -> None:
    def record(name: str, kernel: str, way: str) -> HostRecord:
        return HostRecord(kernel=kernel, name=name, way=way, store=[], has_secret=False)

    records = [record("box", "a", "10.0.0.1"), record("box", "b", "10.0.0.2"), record("node", "c", "10.0.0.3")]
    assert host_names(records) == ("box at 10.0.0.1", "box at 10.0.0.2", "node")
    assert host_names(records[1:]) == ("box", "node")
