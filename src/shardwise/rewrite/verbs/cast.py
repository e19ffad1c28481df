"""Cast: each tensor in another dtype."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.rewrite.metas import TensorMeta, keeps_values
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import (
    Attribute,
    ReadArgument,
    StatementArguments,
    Verb,
    dtype,
    written_dtype,
)
from shardwise.rewrite.verbs.operation import Change, Fitted, OpsRefusal, unknown


@dataclass(frozen=True, slots=True)
class Cast(Change):
    """To the dtype `to` (None: as recorded, only in inverses), out of `source`, where that is said and verified."""

    to: str | None
    source: str | None = None

    def written(self) -> Iterator[str]:
        if self.source is None:
            yield f"dtype={written_dtype(self.to)}"
        else:
            yield f"src_dtype={written_dtype(self.source)}"
            yield f"dst_dtype={written_dtype(self.to)}"

    def undone(self) -> "Cast":
        return Cast(self.source, self.to if self.source is not None else None)

    @property
    def loss(self) -> str:
        if not self.source or not self.to or keeps_values(self.source, self.to):
            return ""
        return f"casts from {self.source} to {self.to}, which does not hold all its values"

    def on_state(self, *, is_master: bool) -> None:
        # `dtype='bfloat16'` is meant for the weights. Moments in bfloat16 would be another optimizer.
        return None

    def fitted(self, meta: TensorMeta, name: str) -> Fitted | None:
        if self.source is not None and self.source != meta.dtype:
            raise OpsRefusal(f"src_dtype is {self.source!r}, but {name} has dtype {meta.dtype}")
        if self.to is None:
            raise unknown(f"the dtype of {name} before the cast is", "src_dtype= and dst_dtype= in it")
        # Out of which dtype a cast was made is what text alone does not say. Here it is known, and so the inverse is
        # exact.
        same = self.to == meta.dtype
        return None if same else Fitted(Cast(self.to), Cast(meta.dtype), meta._replace(dtype=self.to))

    def changed(self, value: ViewedTensor) -> ViewedTensor:
        assert self.to is not None, "it was fitted"
        return value.cast(self.to)


def _read(cast: ReadArgument, arguments: StatementArguments) -> Cast | None:
    if cast.word == "dtype":
        return None if cast.value is None else Cast(cast.text)
    # `src_dtype=..., src_dtype=...`: the second may still find its partner, so the first is the one that is wrong.
    pairs: list[list[ReadArgument]] = []
    for each in arguments.given:
        if each.word in _PAIRED:
            is_second = pairs and len(pairs[-1]) == 1 and pairs[-1][0].word != each.word
            pairs[-1].append(each) if is_second else pairs.append([each])
    first, *second = next(pair for pair in pairs if cast in pair)
    if not second:
        (other,) = _PAIRED - {cast.word}
        why = "a cast that can be undone has both, any other is written dtype=..."
        arguments.find(cast, f"{cast.shown} is given without {other}; {why}")
    # Both are there: the cast is where the second one stands.
    if second != [cast] or first.value is None or cast.value is None:
        return None
    source, target = (first, cast) if first.word == "src_dtype" else (cast, first)
    return Cast(target.text, source.text)


_PAIRED = {"src_dtype", "dst_dtype"}

CAST = Verb(
    (
        Attribute("dtype='float16'", dtype, recordable=True, repeatable=True),
        Attribute("src_dtype='float16'", dtype, repeatable=True),
        Attribute("dst_dtype='float32'", dtype, recordable=True, repeatable=True),
    ),
    ("dtype", "src_dtype", "dst_dtype"),
    _read,
)
