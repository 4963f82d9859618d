"""Numbers over steps, and how few points still show them.

What every attempt of a step recorded is kept column by column. Which attempts are in a history
is told by record.chronicle.histories; each step is there once. Arrays only, no files.
"""

# R attempts, S steps, C columns of a heat map, N layers

from __future__ import annotations

import array
import collections.abc
import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax.record.chronicle.histories import Rows

LAYERS = "layers/"  # begins the name of a vital that has a number for each layer
MEASURED = "measured/"  # before the names of times and rates, which no replay compares
GAP_STEPS = 50  # of training, beside which a held-out loss is put
NUM_POINTS = 4000  # of one series, at most about these
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Steps = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Series:
    """One number for each of some steps."""

    name: str
    steps_S: Steps
    values_S: Floats


@dataclasses.dataclass(frozen=True)
class LayerSeries:
    """One number for each layer at each of some steps."""

    name: str
    steps_S: Steps
    values_SN: npt.NDArray[np.float32]


class Columns:
    """What attempts recorded. `add` numbers them from 0; a number that lacks is no number."""

    def __init__(self) -> None:
        self._steps, self._segments = array.array("q"), array.array("q")
        self._scalars: dict[str, tuple[array.array, array.array]] = {}
        self._layers: dict[tuple[str, int], tuple[array.array, array.array]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, record: collections.abc.Mapping[str, Any]) -> int:
        """Take in the record of a step; returns the attempt's number."""
        row = len(self._steps)
        self._steps.append(record["step"])
        self._segments.append(record["segment"])
        measured = record.get("measured")
        self._add(row, "", record["computed"])
        self._add(row, MEASURED, measured if isinstance(measured, dict) else {})
        return row

    def _add(self, row: int, prefix: str, fields: collections.abc.Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                if name.startswith(LAYERS) and value:
                    self._add_layers(row, name, value)
                continue
            number = value if type(value) is float else as_float(value)
            if number is None:
                continue
            if prefix + name not in self._scalars:
                self._scalars[prefix + name] = array.array("q"), array.array("d")
            rows, values = self._scalars[prefix + name]
            rows.append(row)
            values.append(number)

    def _add_layers(self, row: int, name: str, value: list[Any]) -> None:
        try:
            numbers = array.array("f", value)
        except (TypeError, OverflowError):
            floats = [as_float(one) for one in value]
            if None in floats:
                return
            numbers = array.array("f", floats)  # type: ignore[arg-type]
        key = name, len(numbers)
        if key not in self._layers:
            self._layers[key] = array.array("q"), array.array("f")
        rows, values = self._layers[key]
        rows.append(row)
        values.extend(numbers)

    def history(self, rows: Rows[int]) -> History:
        """What a history recorded; the value of each row is attempt number - step."""
        parts = [np.arange(row.first + row.value, row.stop + row.value) for row in rows]
        attempts = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        within_R = np.zeros(len(self), bool)
        within_R[attempts] = True
        return History(self, within_R)


class History:
    """The attempts that are in a history, and those that are not."""

    def __init__(self, columns: Columns, within_R: npt.NDArray[np.bool_]) -> None:
        self._columns, self.within_R = columns, within_R
        self._steps_R = np.array(columns._steps, np.int64)
        self._segments_R = np.array(columns._segments, np.int64)
        self.steps_S: Steps = self._steps_R[within_R]
        self.segments_S: Steps = self._segments_R[within_R]

    @property
    def names(self) -> list[str]:
        """Of all series, in the order in which they appeared."""
        return list(self._columns._scalars)

    def series(self, name: str) -> Series:
        """A scalar in this history; empty if it was never recorded in it."""
        rows, values = self._scalar(name)
        within = self.within_R[rows]
        return Series(name, self._steps_R[rows[within]], values[within])

    def abandoned(self, name: str) -> Series:
        """A scalar in the attempts outside, in their order; a NaN wherever the steps jump."""
        rows, values = self._scalar(name)
        outside = ~self.within_R[rows]
        rows, values = rows[outside], values[outside]
        steps, segments = self._steps_R[rows], self._segments_R[rows]
        jumps = 1 + np.flatnonzero((np.diff(steps) != 1) | (np.diff(segments) != 0))
        return Series(
            name, np.insert(steps, jumps, steps[jumps]), np.insert(values, jumps, math.nan)
        )

    def layers(self) -> list[LayerSeries]:
        """Every vital that has a number for each layer."""
        found = []
        for (name, num_layers), (rows, values) in self._columns._layers.items():
            rows_S = np.array(rows, np.int64)
            values_SN = np.frombuffer(values, np.float32).reshape(len(rows_S), num_layers)
            within = self.within_R[rows_S]
            if within.any():
                found.append(LayerSeries(name, self._steps_R[rows_S[within]], values_SN[within]))
        return found

    def segment_before(self, step: int) -> int | None:
        """The segment that made the state whose next step is `step`; None if none did."""
        place = int(np.searchsorted(self.steps_S, step - 1))
        if place < len(self.steps_S) and self.steps_S[place] == step - 1:
            return int(self.segments_S[place])
        return None

    def _scalar(self, name: str) -> tuple[Steps, Floats]:
        rows, values = self._columns._scalars.get(name, ((), ()))
        return np.array(rows, np.int64), np.array(values, np.float64)


def as_float(value: Any) -> float | None:
    """A logbook's number, also one that is not finite; None if it is none."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, int | float):  # a bool too: 0 or 1
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


# --- fewer points ---


def thin(
    values_S: Floats, most: int = NUM_POINTS, keep: npt.NDArray[np.integer] | None = None
) -> npt.NDArray[np.int64]:
    """Which points of a series to draw, in order: all of them if they are at most `most`.

    Otherwise the points fall into `most` // 3 buckets, point i of S into i * buckets // S. Kept
    are of each bucket the lowest and the highest finite value; the first and the last point;
    those at the indices `keep`; and those that are not finite, of which there may be many: if
    they are more than `most` // 3, the first of each bucket.
    """
    num_points = len(values_S)
    if num_points <= most:
        return np.arange(num_points)
    num_buckets = most // 3
    bucket_S = np.arange(num_points) * num_buckets // num_points
    finite = np.isfinite(values_S)
    places = np.flatnonzero(finite)
    by_value = places[np.lexsort((values_S[places], bucket_S[places]))]
    lowest, highest = _ends(bucket_S[by_value])
    strange = np.flatnonzero(~finite)
    if len(strange) > num_buckets:
        strange = strange[_ends(bucket_S[strange])[0]]
    ends = np.array([0, num_points - 1])
    kept = np.zeros(0, np.int64) if keep is None else keep.astype(np.int64)
    return np.unique(np.concatenate([by_value[lowest], by_value[highest], strange, ends, kept]))


def middle(line: Series, most: int) -> Series:
    """The median of the finite values of each bucket, at its middle step: where a noisy series is.

    Point i of S falls into bucket i * `most` // S; a bucket without finite values has NaN.
    """
    num_points = len(line.values_S)
    num_buckets = min(most, num_points)
    first, last = _ends(np.arange(num_points) * num_buckets // max(num_points, 1))
    steps = line.steps_S[(first + last) // 2]
    finite = np.where(np.isfinite(line.values_S), line.values_S, math.nan)
    medians = np.full(len(first), math.nan)
    for bucket, (start, stop) in enumerate(zip(first, last + 1, strict=True)):
        values = finite[start:stop]
        values = values[~np.isnan(values)]
        if len(values):
            medians[bucket] = np.median(values)
    return Series(line.name, steps, medians)


def gap(training: Series, held_out: Series, window: int = GAP_STEPS) -> Series:
    """How much higher the loss is held out than in training, at each evaluated step.

    Beside the median of the finite losses of the `window` steps before it; steps that have none
    are left out.
    """
    steps, gaps = [], []
    for step, value in zip(held_out.steps_S, held_out.values_S, strict=True):
        first, stop = np.searchsorted(training.steps_S, [step - window, step])
        before = training.values_S[first:stop]
        before = before[np.isfinite(before)]
        if len(before):
            steps.append(step)
            gaps.append(value - np.median(before))
    name = f"{held_out.name} above training"
    return Series(name, np.array(steps, np.int64), np.array(gaps, np.float64))


def _ends(groups: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The index of the first and of the last element of every run of equal ones."""
    if not len(groups):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    last = np.append(np.flatnonzero(np.diff(groups)), len(groups) - 1)
    return np.append(0, last[:-1] + 1), last


@dataclasses.dataclass(frozen=True)
class Span:
    """Steps first to last, of which `count` are what `what` says."""

    first: int
    last: int
    count: int
    what: str


def spans(steps_S: Steps, labels_S: npt.NDArray[np.str_], most: int = 1000) -> list[Span]:
    """Neighbouring points with one label, as spans; points whose label is "" are in none.

    If there are more than `most` spans, neighbours are put together, of whatever labels.
    """
    first, last = _ends(np.unique(labels_S, return_inverse=True)[1].astype(np.int64))
    found = [
        Span(int(steps_S[a]), int(steps_S[b]), int(b - a + 1), str(labels_S[a]))
        for a, b in zip(first, last, strict=True)
        if labels_S[a]
    ]
    if len(found) <= most:
        return found
    size = -(-len(found) // most)
    return [_together(found[at : at + size]) for at in range(0, len(found), size)]


def _together(parts: list[Span]) -> Span:
    what = sorted({part.what for part in parts})
    count = sum(part.count for part in parts)
    return Span(parts[0].first, parts[-1].last, count, " or ".join(what))


def non_finite(series: Series, most: int = 1000) -> list[Span]:
    """Where a series is "nan", "inf" or "-inf"."""
    values = series.values_S
    labels = np.full(len(values), "", "<U4")
    labels[np.isnan(values)] = "nan"
    labels[values == math.inf] = "inf"
    labels[values == -math.inf] = "-inf"
    return spans(series.steps_S, labels, most)


# --- heat maps ---


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Columns of steps: column c has steps edges[c] to edges[c + 1] - 1."""

    edges: Steps  # [C+1]
    values_CN: npt.NDArray[np.float32]  # NaN: nothing finite was recorded
    strange_CN: npt.NDArray[np.bool_]  # something was that is not finite


def heat_map(series: LayerSeries, most: int, lowest: bool = False) -> HeatMap:
    """At most about `most` columns, step i of S in i * columns // S.

    Of the finite values in a column it keeps the one of the largest magnitude; if `lowest`, the
    one of the smallest. Where steps lack, there are empty columns.
    """
    num_steps, num_layers = series.values_SN.shape
    num_columns = min(num_steps, most)
    column_S = np.arange(num_steps) * num_columns // num_steps
    first, last = _ends(column_S)
    finite_SN = np.isfinite(series.values_SN)
    # NaN where nothing is to be chosen; argmax takes the largest of what is left.
    worst = -np.inf
    size_SN = np.where(finite_SN, np.abs(series.values_SN) * (-1 if lowest else 1), worst)
    values_CN = np.full((num_columns, num_layers), np.nan, np.float32)
    strange_CN = np.logical_or.reduceat(~finite_SN, first, axis=0)
    for column, (start, stop) in enumerate(zip(first, last + 1, strict=True)):
        chosen_N = np.argmax(size_SN[start:stop], axis=0)
        values_CN[column] = series.values_SN[start + chosen_N, np.arange(num_layers)]
    values_CN[~np.isfinite(values_CN)] = np.nan
    starts, stops = series.steps_S[first], series.steps_S[last] + 1
    steps_apart = np.diff(series.steps_S)
    usual = int(np.median(steps_apart)) if len(steps_apart) else 1
    gaps = np.flatnonzero(starts[1:] - stops[:-1] >= 10 * usual) + 1
    empty = np.zeros((1, num_layers))
    return HeatMap(
        edges=np.append(np.insert(starts, gaps, stops[gaps - 1]), stops[-1]),
        values_CN=np.insert(values_CN, gaps, empty * np.nan, axis=0),
        strange_CN=np.insert(strange_CN, gaps, empty.astype(bool), axis=0),
    )
