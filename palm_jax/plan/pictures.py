"""Pictures of plans: SVG, without anything from outside."""

from __future__ import annotations

import collections.abc
import dataclasses
import math

from palm_jax import svg
from palm_jax.plan import reliability

WIDTH, HEIGHT = 720, 420
LEFT, TOP, CELL_WIDTH, CELL_HEIGHT = 150, 64, 62, 34
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


def sensitivity(saving: reliability.Saving) -> str:
    """Goodput at its best interval, by the time of a save and of recovery."""
    title = (
        f"Goodput at the best interval, {_time(saving.mtbf_hours)} between failures: "
        "by time of a save and of recovery"
    )
    save, recovery = saving.save_hours, saving.recovery_hours or saving.save_hours
    lines = [svg.text(16, 24, title, size=14)]
    lines.append(svg.text(LEFT + 4 * CELL_WIDTH, TOP - 26, "recovery", anchor="middle"))
    lines.append(svg.text(16, TOP + 4 * CELL_HEIGHT, "a save"))
    for row, by_save in enumerate(FACTORS):
        y = TOP + row * CELL_HEIGHT
        lines.append(svg.text(LEFT - 8, y + 22, _time(save * by_save), anchor="end"))
        for column, by_recovery in enumerate(FACTORS):
            x = LEFT + column * CELL_WIDTH
            if row == 0:
                heading = _time(recovery * by_recovery)
                lines.append(svg.text(x + CELL_WIDTH / 2, TOP - 8, heading, anchor="middle"))
            there = dataclasses.replace(
                saving, save_hours=save * by_save, recovery_hours=recovery * by_recovery
            )
            share = reliability.renewal_failing(there, reliability.best_interval(there))
            given = by_save == by_recovery == 1
            lines += _cell(x, y, share, given)
    floor = TOP + len(FACTORS) * CELL_HEIGHT + 24
    lines.append(svg.text(LEFT, floor, "framed: as given; each step doubles"))
    return svg.document(WIDTH, HEIGHT, title, lines)


def _cell(x: float, y: float, share: float, framed: bool) -> list[str]:
    light = round(96 - 46 * min(1.0, max(0.0, share)))  # grey says it without colours, too
    frame = f'stroke="{svg.INK}" stroke-width="2.5"' if framed else 'stroke="white"'
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" '
        f'fill="hsl(212, 60%, {light}%)" {frame}/>',
        svg.text(
            x + CELL_WIDTH / 2,
            y + 22,
            f"{share:.0%}",
            anchor="middle",
            colour="white" if light < 62 else svg.INK,
        ),
    ]


def bars(title: str, parts: collections.abc.Mapping[str, float], unit: str) -> str:
    """One bar for each part, its number beside it."""
    most = max([*parts.values(), 1e-12])
    lines = [svg.text(16, 24, title, size=14)]
    for row, (name, value) in enumerate(parts.items()):
        y = 44 + 26 * row
        width = value / most * 360
        lines.append(svg.text(216, y + 14, name, anchor="end"))
        lines.append(
            f'<rect x="224" y="{y}" width="{max(width, 0.5):.1f}" height="18" fill="{svg.BAR}"/>'
        )
        lines.append(svg.text(230 + width, y + 14, f"{value:.3g} {unit}"))
    return svg.document(WIDTH, 60 + 26 * len(parts), title, lines)


def _time(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} h"
    minutes = value * 60
    return f"{minutes:.2g} min" if minutes >= 1 else f"{math.ceil(minutes * 60)} s"
