"""A picture of a corpus: how long its documents are, and how its vocabulary is used."""

from __future__ import annotations

import math

from palm_jax import svg
from palm_jax.corpus.stats import Stats

WIDTH, HEIGHT = 720, 520
LEFT, RIGHT, TOP, PANEL, GAP = 64, 28, 56, 170, 84


def draw(stats: Stats, title: str) -> str:
    """Documents by length, and below, the share of tokens by the rank of their frequency."""
    lines = [svg.text(LEFT, 20, title, size=15)]
    lines += _lengths(stats)
    lines += _ranks(stats)
    return svg.document(WIDTH, HEIGHT, title, lines)


def _lengths(stats: Stats) -> list[str]:
    bins = stats.splits["train"].lengths
    floor, step = TOP + PANEL, (WIDTH - LEFT - RIGHT) / len(bins)
    most = max(b.documents for b in bins)
    lines = [svg.text(LEFT, TOP - 12, "documents of the split train by their tokens")]
    for number, b in enumerate(bins):
        height = b.documents / most * (PANEL - 20)
        x = LEFT + number * step
        lines.append(
            f'<rect x="{x + 1:.1f}" y="{floor - height:.1f}" width="{step - 2:.1f}" '
            f'height="{height:.1f}" fill="{svg.BAR}"><title>{b.low:,} to {b.high:,} tokens: '
            f"{b.documents:,} documents</title></rect>"
        )
        lines.append(svg.text(x + step / 2, floor + 16, _power(b.low), anchor="middle"))
        if b.documents:
            y = floor - height - 4
            lines.append(svg.text(x + step / 2, y, f"{b.documents:,}", anchor="middle", size=10))
    return [*lines, svg.rule(LEFT, floor, WIDTH - RIGHT, floor)]


def _power(number: int) -> str:
    return f"2^{number.bit_length() - 1}"


def _ranks(stats: Stats) -> list[str]:
    ceiling = TOP + PANEL + GAP
    floor = ceiling + PANEL
    points = [(rank, share) for rank, share in enumerate(stats.ranked) if share > 0]
    low = math.floor(min(math.log10(share) for _, share in points))
    spread = max(len(stats.ranked) - 1, 1)

    def x(rank: float) -> float:
        return LEFT + rank / spread * (WIDTH - LEFT - RIGHT)

    def y(exponent: float) -> float:
        return floor - (exponent - low) / max(-low, 1) * PANEL

    lines = [
        svg.text(
            LEFT,
            ceiling - 12,
            f"share of the token of each rank ({stats.unused_ids:,} ids do not occur in "
            f"{stats.looked_at:,} sequences)",
        )
    ]
    for exponent in range(low, 1):
        lines.append(svg.rule(LEFT, y(exponent), WIDTH - RIGHT, y(exponent), svg.FAINT))
        lines.append(svg.text(LEFT - 6, y(exponent) + 4, f"1e{exponent}", anchor="end"))
    path = " ".join(f"{x(rank):.1f},{y(math.log10(share)):.1f}" for rank, share in points)
    lines.append(f'<polyline points="{path}" fill="none" stroke="{svg.INK}" stroke-width="1.5"/>')
    lines += [
        svg.text(x(rank), floor + 16, f"2^{rank}", anchor="middle")
        for rank in range(0, len(stats.ranked), max(1, len(stats.ranked) // 12))
    ]
    return [*lines, svg.rule(LEFT, floor, WIDTH - RIGHT, floor)]
