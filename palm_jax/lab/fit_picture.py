"""A picture of a fitted law: SVG, without anything from outside."""

from __future__ import annotations

import math

import numpy as np

from palm_jax import svg
from palm_jax.lab.fit import Law, Runs

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 24, 56, 52


def draw(runs: Runs, law: Law, title: str) -> str:
    """Loss over training FLOPs: a ring for each run, and the law's lowest loss as a line."""
    spent_R = 6 * runs.parameters_R * runs.tokens_R
    low, high = float(spent_R.min()) / 1.5, float(spent_R.max()) * 10
    budgets = np.geomspace(low, high, 60)
    best = np.array([law.optimum(float(budget)).loss_nats for budget in budgets])
    bottom = min(float(best.min()), float(runs.loss_R.min()))
    top = max(float(best.max()), float(runs.loss_R.max()))
    floor, ceiling = HEIGHT - BOTTOM, TOP

    def x(flops: float) -> float:
        return LEFT + math.log(flops / low) / math.log(high / low) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return floor - math.log(loss / bottom) / math.log(top / bottom) * (floor - ceiling)

    lines = [
        svg.text(LEFT, 20, title, size=15),
        svg.text(LEFT, 40, "loss over training FLOPs: runs, and the law's lowest loss (line)"),
        svg.rule(LEFT, floor, WIDTH - RIGHT, floor),
    ]
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        lines.append(svg.rule(x(10.0**power), floor, x(10.0**power), ceiling, svg.FAINT))
        lines.append(svg.text(x(10.0**power), floor + 18, f"1e{power}", anchor="middle"))
    for loss in np.geomspace(bottom, top, 5):
        lines.append(svg.rule(LEFT, y(loss), WIDTH - RIGHT, y(loss), svg.FAINT))
        lines.append(svg.text(LEFT - 6, y(loss) + 4, f"{loss:.3g}", anchor="end"))
    for spent, loss, size in zip(spent_R, runs.loss_R, runs.parameters_R, strict=True):
        lines.append(
            f'<circle cx="{x(spent):.1f}" cy="{y(loss):.1f}" r="3.5" fill="none" '
            f'stroke="{svg.BAR}"><title>{size:.3g} parameters, loss {loss:.4g}</title></circle>'
        )
    points = " ".join(f"{x(b):.1f},{y(v):.1f}" for b, v in zip(budgets, best, strict=True))
    lines.append(f'<polyline points="{points}" fill="none" stroke="#0550ae" stroke-width="2"/>')
    lines.append(svg.text(WIDTH - RIGHT, HEIGHT - 12, "training FLOPs, 6ND", anchor="end"))
    return svg.document(WIDTH, HEIGHT, title, lines)
