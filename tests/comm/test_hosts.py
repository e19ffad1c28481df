"""Messages say on which host a rank is, where ranks are on more than one."""

import re
from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.hosts import RankNames, naming_hosts, ranks_by_host
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.connections import HostRecord, host_names
from shardwise.errors import CheckpointError, ShardwiseError
from tests.comm.boards import on_threads

HOSTS = ("node07", "node07", "node09")


def test_a_rank_has_its_host_behind_it_where_there_are_several() -> None:
    names = RankNames(HOSTS)
    assert [names[0], names[2], names[7]] == ["0 (node07)", "2 (node09)", "7"]
    assert RankNames(("node07",) * 3)[1] == RankNames()[1] == "1"


def test_a_note_lists_the_ranks_of_each_host() -> None:
    assert ranks_by_host(HOSTS) == "ranks by host: 0, 1 on node07; 2 on node09"
    assert ranks_by_host(("node07",) * 3) == ranks_by_host(()) == ""
    many = ranks_by_host([f"node{rank // 10:03}" for rank in range(200)])
    assert many.startswith("ranks by host: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more on node000; ")
    assert many.endswith("157 and 2 more on node015; and 4 more hosts")


class Placed:
    hosts = HOSTS


def test_errors_that_pass_two_places_have_one_note() -> None:
    with (
        pytest.raises(CheckpointError, match="rank 2 is late") as caught,
        naming_hosts(Placed()),
        naming_hosts(Placed()),
    ):
        raise CheckpointError("rank 2 is late")
    assert caught.value.__notes__ == ["ranks by host: 0, 1 on node07; 2 on node09"]


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
        # Whose call the other one meets is a matter of who comes first.
        (call_otherwise, r"rank [01] \(node07\): .*\n  - rank 2 \(node09\): "),
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
