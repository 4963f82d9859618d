"""The diagnoses of a run for its report: arms as overlaid curves, verdicts in words."""

from __future__ import annotations

import dataclasses
import html
import math
import pathlib
from typing import Any, TypeVar

from palm_jax import files
from palm_jax.diagnosis.arms import Plan
from palm_jax.diagnosis.written import Result, Verdict
from palm_jax.errors import CannotDo

FOLDER = "diagnoses"
WIDTH, HEIGHT, MARGIN = 860, 320, 46
# By kind of arm: colour and title, those that a verdict is read from first.
KINDS = {
    "A": ("#111111", "replay"),
    "N": ("#c0392b", "placebo"),
    "C": ("#2471a3", "other data"),
    "B": ("#d68910", "other state"),
    "E": ("#1e8449", "other state and data"),
    "half rate": ("#7dcea0", "at half the rate"),
    "D": ("#8e44ad", "treatment"),
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """The loss on the probe before and after each step of an arm, nats."""

    name: str
    kind: str
    first: int  # the step before which the first loss was taken
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosed:
    verdict: dict[str, Any]  # as in verdict.json
    curves: tuple[Curve, ...]


def read(run: pathlib.Path) -> list[Diagnosed]:
    """Those with a verdict, oldest first. Raises CannotDo where a file is damaged."""
    found = []
    for path in sorted((run / FOLDER).glob("*/verdict.json")):
        verdict, plan = _described(path, Verdict), _described(path.parent / "plan.json", Plan)
        curves = []
        for file in sorted((path.parent / "arms").glob("*.json")):
            result = _described(file, Result)
            arm = result.arm
            if arm.kind in KINDS:
                # The second half of an arm that goes over the window twice.
                shift = plan.horizon if arm.scored_from == plan.stop else 0
                losses = (result.begin, *result.probe)
                curves.append(Curve(arm.name, arm.kind, arm.scored_from - shift, losses))
        order = list(KINDS)
        curves.sort(key=lambda curve: (-order.index(curve.kind), curve.name))
        found.append(Diagnosed(verdict.model_dump(), tuple(curves)))
    return found


Model = TypeVar("Model", Verdict, Plan, Result)


def _described(path: pathlib.Path, model: type[Model]) -> Model:
    try:
        return files.described(path, model)
    except (OSError, ValueError) as error:
        raise CannotDo(f"{path} is damaged: {error}; remove {path.parent}") from None


def picture(diagnosed: Diagnosed) -> str:
    """The curves as SVG; losses far above the others are cut off at the top."""
    verdict = diagnosed.verdict
    first, stop, onset = verdict["fork"], verdict["stop"], verdict["onset"]
    shown = [_within(curve, first, stop) for curve in diagnosed.curves]
    finite = sorted(y for points in shown for _, y in points if math.isfinite(y))
    if not finite:
        return ""
    low, high = finite[0], finite[-1]
    # One arm that diverges would press all others flat.
    high = min(high, low + 4 * max(finite[len(finite) // 2] - low, 0.05) + 1.0)
    span = max(high - low, 1e-6)

    def x(step: float) -> float:
        return MARGIN + (step - first) / max(stop - first, 1) * (WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        share = (min(loss, high) - low) / span if math.isfinite(loss) else 1.0
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="held-out loss of the arms">'
    ]
    for number in range(5):
        loss = low + span * number / 4
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" '
            f'stroke="#ddd"/><text x="4" y="{y(loss) + 4:.1f}" font-size="12">{loss:.3g}</text>'
        )
        step = first + (stop - first) * number // 4
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - 24}" font-size="12" text-anchor="middle">'
            f"{step:,}</text>"
        )
    parts.append(
        f'<line x1="{x(onset):.1f}" x2="{x(onset):.1f}" y1="{MARGIN / 2}" '
        f'y2="{HEIGHT - MARGIN}" stroke="#888" stroke-dasharray="4 4"/>'
    )
    for curve, points in zip(diagnosed.curves, shown, strict=True):
        colour, title = KINDS[curve.kind]
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3" '
            f'opacity="0.8"><title>{html.escape(curve.name)}: {title}</title></polyline>'
        )
    place = MARGIN
    for kind in dict.fromkeys(curve.kind for curve in reversed(diagnosed.curves)):
        colour, title = KINDS[kind]
        label = f"{kind}: {title}" if kind != "half rate" else title
        parts.append(
            f'<text x="{place}" y="14" font-size="12" fill="{colour}">{html.escape(label)}</text>'
        )
        place += 7 * len(label) + 18
    parts.append("</svg>")
    return "".join(parts)


def _within(curve: Curve, first: int, stop: int) -> list[tuple[int, float]]:
    """Its points from the fork to the stop; an arm that comes from far is shown from there on."""
    return [
        (step, loss) for step, loss in enumerate(curve.losses, curve.first) if first <= step <= stop
    ]
