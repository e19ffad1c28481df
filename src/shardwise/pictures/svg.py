"""Pictures as SVG text: boxes, words, and tensors whose cells are coloured by what a function says of their elements.

One picture has one text: nothing in it depends on the machine, a clock or a font that is there.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import groupby
from math import prod

INK, MUTED, PAPER = "#22252b", "#8a8f98", "#ffffff"
_IDLE = "#eef0f2"
_HUES = (212, 22, 145, 275, 48, 340, 185, 100)
"""Degrees on the colour wheel that differ clearly, in the order of use."""

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_MAX_CELLS = 48
"""A tensor is shown by at most so many rows and columns of cells; each shows one of its elements."""


def colour(number: int, depth: float = 0.5) -> str:
    """The `number`-th colour; depth from 0 (light) to 1 (dark). The first hundred differ."""
    # Beyond the chosen hues, steps of the golden angle fill the wheel evenly. From 13 on none meets a chosen one.
    hue = _HUES[number] if number < len(_HUES) else (number * 137.508 + 13) % 360
    # Numbers, not hsl(...): that is CSS, which viewers of plain SVG do not know.
    red, green, blue = hls_to_rgb(hue / 360, 0.84 - 0.44 * depth, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


class Picture:
    """A picture that grows downward. Lengths are pixels; `y` is where the next row begins."""

    def __init__(self, title: str, *, width: int = 960) -> None:
        self.width = width
        self.y = 56
        self._title = title
        self._body: list[str] = []
        self.text(16, 32, shortened(title, width - 32, size=17), size=17)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", line: str = "none"
    ) -> None:
        """A filled rectangle; `title` is what a browser shows when the mouse is over it."""
        inner = f"<title>{_plain(title)}</title>" if title else ""
        self._body.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" stroke="{line}">'
            f"{inner}</rect>"
        )

    def text(self, x: float, y: float, words: str, *, size: int = 12, fill: str = INK, middle: bool = False) -> None:
        """A line of words whose baseline is at `y`."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._body.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{fill}"{anchor}>{_plain(words)}</text>'
        )

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """A row of colours and what they mean: (fill, words)."""
        x = 16.0
        for fill, words in entries:
            if x + 30 + 7 * len(words) > self.width:
                x, self.y = 16.0, self.y + 20
            self.box(x, self.y - 11, 14, 14, fill)
            self.text(x + 20, self.y, words)
            x += 36 + 7 * len(words)
        self.y += 22

    def more(self, number: int, what: str) -> None:
        """A line that says how many are not shown, where there are any."""
        if number > 0:
            self.text(16, self.y, f"and {number} more {what}", fill=MUTED)
            self.y += 20

    def tensor(
        self,
        x: float,
        y: float,
        shape: Sequence[int],
        fill: Callable[[tuple[int, ...]], str | None],
        *,
        width: float = 240,
        height: float = 96,
    ) -> None:
        """A tensor as a matrix: its last dim is across, all others together are down.

        fill: the colour of an element by its index; None: not there. It is called for one element per cell.
        """
        across = shape[-1] if shape else 1
        down = prod(shape[:-1])
        columns, rows = min(across, _MAX_CELLS), min(down, _MAX_CELLS)
        self.box(x, y, width, height, _IDLE, line=MUTED)
        for row in range(rows):
            index = _index((2 * row + 1) * down // (2 * rows), shape[:-1])
            cells = [
                fill((*index, (2 * column + 1) * across // (2 * columns)) if shape else ()) for column in range(columns)
            ]
            start = 0
            for shown, group in groupby(cells):
                count = len(list(group))
                if shown is not None:
                    self.box(
                        x + width * start / columns,
                        y + height * row / rows,
                        width * count / columns,
                        height / rows,
                        shown,
                    )
                start += count

    def svg(self) -> str:
        """The text of the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.y:.0f}" width="{self.width}" '
            f'font-family="sans-serif" shape-rendering="crispEdges" role="img"><title>{_plain(self._title)}</title>\n'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>\n' + "\n".join(self._body) + "\n</svg>\n"
        )


def shortened(words: str, width: float, *, size: int = 12) -> str:
    """The words, with dots in the place of their middle where they are wider than `width`."""
    # The font of the viewer is not known. Most fonts need less than this for a letter, and this for one of East Asia.
    room = [size * (1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6) for letter in words]
    if sum(room) <= width:
        return words
    head, tail, left = 0, len(words), width - 3 * 0.6 * size
    while left > 0:
        if head <= len(words) - tail:
            left, head = left - room[head], head + 1
        else:
            left, tail = left - room[tail - 1], tail - 1
    return f"{words[: max(head - 1, 0)]}...{words[tail:]}"


def _plain(words: str) -> str:
    """As XML has it, which knows neither control characters nor halves of surrogate pairs."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", words))


def _index(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of a row-major element."""
    found = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        found.append(at)
    return tuple(reversed(found))


def stacked(pictures: Sequence[Picture]) -> str:
    """The text of one file with all pictures, one below the other."""
    if len(pictures) == 1:
        return pictures[0].svg()
    width, height = max(picture.width for picture in pictures), sum(picture.y for picture in pictures)
    parts, y = [], 0.0
    for picture in pictures:
        parts.append(picture.svg().replace("<svg ", f'<svg y="{y:.0f}" height="{picture.y:.0f}" ', 1))
        y += picture.y
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}">\n'
    return head + "".join(parts) + "</svg>\n"
