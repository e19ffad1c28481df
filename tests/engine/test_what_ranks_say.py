"""What a step makes of what all ranks say, read as arrays, against a loop over the ranks."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm.rank_values import RankValues
from shardwise.engine.channels import RankGroups
from shardwise.engine.step_exchange import (
    Weighting,
    batch_compared,
    exchange_step,
    merge_weights,
    parts_of_opening,
    sum_of_losses,
)
from shardwise.engine.zero.uneven_microbatches import Joint
from shardwise.errors import BatchError, MismatchError
from tests.properties import tried

weights = st.sampled_from([0.0, 1.0, 0.1, 3.0, 1e-300, 4e15])
even_weights = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.lists(weights, min_size=count, max_size=count), min_size=1, max_size=40)
)
uneven_weights = st.lists(st.lists(weights, max_size=4), min_size=1, max_size=40)


@tried(40)
@given(even_weights | uneven_weights)
def test_weights_of_all_ranks_are_those_of_a_loop_over_them(by_rank: list[list[float]]) -> None:
    weighting = Weighting.of(by_rank)
    of_all = [each for own in by_rank for each in own]
    assert weighting.total == math.fsum(of_all)
    assert weighting.num_microbatches == len(of_all)
    assert weighting.is_same_count == (len({*map(len, by_rank)}) == 1)
    computed = [{at for at, weight in enumerate(own) if weight} for own in by_rank]
    counts = [sum(at in each for each in computed) for at in range(max(map(len, by_rank)))]
    joint = [Joint.ALL if count == len(by_rank) else Joint.SOME if count else Joint.NONE for count in counts]
    assert weighting.joint == joint
    weighting.check()
    for rank, own in enumerate(by_rank):
        assert weighting.of_rank(rank) == own
        if weighting.total > 0:
            alike = len(set(of_all)) == 1
            mean = math.fsum(of_all) / len(of_all)
            assert weighting.factors(rank) == [1.0 if alike else weight / mean for weight in own]
            losses = [0.3 + at + rank for at in range(len(own))]
            share = math.fsum(w * loss for w, loss in zip(own, losses, strict=True) if w) / weighting.total
            assert weighting.share_of_mean(losses, rank) == share


@pytest.mark.parametrize("wrong", [-1.0, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_what_is_no_weight_is_told_wherever_it_is(wrong: float, place: int) -> None:
    table = np.ones(12)
    table[place] = wrong
    with pytest.raises(BatchError, match=f"loss_weight gave {wrong} for a microbatch"):
        Weighting.of(table.reshape(4, 3).tolist()).check()


@tried(30)
@given(
    st.sampled_from([sw.Mesh(dp_shard=12), sw.Mesh(pp=2, dp_shard=3, tp=2), sw.Mesh(tp=4, dp_replicate=3)]), st.data()
)
def test_the_opening_of_a_step_is_that_of_a_loop_over_the_ranks(mesh: sw.Mesh, data: st.DataObject) -> None:
    ranks = RankGroups.of(sw.Plan(mesh=mesh))
    by_data_rank = data.draw(
        st.lists(st.lists(weights, min_size=2, max_size=2), min_size=mesh.num_data_ranks, max_size=mesh.num_data_ranks)
    )
    odd = data.draw(st.none() | st.integers(0, mesh.size - 1))
    said = []
    for rank, data_rank in enumerate(ranks.data_ranks):
        lines = [f"batch {data_rank}", "of another rank" if rank == odd else "its own"]
        said.append(parts_of_opening(by_data_rank[data_rank], batch=batch_compared(lines, is_whole=True)))
    parts = [RankValues.of(part) for part in zip(*said, strict=True)]
    lines_of = [json.dumps([f"of rank {rank}" if rank == odd else "alike"]).encode() for rank in range(mesh.size)]
    channel: Any = Answers(lines_of)
    differs = odd is not None and (ranks.first_of[odd] != odd or ranks.first_of.count(odd) > 1)
    if differs:
        with pytest.raises(MismatchError, match="ranks along pp and tp need the same batch"):
            merge_weights(channel, parts, [], same_count=True, ranks=ranks)
    elif not any(map(any, by_data_rank)):
        with pytest.raises(BatchError, match="no microbatch on any rank has a weight above 0"):
            merge_weights(channel, parts, [], same_count=True, ranks=ranks)
    else:
        weighting, written = merge_weights(channel, parts, [], same_count=True, ranks=ranks)
        assert ([*map(weighting.of_rank, range(mesh.num_data_ranks))], written) == (by_data_rank, [])


class Answers:
    """A channel on which all ranks have given their lines."""

    def __init__(self, lines_of: Sequence[bytes]) -> None:
        self._lines_of = lines_of

    def exchange(self, value: bytes, *, purpose: str) -> Sequence[bytes]:
        return self._lines_of


class Saying:
    """The channel of one rank; what all ranks give is known."""

    def __init__(self, said: Sequence[Sequence[bytes]] = ()) -> None:
        self._said = said
        self.given: Sequence[bytes] = ()

    def exchange_parts(self, parts: Sequence[bytes], *, purpose: str) -> list[RankValues]:
        self.given = parts
        return [RankValues.of(part) for part in zip(*(self._said or [parts]), strict=True)]


@tried(30)
@given(
    st.lists(st.lists(st.booleans(), min_size=11, max_size=11), min_size=1, max_size=6),
    st.integers(1, 4),
    st.booleans(),
)
def test_what_any_rank_has_touched_is_known_with_the_first_rank_that_changed_a_buffer(
    flags: list[list[bool]], repeats: int, in_runs: bool
) -> None:
    of_ranks = [each for each in flags for _ in range(repeats)] if in_runs else flags * repeats

    def close(channel: Saying, own: list[bool]) -> Any:
        return exchange_step(
            channel,  # type: ignore[arg-type]
            figures=[],
            times=[],
            touched=own[:4],
            changed_buffers=own[4:7],
            written=own[7:10],
            stop=own[10],
        )

    said = []
    for own in of_ranks:
        close(listening := Saying(), own)
        said.append(listening.given)
    found = close(Saying(said), of_ranks[0])
    anywhere = [any(each[at] for each in of_ranks) for at in range(11)]
    assert (found.touched, found.stop) == (anywhere[:4], anywhere[10])
    assert found.written == [at for at in range(3) if anywhere[7 + at]]
    first = {at: next(rank for rank, own in enumerate(of_ranks) if own[4 + at]) for at in range(3) if anywhere[4 + at]}
    assert found.changed_buffers == first


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("odd", [None, 1, 4])
def test_losses_of_ranks_along_tp_count_once_and_are_compared(is_exact: bool, odd: int | None) -> None:
    alike = np.arange(6).reshape(3, 2)
    for values in ([0.1, 0.2, 0.3], [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]):
        shares = [value for value in values for _ in range(2)]
        if odd is not None:
            shares[odd] = 7.5
            with pytest.raises(
                MismatchError, match=f"rank {odd // 2 * 2} and rank {odd // 2 * 2 + 1} are peers"
            ) as told:
                sum_of_losses(shares, alike, is_exact=is_exact)
            assert "7.5" in str(told.value)
        elif all(map(math.isfinite, values)):
            assert sum_of_losses(shares, alike, is_exact=is_exact) == math.fsum(values)
            shares[3] *= 1 + 1e-4
            if is_exact:
                with pytest.raises(MismatchError, match="rank 2 and rank 3 are peers"):
                    sum_of_losses(shares, alike, is_exact=True)
            else:
                assert sum_of_losses(shares, alike, is_exact=False) == math.fsum(values)
        else:
            assert math.isnan(sum_of_losses(shares, alike, is_exact=is_exact))
