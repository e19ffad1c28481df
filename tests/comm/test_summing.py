"""The sum of a reduce-scatter, fed in any order of arrival, against the plain sum in rank order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.messages import Inbound, MessageChunk, Summing, as_bytes
from shardwise.comm.shared_memory import SLOT_BYTES
from tests.properties import tried

ELEMENTS_PER_SLOT = SLOT_BYTES // 2
PAIRS = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
PAIRS += [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)]


class NoLink:
    """Takes acknowledgements."""

    def __init__(self) -> None:
        self.num_consumed = 0

    def put(self, content: bytes) -> None:
        self.num_consumed += 1


@tried(25)
@given(
    size=st.integers(1, 5),
    own=st.integers(0, 4),
    dtypes=st.sampled_from(PAIRS),
    count=st.sampled_from([0, 1, 1000, ELEMENTS_PER_SLOT, ELEMENTS_PER_SLOT + 1, 2 * ELEMENTS_PER_SLOT + 77]),
    in_place=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_the_sum_is_the_plain_one_in_rank_order_whatever_arrives_first(
    size: int, own: int, dtypes: tuple[torch.dtype, torch.dtype], count: int, in_place: bool, order: object
) -> None:
    own %= size
    dtype, wide = dtypes
    generator = torch.Generator().manual_seed(count)
    inputs = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
    expected = inputs[0].to(wide)
    for term in inputs[1:]:
        expected = expected + term.to(wide)
    own_part = inputs[own].clone()
    output = own_part if in_place and dtype == wide else torch.full((count,), 77, dtype=wide)
    terms: list[Inbound | torch.Tensor] = [own_part if rank == own else Inbound(rank, 0, 0) for rank in range(size)]
    summing = Summing(output, terms, dtype)

    link = NoLink()
    region = SLOT_BYTES // dtype.itemsize
    waiting = {
        rank: [(start, inputs[rank][start : start + region]) for start in range(0, max(count, 1), region)]
        for rank in range(size)
        if rank != own
    }
    num_chunks = sum(map(len, waiting.values()))
    summing.advance()
    while waiting:
        rank = order.choice(sorted(waiting))  # type: ignore[attr-defined]
        start, part = waiting[rank].pop(0)
        term = terms[rank]
        assert isinstance(term, Inbound)
        assert rank in summing.awaited or term.chunks or term.num_received
        term.total = count * dtype.itemsize
        term.chunks.append(MessageChunk(link, start * dtype.itemsize, as_bytes(part.clone()), b"ack"))  # type: ignore[arg-type]
        summing.advance()
        if not waiting[rank]:
            del waiting[rank]
    assert summing.awaited == []
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))
    assert link.num_consumed == num_chunks
