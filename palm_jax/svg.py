"""The few elements of SVG that pictures here are made of; nothing is loaded from outside."""

from __future__ import annotations

import collections.abc
import html

INK, FAINT, BAR = "#24292f", "#d0d7de", "#8c959f"


def document(width: int, height: int, title: str, lines: collections.abc.Iterable[str]) -> str:
    """The picture that holds `lines`, each an element."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def text(
    x: float, y: float, content: str, anchor: str = "start", colour: str = INK, size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{html.escape(content)}</text>'
    )


def rule(x: float, y: float, x2: float, y2: float, colour: str = INK, dash: str = "") -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-dasharray="{dash}"/>'
    )
