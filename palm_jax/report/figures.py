"""Panels of the report's page: what is drawn in each, as data for its script (page.js).

Every panel has steps along x. Arrays travel as base64 of little-endian numbers, which is
smaller than text, exact, and has a place for NaN.
"""

# S steps, C columns of a heat map, N layers

from __future__ import annotations

import base64
import collections.abc
import fnmatch
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax.record.chronicle.values import Record
from palm_jax.report import series
from palm_jax.report.marks import KINDS, Mark
from palm_jax.report.series import History, LayerSeries, Series

Panel = dict[str, Any]

# Which series a group has, by patterns, in the order of the page; a series is in the first one.
GROUPS = {
    "Loss": ("loss", "cross_entropy", "z_loss"),
    "Gradients and updates": (
        *("gradient_norm", "clip_factor", "update_rms", "parameter_norm"),
        *("nonfinite_share", "underflow_share", "loss_scale"),
    ),
    "Logits and attention": (
        *("mean_log_z", "max_log_z", "mean_logit"),
        *("max_attention_logit", "attention_entropy"),
    ),
    "Embedding": ("embedding/*",),
    "Other vitals": ("*",),
    "Settings in force": ("rate", "rate_scale", "skip_above", "beta2", "*decay*", "clip_norm"),
    "Throughput": (
        f"{series.MEASURED}tokens_per_second",
        f"{series.MEASURED}step_seconds",
        f"{series.MEASURED}model_flops_utilisation",
        f"{series.MEASURED}model_flops_per_second",
        f"{series.MEASURED}*",
    ),
    "Data": ("batch_size", "tokens", "targets", "first_position", "schedule_step"),
}
_LINEAR = ("Loss", "Settings in force", "Throughput", "Data")
_LIMITS = ("skip_above", "clip_norm")  # infinite where they are off
_NOT_DRAWN = ("applied",)  # is among the marks
_LOWEST = ("entropy",)  # for these it is the low values that are bad
_UNITS = {
    "loss": "nats a token",
    "cross_entropy": "nats a token",
    "z_loss": "nats a token",
    f"{series.MEASURED}step_seconds": "s",
    f"{series.MEASURED}input_wait_seconds": "s",
    f"{series.MEASURED}device_bytes_peak": "bytes",
}
_MANY_TIMES = 30  # the largest over the smallest value, where a logarithmic axis is better
_NUM_CELLS = 60_000  # of a heat map
_MOST_COLUMNS = 1000
_ABANDONED_POINTS = 2000
_MANY_POINTS = 1200  # from which on the middle of a series is drawn, too
_NUM_MIDDLES = 300


def panels(
    history: History,
    evaluations: collections.abc.Sequence[Record],
    keep: collections.abc.Iterable[int] = (),
) -> tuple[list[Panel], dict[str, float]]:
    """All panels in the order of the page, and the series that never change, with their value.

    Args:
      evaluations: of the history, with rising steps.
      keep: steps whose points are never thinned out.
    """
    found, constant = [], {}
    names = [name for name in history.names if name not in _NOT_DRAWN]
    kept = np.array(sorted(set(keep)), np.int64)
    for group, patterns in GROUPS.items():
        for name in dict.fromkeys(n for p in patterns for n in _matching(names, p, group)):
            names.remove(name)
            line = history.series(name)
            values = line.values_S
            if not len(values):
                continue
            if len(values) > 1 and name != "loss" and (values == values[0]).all():
                constant[name] = float(values[0])
                continue
            found.append(_line(group, line, history.abandoned(name), kept))
        if group == "Loss":
            found += _held_out(found, evaluations, history.series("cross_entropy"))
    found += [_heat(layers) for layers in history.layers()]
    return found, constant


def marks(found: collections.abc.Sequence[Mark]) -> list[dict[str, Any]]:
    """Marks by kind: [{kind, name, marks: [[first, last, label], ...]}, ...]."""
    return [
        {
            "kind": kind,
            "name": name,
            "marks": [[m.first, m.last, m.label] for m in found if m.kind == kind],
        }
        for kind, name in KINDS.items()
        if any(mark.kind == kind for mark in found)
    ]


def title(name: str) -> str:
    """A vital's name as words."""
    return name.removeprefix(series.MEASURED).removeprefix(series.LAYERS).replace("_", " ")


def _matching(names: list[str], pattern: str, group: str) -> list[str]:
    if pattern == "*":  # whatever no later group asks for
        later = [p for g, patterns in GROUPS.items() if g != group for p in patterns]
        return [n for n in names if not any(fnmatch.fnmatchcase(n, p) for p in later)]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _line(group: str, line: Series, left: Series, kept: npt.NDArray[np.int64]) -> Panel:
    bad = [] if line.name in _LIMITS else series.non_finite(line)
    drawn = [_points(line, "present", kept)]
    if len(line.steps_S) >= _MANY_POINTS:
        drawn.append(_points(series.middle(line, _NUM_MIDDLES), "middle", kept[:0]))
    if len(left.steps_S):
        drawn.append(_points(left, "abandoned", kept[:0]))
    finite = line.values_S[np.isfinite(line.values_S)]
    wide_range = len(finite) > 0 and finite.min() > 0 and _spread(finite) > _MANY_TIMES
    return {
        "kind": "line",
        "group": group,
        "title": title(line.name),
        "unit": _UNITS.get(line.name, ""),
        "wide": line.name == "loss",
        "log": bool(wide_range and group not in _LINEAR),
        "series": drawn,
        "bad": [[span.first, span.last, span.count, span.what] for span in bad],
        "num_bad": sum(span.count for span in bad),
    }


def _spread(finite: npt.NDArray[np.floating]) -> float:
    low, high = np.percentile(finite, [1, 99])
    return float(high / low) if low > 0 else math.inf


def _points(line: Series, role: str, kept: npt.NDArray[np.int64]) -> Panel:
    most = _ABANDONED_POINTS if role == "abandoned" else series.NUM_POINTS
    at = np.searchsorted(line.steps_S, kept)
    at = at[
        (at < len(line.steps_S)) & (line.steps_S[np.minimum(at, len(line.steps_S) - 1)] == kept)
    ]
    chosen = series.thin(line.values_S, most, at)
    return {
        "role": role,
        "name": title(line.name),
        "x": _encoded(line.steps_S[chosen]),
        "y": _encoded(line.values_S[chosen]),
        "markers": False,
    }


def _held_out(
    drawn: list[Panel], evaluations: collections.abc.Sequence[Record], training: Series
) -> list[Panel]:
    """Puts held-out losses beside the loss; returns panels of what else evaluations say.

    Args:
      training: cross-entropy of the batches, which is what an evaluation's loss is, too.
    """
    others = []
    for split in sorted({str(record.get("split")) for record in evaluations}):
        of_split = [record for record in evaluations if str(record.get("split")) == split]
        lines = {}
        for field in ("loss", "bits_per_byte"):
            rows = [(r["step"], series.as_float(r.get(field))) for r in of_split]
            there = [(step, value) for step, value in rows if value is not None]
            name = f"{title(split)} {title(field)}"
            steps, values = [s for s, _ in there], [v for _, v in there]
            lines[field] = Series(name, np.array(steps, np.int64), np.array(values, np.float64))
        loss = next((panel for panel in drawn if panel["wide"]), None)
        if loss is not None and len(lines["loss"].steps_S):
            panel = _evaluated(lines["loss"], "nats a token")
            loss["series"] += panel["series"]
            loss["bad"] += panel["bad"]
            loss["num_bad"] += panel["num_bad"]
            others.append(_evaluated(series.gap(training, lines["loss"]), "nats a token"))
        elif len(lines["loss"].steps_S):
            others.append(_evaluated(lines["loss"], "nats a token"))
        others.append(_evaluated(lines["bits_per_byte"], "bits"))
    return [panel for panel in others if panel["series"]]


def _evaluated(line: Series, unit: str) -> Panel:
    """Numbers of evaluations, each with a marker."""
    bad = series.non_finite(line)
    points = _points(line, "held_out", np.zeros(0, np.int64)) | {"markers": True}
    return {
        "kind": "line",
        "group": "Loss",
        "title": line.name,
        "unit": unit,
        "wide": False,
        "log": False,
        "series": [points] if len(line.steps_S) else [],
        "bad": [[span.first, span.last, span.count, span.what] for span in bad],
        "num_bad": sum(span.count for span in bad),
    }


def _heat(layers: LayerSeries) -> Panel:
    num_layers = layers.values_SN.shape[1]
    lowest = any(word in layers.name for word in _LOWEST)
    most = max(1, min(_MOST_COLUMNS, _NUM_CELLS // num_layers))
    heat = series.heat_map(layers, most, lowest)
    finite = heat.values_CN[np.isfinite(heat.values_CN)]
    wide_range = len(finite) > 0 and finite.min() > 0 and _spread(finite) > _MANY_TIMES
    per_column = -(-len(layers.steps_S) // most)
    kept = "lowest" if lowest else "largest"
    return {
        "kind": "heat",
        "group": "Layer by layer",
        "title": title(layers.name),
        "unit": "" if per_column == 1 else f"{kept} of {per_column} steps",
        "wide": False,
        "log": bool(wide_range),
        "layers": num_layers,
        "x": _encoded(heat.edges),
        "z": _encoded(heat.values_CN),  # column by column
        "bad": _encoded(heat.strange_CN.astype(np.uint8)) if heat.strange_CN.any() else None,
        "num_bad": int(heat.strange_CN.sum()),
    }


def _encoded(numbers: npt.NDArray[Any]) -> dict[str, str]:
    """As {type, data}: the smallest type that holds all of the numbers exactly."""
    candidates = {"i": ("<i4", "<f8"), "u": ("u1",), "f": ("<f4", "<f8")}[numbers.dtype.kind]
    for kind in candidates:
        with np.errstate(over="ignore", invalid="ignore"):
            small = numbers.astype(kind)
            exact = np.array_equal(
                small.astype(numbers.dtype), numbers, equal_nan=numbers.dtype.kind == "f"
            )
        if exact:
            break
    return {"type": kind.strip("<"), "data": base64.b64encode(small.tobytes()).decode("ascii")}
