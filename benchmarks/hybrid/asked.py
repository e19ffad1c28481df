"""Which sides are compared with which, and the numbers that were asked for."""

from collections.abc import Iterator, Sequence

from benchmarks.asked import Asked, Pair
from benchmarks.hybrid.counting import Count
from benchmarks.hybrid.memory import Peak
from benchmarks.limits import Finding
from benchmarks.rank import Cell

__all__ = ["findings", "pairs"]

FSDP2_RESHARDS = ("fsdp2", "fsdp2-bf16")
FSDP2_KEEPS = ("fsdp2-keep", "fsdp2-keep-bf16")
DEEPSPEED_2 = ("deepspeed2", "deepspeed2-default")
DEEPSPEED_3 = ("deepspeed3", "deepspeed3-default")
OF_PEAKS = 0.03


def pairs(cell: Cell) -> list[Pair]:
    """What is compared in one cell, the asked ratios first."""
    listed = _tensor() if cell.same_samples else _sharding(cell.num_microbatches)
    return sorted(listed, key=lambda pair: pair.asked is None)


def _tensor() -> list[Pair]:
    asked = Asked(limit=1.0)
    listed = []
    for dtype in ("fp32", "bf16"):
        peer = f"parallelize-{dtype}"
        listed.append(Pair(ours=f"tp-{dtype}", against=peer, asked=asked, of_passes=True))
        listed.append(Pair(ours=f"tp-{dtype}-tcp", against=peer, of_passes=True))
        listed += [Pair(ours=f"tp-{dtype}", against=peer), Pair(ours=f"tp-{dtype}-tcp", against=peer)]
    return listed


def _sharding(num_microbatches: int) -> list[Pair]:
    one = num_microbatches == 1
    of_stage_3 = Asked(limit=0.70) if one else None
    of_stage_2 = Asked(limit=0.75 if one else 1.0)
    listed = [Pair(ours="stage3", against=peer, asked=of_stage_3) for peer in FSDP2_RESHARDS]
    listed += [Pair(ours="stage2", against=peer, asked=of_stage_2) for peer in FSDP2_KEEPS]
    listed += [Pair(ours="stage2", against=peer, asked=Asked(limit=0.80)) for peer in DEEPSPEED_2]
    listed += [Pair(ours="stage3", against=peer, asked=Asked(limit=0.65)) for peer in DEEPSPEED_3]
    listed += [Pair(ours=f"{side}-tcp", against=peer) for side, peer in (("stage3", "fsdp2"), ("stage2", "fsdp2-keep"))]
    listed += [Pair(ours=f"{side}-tcp", against=f"deepspeed{side[-1]}") for side in ("stage2", "stage3")]
    listed += [Pair(ours="stage2", against="stage2-silent")]
    listed += [Pair(ours="stage2", against="ours"), Pair(ours="stage3", against="ours")]
    if not one:
        listed += [Pair(ours="stage3-keep", against=peer) for peer in (*FSDP2_KEEPS, *DEEPSPEED_3, "stage3")]
        listed += [Pair(ours="stage3", against="fsdp2-each"), Pair(ours="stage2", against="fsdp2-keep-each")]
    return listed


def findings(peaks: Sequence[Peak], counts: Sequence[Count]) -> Iterator[Finding[str]]:
    """What was asked for of memory and counts: both are right where nothing is over the limit."""
    for peak in peaks:
        yield Finding(
            cell=peak.about,
            what="peak bytes of tensors: part by which they differ from the formula",
            limit=OF_PEAKS,
            values=[abs(peak.measured_bytes / peak.formula_bytes - 1)],
        )
    for about in dict.fromkeys(count.about for count in counts):
        wrong = [abs(count.counted - count.formula) for count in counts if count.about == about]
        yield Finding(cell=about, what="casts, collectives, bytes sent: off the formula", limit=0, values=[max(wrong)])
