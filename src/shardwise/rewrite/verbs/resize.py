"""Resize: each tensor padded to larger sizes, or cropped to smaller ones, at the end of its dims."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.rewrite.metas import KEPT_FILL, TensorMeta, holds_number, number_text
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import (
    Attribute,
    ReadArgument,
    StatementArguments,
    Verb,
    integers,
    listed,
)
from shardwise.rewrite.verbs.operation import Change, Cropped, Fitted, OpsRefusal, Work, unknown


@dataclass(frozen=True, slots=True)
class _Resize(Change):
    sizes: tuple[int, ...] | None
    """-1 keeps a size. None: as recorded (only in inverses)."""
    fill: str | None = None
    """The value of the elements that come or go, as `number_text` writes it: text is equal to itself where it is NaN,
    and as long as integers are. None: it is not known, and the way back fills with 0.
    """

    def written(self) -> Iterator[str]:
        yield f"{'pad' if isinstance(self, Pad) else 'crop'}={listed(self.sizes)}"

    def written_last(self) -> Iterator[str]:
        if self.fill is not None and not (isinstance(self, Pad) and self.fill == "0"):
            yield f"fill={self.fill}" if self.fill.isdecimal() else f"fill='{self.fill}'"

    def undone(self) -> "_Resize":
        return Crop(None, self.fill) if isinstance(self, Pad) else Pad(None, self.fill or "0")

    @property
    def loss(self) -> str:
        known = isinstance(self, Pad) or self.fill is not None
        return "" if known else "crops, and no fill= says what the elements are that go"

    def on_state(self, *, is_master: bool) -> "_Resize":
        # Masters are padded as weights are. Elements that were never trained have no moments.
        return self if is_master or self.fill is None else type(self)(self.sizes, "0")

    def fitted(self, meta: TensorMeta, name: str) -> Fitted | None:
        fill, sizes = self.fill or "0", self._sizes(meta.shape, name)
        if sizes == meta.shape:
            return None
        if not holds_number(meta.dtype, fill):
            raise OpsRefusal(f"fill is {fill}, which no element of {name} can be: its dtype is {meta.dtype}")
        back = Crop(meta.shape, fill) if isinstance(self, Pad) else Pad(meta.shape, fill)
        return Fitted(type(self)(sizes, fill), back, meta._replace(shape=sizes))

    def _sizes(self, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
        word, other, wrong = ("pad", "crop", "smaller") if isinstance(self, Pad) else ("crop", "pad", "larger")
        if self.sizes is None:
            raise unknown(f"the sizes of {name} before the {other} are", f"{word}='[..]'")
        asked = list(self.sizes)
        if len(asked) != len(shape):
            raise OpsRefusal(f"{word} {asked} is for {len(asked)} dims, but {name} has {len(shape)}: {list(shape)}")
        sizes = tuple([old if new == -1 else new for old, new in zip(shape, asked, strict=True)])
        if any(new != old and (new < old) == (word == "pad") for old, new in zip(shape, sizes, strict=True)):
            raise OpsRefusal(f"{word} {asked} asks for a {wrong} size than {name} has: {list(shape)}")
        return sizes

    def changed(self, value: ViewedTensor) -> ViewedTensor:
        assert self.sizes is not None, "it was fitted"
        return value.resize(self.sizes, self.fill or "0")


@dataclass(frozen=True, slots=True)
class Pad(_Resize):
    """To larger sizes, by elements of one value behind those that there are."""


@dataclass(frozen=True, slots=True)
class Crop(_Resize):
    """To smaller sizes, without the last elements."""

    def take(self, work: Work) -> None:
        before = work.metas.copy()
        Change.take(self, work)
        shapes = ((old.shape, new.shape) for old, new in zip(before, work.metas, strict=True))
        work.cropped += [Cropped(old, new, self.fill) for old, new in shapes if old != new]


def _number(attribute: Attribute, text: str) -> str:
    number = text if text == KEPT_FILL else number_text(text)
    if number is None:
        wanted = "a number, such as 0, 0.5, '-inf' or '1e-5', or 'kept' for the values of the target"
        raise ValueError(f"{attribute.word} wants {wanted}")
    return number


def _read(resize: ReadArgument, arguments: StatementArguments) -> _Resize | None:
    fill = arguments.once["fill"].text if "fill" in arguments.once else None
    if resize.value is None:
        return None
    return Pad(resize.integers, fill or "0") if resize.word == "pad" else Crop(resize.integers, fill)


_STRAY = "is the value of elements that pad= adds or crop= takes away; neither is given"
_SIZES = integers(
    lambda sizes: "sizes are not negative, but for -1, which keeps a size" if min(sizes, default=0) < -1 else ""
)

RESIZE = Verb(
    (
        Attribute("pad='[50304,-1]'", _SIZES, recordable=True),
        Attribute("crop='[50257,-1]'", _SIZES, recordable=True),
        Attribute("fill=0", _number, owners=("pad", "crop"), stray_as=_STRAY),
    ),
    ("pad", "crop"),
    _read,
)
