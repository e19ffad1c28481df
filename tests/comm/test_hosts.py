"""Messages say on which host a rank is, where ranks are on more than one."""

import pytest
import torch

import shardwise as sw
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.connections import HostRecord, _host_names
from shardwise.comm.hosts import hosts_of, with_hosts
from shardwise.comm.processes import ProcessChannel
from shardwise.errors import CheckpointError, MismatchError, PeerError
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


def test_what_breaks_a_channel_is_told_with_hosts() -> None:
    def body(channel: ProcessChannel) -> str:
        if channel.rank == 2:
            channel.abort("no more")
            return ""
        with pytest.raises(PeerError, match="no more") as caught:
            channel.exchange(b"", purpose="words")
        assert caught.value.rank == 2
        return str(caught.value)

    told = on_threads(3, body, remote=(2,), hosts=HOSTS)
    for rank, each in enumerate(told[:2]):
        assert each == (f"rank 2 (node09) stopped: no more, while rank {rank} (node07) was in exchange for 'words'")


def test_calls_that_differ_are_told_with_hosts() -> None:
    def body(channel: ProcessChannel) -> None:
        channel.exchange(b"", purpose="one" if channel.rank else "another")

    with pytest.raises(MismatchError, match=r"rank 0 \(node07\): .*\n  - rank [12] \(node0[79]\): "):
        on_threads(3, body, hosts=HOSTS)


def test_what_ranks_agree_to_refuse_is_told_with_hosts() -> None:
    def save(channel: sw.Channel) -> None:
        with aborting(channel, "a save"), agreed(channel, purpose="verdict on the disk"):
            if channel.rank == 2:
                raise CheckpointError("no room")

    def body(channel: ProcessChannel) -> tuple[str, tuple[str, ...]]:
        with pytest.raises(CheckpointError) as caught:
            save(sw.Recorded(channel))
        return str(caught.value), caught.value.problems

    assert on_threads(3, body, hosts=HOSTS) == [("rank 2 (node09): no room", ("rank 2 (node09): no room",))] * 3
    assert not hosts_of(sw.simulate)  # other channels know none


def test_the_engine_tells_hosts() -> None:
    def body(channel: ProcessChannel) -> str:
        model = torch.nn.Linear(2, 2 + channel.rank)
        with pytest.raises(MismatchError) as caught:
            sw.parallelize(
                model,
                sw.Plan(mesh=sw.Mesh(dp_shard=3)),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                channel=channel,
            )
        return str(caught.value)

    for each in on_threads(3, body, hosts=HOSTS):
        assert each.startswith("ranks 1 (node07), 2 (node09) and rank 0 (node07) were given different")


def test_hosts_of_one_name_are_told_apart_by_an_address() -> None:
    def record(name: str, kernel: str, way: str) -> HostRecord:
        return HostRecord(kernel=kernel, name=name, way=way, store=[], has_secret=False)

    records = [record("box", "a", "10.0.0.1"), record("box", "b", "10.0.0.2"), record("node", "c", "10.0.0.3")]
    assert _host_names(records) == ("box at 10.0.0.1", "box at 10.0.0.2", "node")
    assert _host_names(records[1:]) == ("box", "node")
