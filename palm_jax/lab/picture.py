"""A picture of where a gradient lies between the ends of formats: SVG, without anything outside."""

from __future__ import annotations

import collections.abc
import math

import numpy as np

from palm_jax import svg
from palm_jax.lab.underflow import Shares

WIDTH, HEIGHT = 720, 560
LEFT, RIGHT, TOP, PANEL, GAP = 64, 28, 48, 190, 92
# Distinguishable in grey and to colour-blind eyes; dashes tell them apart as well.
_COLOURS = {"float16": "#0550ae", "bfloat16": "#6e7781", "E5M2": "#bc4c00"}
_DASHES = {"float16": "", "bfloat16": "2 3", "E5M2": "7 4"}
# Powers of two. Rounding to nearest gives 0 below the first; below the other, less precision.
_ZERO_BELOW = {"float16": -25, "E5M2": -17}
_SUBNORMAL_BELOW = -14  # in both


def histogram(
    gradient: collections.abc.Iterable[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Share of the elements that are not 0 with a magnitude in [2^p, 2^(p+1)): p, and shares."""
    values = np.concatenate([np.abs(np.ravel(g)) for g in gradient])
    values = values[(values > 0) & np.isfinite(values)]
    if not values.size:
        return np.arange(0), np.zeros(0)
    powers = np.floor(np.log2(values.astype(np.float64))).astype(int)
    first = powers.min()
    counts = np.bincount(powers - first)
    return first + np.arange(counts.size), counts / values.size


def draw(
    gradient: collections.abc.Iterable[np.ndarray],
    shares: collections.abc.Sequence[Shares],
    title: str,
) -> str:
    """The gradient's magnitudes with the ends of formats; below, what is lost by loss scale."""
    powers, heights = histogram(gradient)
    lines = [svg.text(LEFT, 20, title, size=15)]
    lines += _magnitudes(powers, heights)
    lines += _losses(shares)
    return svg.document(WIDTH, HEIGHT, title, lines)


def _magnitudes(powers: np.ndarray, heights: np.ndarray) -> list[str]:
    low = min([-28, *powers.tolist()])
    high = max([0, *(powers + 1).tolist()])
    floor = TOP + PANEL

    def x(power: float) -> float:
        return LEFT + (power - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    tallest, width = max([*heights.tolist(), 1e-9]), x(low + 1) - x(low) - 1
    lines = [svg.text(LEFT, TOP - 10, "elements by magnitude, without a loss scale")]
    for power, height in zip(powers.tolist(), heights.tolist(), strict=True):
        top = floor - height / tallest * (PANEL - 24)
        lines.append(
            f'<rect x="{x(power) + 0.5:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{floor - top:.1f}" fill="#8c959f"><title>2^{power} to 2^{power + 1}: '
            f"{height:.2%}</title></rect>"
        )
    lines += [svg.rule(LEFT, floor, WIDTH - RIGHT, floor)]
    step = max(1, math.ceil((high - low) / 12))
    lines += [
        svg.text(x(power), floor + 16, f"2^{power}", anchor="middle")
        for power in range(low, high + 1, step)
    ]
    for row, (name, power) in enumerate(_ZERO_BELOW.items()):
        lines.append(svg.rule(x(power), TOP, x(power), floor, _COLOURS[name], _DASHES[name]))
        label = f"{name}: 0 below"
        across, down = x(power) - 4, TOP + 10 + 15 * row
        lines.append(svg.text(across, down, label, anchor="end", colour=_COLOURS[name]))
    across = x(_SUBNORMAL_BELOW)
    lines.append(svg.rule(across, TOP, across, floor))
    lines.append(svg.text(across + 4, TOP + 10, "float16, E5M2: subnormal below"))
    return lines


def _losses(shares: collections.abc.Sequence[Shares]) -> list[str]:
    ceiling = TOP + PANEL + GAP
    floor = ceiling + PANEL
    scales = sorted({row.scale for row in shares})
    spread = max(math.log2(scales[-1] / scales[0]), 1.0) if scales else 1.0

    def x(scale: float) -> float:
        return LEFT + math.log2(scale / scales[0]) / spread * (WIDTH - LEFT - RIGHT)

    most = max([row.zero + row.subnormal for row in shares] + [1e-4])

    def line(rows: list[Shares], heights: list[float], width: float) -> str:
        points = " ".join(
            f"{x(row.scale):.1f},{floor - height / most * PANEL:.1f}"
            for row, height in zip(rows, heights, strict=True)
        )
        colour, dash = _COLOURS.get(rows[0].format, svg.INK), _DASHES.get(rows[0].format, "")
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-dasharray="{dash}"/>'
        )

    lines = [
        svg.text(
            LEFT,
            ceiling - 12,
            "share of elements that become 0 (thick), 0 or subnormal (thin), by loss scale",
        ),
        svg.rule(LEFT, floor, WIDTH - RIGHT, floor),
    ]
    for share in (0.0, most / 2, most):
        y = floor - share / most * PANEL
        lines += [
            svg.rule(LEFT, y, WIDTH - RIGHT, y, svg.FAINT),
            svg.text(LEFT - 6, y + 4, f"{share:.3g}", anchor="end"),
        ]
    lines += [
        svg.text(x(scale), floor + 16, f"2^{int(math.log2(scale))}", anchor="middle")
        for scale in scales[::2]
    ]
    for place, name in enumerate(dict.fromkeys(row.format for row in shares)):
        rows = sorted((r for r in shares if r.format == name), key=lambda r: r.scale)
        lines.append(line(rows, [r.zero + r.subnormal for r in rows], 1))
        lines.append(line(rows, [r.zero for r in rows], 2.5))
        colour, dash = _COLOURS.get(name, svg.INK), _DASHES.get(name, "")
        across = WIDTH - RIGHT - 130
        lines.append(
            svg.rule(
                across,
                ceiling + 8 + 16 * place,
                across + 28,
                ceiling + 8 + 16 * place,
                colour,
                dash,
            )
        )
        lines.append(svg.text(across + 34, ceiling + 12 + 16 * place, name, colour=colour))
    return lines
