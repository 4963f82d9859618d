"""What number formats would do to a gradient, to an update, and to a sum: counts of elements.

Pure numbers on NumPy arrays: casts are those of ml_dtypes, which rounds to nearest, ties to even.
"""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

FORMATS: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3": ml_dtypes.float8_e4m3fn,
}
OF_GRADIENTS = ("float16", "bfloat16", "E5M2")
OF_WEIGHTS = ("float32", "float16", "bfloat16")
SCALES = tuple(2.0**power for power in range(17))  # loss scales
SIZES = (1e-2, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)  # of updates

Arrays = collections.abc.Iterable[npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a gradient's elements that are not 0, in a format after a loss scale."""

    format: str
    scale: float
    zero: float  # flushed to 0
    subnormal: float  # kept with less than the format's precision
    overflow: float  # not finite any more
    error: float  # norm of what the format changes, relative to the gradient's; NaN: overflow


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """Share of weights that are the same after an update as before, where stored in a format."""

    format: str
    size: float | None  # of the update, up and down; None: the update of the step itself
    share: float


@dataclasses.dataclass(frozen=True)
class Sum:
    """The same term added again and again, in a format."""

    format: str
    term: float
    count: int
    total: float
    stalls_after: int | None  # terms, from where on the sum stays as it is; None: it does not


def cast(x: npt.NDArray[Any], format: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return x.astype(FORMATS[format])


def gradient_shares(
    gradient: Arrays,
    formats: collections.abc.Iterable[str] = OF_GRADIENTS,
    scales: collections.abc.Iterable[float] = SCALES,
) -> list[Shares]:
    """`Shares` for each format and loss scale, of all arrays together.

    Args:
      gradient: float32 arrays; elements that are 0 already are left out.
    """
    values = np.concatenate([np.ravel(g) for g in gradient]).astype(np.float32)
    values = values[values != 0]
    square = np.sum(values.astype(np.float64) ** 2)
    rows = []
    for format in formats:
        smallest_normal = float(ml_dtypes.finfo(FORMATS[format]).smallest_normal)
        for scale in scales:
            held = cast(values * np.float32(scale), format).astype(np.float32)
            finite, size = np.isfinite(held), np.abs(held)
            with np.errstate(invalid="ignore"):
                lost = np.sum((held.astype(np.float64) / scale - values) ** 2)
            rows.append(
                Shares(
                    format=format,
                    scale=scale,
                    zero=_share(size == 0),
                    subnormal=_share((size > 0) & (size < smallest_normal)),
                    overflow=_share(~finite),
                    error=float(np.sqrt(lost / square)) if finite.all() and square else np.nan,
                )
            )
    return rows


def exact_zeros(gradient: Arrays) -> float:
    """Share of elements that are 0 in float32, such as rows of tokens that did not occur."""
    return _share(np.concatenate([np.ravel(g) == 0 for g in gradient]))


def unchanged(
    weights: Arrays,
    update: Arrays | None = None,
    formats: collections.abc.Iterable[str] = OF_WEIGHTS,
    sizes: collections.abc.Iterable[float] = SIZES,
) -> list[Unchanged]:
    """`Unchanged` for each format and size of update, and for `update` itself.

    Args:
      weights: float32; each format stores them rounded.
      update: what is added to them; elements that are 0 are left out.
    """
    flat = np.concatenate([np.ravel(w) for w in weights]).astype(np.float32)
    rows = []
    for format in formats:
        stored = cast(flat, format).astype(np.float32)
        for size in sizes:
            same = [
                _share(_added(stored, np.float32(sign * size), format) == stored)
                for sign in (1, -1)
            ]
            rows.append(Unchanged(format, size, float(np.mean(same))))
        if update is not None:
            change = np.concatenate([np.ravel(u) for u in update]).astype(np.float32)
            there = change != 0
            after = _added(stored[there], change[there], format)
            rows.append(Unchanged(format, None, _share(after == stored[there])))
    return rows


def _added(stored: npt.NDArray[Any], change: Any, format: str) -> npt.NDArray[Any]:
    """Rounded once, from a sum that float64 holds exactly or nearly so."""
    exact = stored.astype(np.float64) + change
    return cast(exact, format).astype(np.float32)


def repeated_sum(
    term: float = 1e-4,
    count: int = 10_000,
    formats: collections.abc.Iterable[str] = OF_WEIGHTS,
) -> list[Sum]:
    """One term added `count` times to 0, each sum rounded to the format."""
    rows = []
    for format in formats:
        kind = FORMATS[format]
        one, total, stalled = kind(term), kind(0), None
        for number in range(count):
            following = kind(total + one)
            if following == total:
                stalled = number
                break
            total = following
        rows.append(Sum(format, term, count, float(total), stalled))
    return rows


def _share(which: npt.NDArray[Any]) -> float:
    return float(np.mean(which)) if which.size else 0.0
