"""Small pictures as SVG text: enough for a tree or a map of slots, without a plotting library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

INK = "#1f2933"
PAPER = "#ffffff"
GREY = "#9aa5b1"
PALE = "#e4e7eb"
ACCENT = "#c0392b"

# Qualitative colours that stay apart in the common kinds of colour blindness (Okabe and Ito).
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7a5195")

# What XML 1.0 cannot hold, even escaped; tokens decode to such characters.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')

Point = tuple[float, float]


class Svg:
    """An SVG picture that grows element by element.

    Parameters
    ----------
    width, height : float
        Size in pixels.
    title : str
        What a reader that cannot see it, or a tooltip, says.
    """

    def __init__(self, width: float, height: float, *, title: str) -> None:
        self.width = width
        self.height = height
        self._title = title
        self._elements: list[str] = []

    def line(self, start: Point, end: Point, *, stroke: str = INK, width: float = 1.0) -> None:
        """Add a straight line."""
        self._elements.append(
            f'<line x1="{_n(start[0])}" y1="{_n(start[1])}" x2="{_n(end[0])}" y2="{_n(end[1])}" '
            f'stroke="{stroke}" stroke-width="{_n(width)}"/>'
        )

    def circle(self, at: Point, radius: float, *, fill: str, stroke: str = INK) -> None:
        """Add a circle."""
        self._elements.append(
            f'<circle cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def rect(
        self,
        at: Point,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = "none",
        title: str | None = None,
    ) -> None:
        """Add a rectangle by its upper left corner, with a tooltip where a title is given."""
        head = (
            f'<rect x="{_n(at[0])}" y="{_n(at[1])}" width="{_n(width)}" height="{_n(height)}" '
            f'fill="{fill}" stroke="{stroke}"'
        )
        self._elements.append(
            f"{head}/>" if title is None else f"{head}><title>{_escaped(title)}</title></rect>"
        )

    def text(
        self,
        at: Point,
        text: str,
        *,
        fill: str = INK,
        size: float = 11,
        anchor: str = "middle",
    ) -> None:
        """Add a line of text; characters that XML cannot hold are replaced."""
        self._elements.append(
            f'<text x="{_n(at[0])}" y="{_n(at[1])}" font-size="{_n(size)}" fill="{fill}" '
            f'text-anchor="{anchor}">{_escaped(text)}</text>'
        )

    def to_string(self) -> str:
        """Return the complete `svg` element."""
        width, height = _n(self.width), _n(self.height)
        label = quoteattr(_NOT_XML.sub("\ufffd", self._title))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label={label} '
            'font-family="ui-monospace, monospace">'
        )
        ground = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, ground, *self._elements, "</svg>"])


def stacked(pictures: Sequence[str], titles: Sequence[str]) -> str:
    """Put pictures one below the other, each under a title.

    Parameters
    ----------
    pictures : sequence of str
        Complete `svg` elements, as `Svg.to_string` makes them.
    titles : sequence of str

    Returns
    -------
    str
        A complete `svg` element.
    """
    sizes = [_SIZE.search(picture) for picture in pictures]
    extents = [(float(found[1]), float(found[2])) for found in sizes if found]
    line = 22.0
    whole = Svg(
        max(width for width, _ in extents),
        sum(height + line for _, height in extents),
        title=", ".join(titles),
    )
    top = 0.0
    for picture, title, (_, height) in zip(pictures, titles, extents, strict=True):
        whole.text((8, top + 15), title, anchor="start", size=13)
        whole._elements.append(picture.replace("<svg ", f'<svg y="{_n(top + line)}" ', 1))
        top += height + line
    return whole.to_string()


def clip(text: str, length: int) -> str:
    """Return `text` cut to `length` characters, the last of them an ellipsis if it was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))
