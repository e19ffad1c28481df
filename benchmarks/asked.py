"""Which sides are compared with which, and the ratios that were asked for."""

from dataclasses import dataclass

PEERS_K1 = (
    "ddp",
    "ddp-bf16",
    "zero1",
    "fsdp2",
    "fsdp2-keep",
    "fsdp2-bf16",
    "fsdp2-keep-bf16",
    "deepspeed",
    "deepspeed-default",
    "deepspeed-fp32",
)
PEERS_K4 = ("ddp", "ddp-held", *PEERS_K1[1:])
LIKE_FOR_LIKE = {
    "ddp-bf16": "ours-wire",
    "fsdp2-bf16": "ours-bf16",
    "fsdp2-keep-bf16": "ours-bf16",
    "deepspeed": "ours-bf16",
    "deepspeed-default": "ours-bf16",
}
"""With several microbatches: which of our sides has the gradient dtypes of a peer; the others have those of `ours`.

With one microbatch ours sends the bf16 gradients of backward as they are: the peers that send bf16 as well (`-bf16`)
are the like-for-like rows, and the README shows those.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """An upper bound of a ratio."""

    limit: float
    strictly: bool = False

    def is_met_by(self, ratio: float) -> bool:
        """Whether a measured ratio is within the bound."""
        return ratio < self.limit if self.strictly else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'<' if self.strictly else '<='} {self.limit:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A ratio to report: seconds of `ours` by seconds of `against`."""

    ours: str
    against: str
    asked: Asked | None = None
    of_passes: bool = False
    """Of forwards and backwards only; False: of whole steps."""


BELOW = Asked(limit=1.0, strictly=True)
_FAMILY_K1 = {
    ("2x128", "ddp"): Asked(limit=0.80),
    ("2x128", "fsdp2"): Asked(limit=0.58),
    ("2x128", "deepspeed"): Asked(limit=0.75),
    ("1x32", "ddp"): Asked(limit=0.62),
    ("1x32", "fsdp2"): Asked(limit=0.30),
}
"""By shape and library. Bounds hold for every setting of a library: resharding, dtype of gradients, tuned or not."""

_OF_SILENCE = {
    ("2x128", "ours"): Asked(limit=1.08),
    ("2x128", "stage3"): Asked(limit=1.15),
    ("1x32", "ours"): Asked(limit=1.12),
    ("1x32", "stage3"): Asked(limit=1.22),
}
"""By shape and side: over the step of stage 1 with the communication taken out. Stage 3 has none of its own."""


def pairs(shape: str, num_microbatches: int) -> list[Pair]:
    """Return what is compared in one cell, the asked ratios first."""
    listed = _one_microbatch(shape) if num_microbatches == 1 else _several_microbatches(shape, num_microbatches)
    return sorted(listed, key=lambda pair: pair.asked is None)


def sides_of(listed: list[Pair]) -> tuple[str, ...]:
    """Return every side that the pairs need, once."""
    return tuple(dict.fromkeys(name for pair in listed for name in (pair.ours, pair.against)))


def _one_microbatch(shape: str) -> list[Pair]:
    listed = [
        Pair(
            ours="ours",
            against=peer,
            asked=_FAMILY_K1.get((shape, peer.removesuffix("-bf16").removesuffix("-keep").removesuffix("-default"))),
        )
        for peer in PEERS_K1
    ]
    listed += [
        Pair(ours=ours, against="ours-silent", asked=_OF_SILENCE.get((shape, ours))) for ours in ("ours", "stage3")
    ]
    listed += [Pair(ours="ours-tcp", against=peer) for peer in ("ddp", "fsdp2", "deepspeed")]
    listed += [
        Pair(ours="ours", against="cast-each", asked=BELOW),
        Pair(ours="ours-silent", against="cast-each-silent", asked=BELOW),
    ]
    return listed


def _several_microbatches(shape: str, num_microbatches: int) -> list[Pair]:
    listed = [Pair(ours="ours", against=peer, asked=BELOW) for peer in PEERS_K4]
    listed += [Pair(ours=ours, against=peer, asked=BELOW) for peer, ours in LIKE_FOR_LIKE.items()]
    listed += [Pair(ours="ours", against="ours-silent"), Pair(ours="ours-tcp", against="ddp")]
    narrow = Asked(limit=0.93) if (shape, num_microbatches) == ("1x32", 4) else BELOW
    for suffix in ("", "-silent"):
        listed += [
            Pair(ours=f"ours-bf16{suffix}", against=f"cast-each{suffix}", asked=narrow),
            Pair(ours=f"ours{suffix}", against=f"cast-each{suffix}", asked=Asked(limit=1.0)),
        ]
    return listed
