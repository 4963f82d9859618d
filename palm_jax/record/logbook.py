"""The run's record: strict JSON lines, append-only, in parts RUN/logbook/NNNN.jsonl.

Every opening starts a new part, because a bucket cannot append; no part is ever rewritten.
A line is one record, {"event": "start" | "step" | "evaluation" | "checkpoint" | "stop" | ...}.
JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf".

A step's record has three groups. `computed` holds the numbers that a replay must reproduce,
`bits` the same fields as exact bit patterns, and `measured` times and rates, which are never
compared.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np

from palm_jax import files
from palm_jax.errors import CannotDo

_PART = re.compile(r"[0-9]{4,18}\.jsonl")
# Numbers of steps, segments and attempts, which others put into arrays.
_END = 2**53


@dataclasses.dataclass(frozen=True)
class Torn:
    """An incomplete last line of a part: a process died while writing it."""

    path: pathlib.Path
    line: int  # counted from 1


class Logbook:
    """A part being written. Records are kept until `flush`, which puts them on the disk."""

    def __init__(self, path: pathlib.Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._lines: list[str] = []

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str]) -> Logbook:
        """Start the next part of the run's logbook.

        Raises:
          CannotDo: the part cannot be created.
        """
        folder = pathlib.Path(run_dir) / "logbook"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = max((int(path.stem) for path in _parts(folder)), default=-1) + 1
            while True:
                path = folder / f"{number:04d}.jsonl"
                try:
                    # Exclusive: two writers never share a part.
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                    descriptor = os.open(path, flags, 0o666)
                    break
                except FileExistsError:
                    number += 1
            _sync_folder(folder)
        except OSError as error:
            raise CannotDo(f"cannot start a part of the logbook in {folder}: {error}") from error
        return cls(path, descriptor)

    def append(self, event: str, **fields: Any) -> None:
        """Add a record. Numbers may be Python's, NumPy's or arrays; arrays become lists.

        Events other than steps get the `time`, in UTC.
        """
        assert self._descriptor is not None, f"{self.path} is closed"
        assert event, "a record needs an event"
        if event != "step":
            fields["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = {"event": event, **{key: plain(value) for key, value in fields.items()}}
        self._lines.append(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")

    def step(
        self,
        *,
        segment: int,
        attempt: int,
        step: int,
        computed: Mapping[str, Any],
        measured: Mapping[str, Any],
    ) -> None:
        """Add a step's record; `bits` are derived from `computed`, so pass exact dtypes."""
        self.append(
            "step",
            segment=segment,
            attempt=attempt,
            step=step,
            computed=dict(computed),
            bits=exact_bits(computed),
            measured=dict(measured),
        )

    def flush(self) -> None:
        """Write the records with a single write, and wait until they are on the disk.

        Raises:
          CannotDo: the disk did not take them; none of them is left in the file.
        """
        assert self._descriptor is not None, f"{self.path} is closed"
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        written = 0
        try:
            start = os.fstat(self._descriptor).st_size
            while written < len(data):  # a disk or a signal may cut a write short
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            if written:
                # Nothing half-written: an incomplete line in the middle would be an error.
                os.ftruncate(self._descriptor, start)
            raise CannotDo(f"cannot write the logbook {self.path}: {error}") from error
        self._lines.clear()

    def close(self) -> None:
        if self._descriptor is None:
            return
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Logbook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


class Unwritten(Logbook):
    """Takes records and writes none: for the processes that are not the first of a run."""

    def __init__(self) -> None:
        self._lines = []

    def append(self, event: str, **fields: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def number(value: Any) -> float | None:
    """What `plain` made of a number, also one that is not finite; None if it is none."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: nested lists and dicts of str, int, float, bool and None.

    Integers stay Python integers, of any size. Non-finite numbers become "nan", "inf", "-inf".

    Raises:
      TypeError: a value, or a key that is not text, has no place in JSON.
    """
    if hasattr(value, "dtype"):
        array = _numbers(value)
        if array.dtype.kind not in "biu":
            with np.errstate(invalid="ignore"):  # NumPy warns about a signalling NaN
                array = array.astype(np.float64)  # exact
        value = array.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key of a record must be text, not {key!r}")
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    raise TypeError(f"a record cannot hold {value!r} of type {type(value).__name__}")


def exact_bits(computed: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with each floating number as the hexadecimal digits of its bits.

    8 digits for float32, 4 for bfloat16, 16 for a Python float. Arrays become nested lists;
    integers, booleans and text stay as they are.
    """
    return {key: _bits(value) for key, value in computed.items()}


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        value = np.float64(value)
    if not hasattr(value, "dtype"):
        return plain(value)
    array = _numbers(value)
    if array.dtype.kind in "biu":
        return array.tolist()
    num_bytes = array.dtype.itemsize
    unsigned = np.dtype(f"u{num_bytes}").newbyteorder(array.dtype.byteorder)
    words = np.ascontiguousarray(array).reshape(-1).view(unsigned).tolist()
    digits = np.array([f"{word:0{2 * num_bytes}x}" for word in words], dtype=object)
    return digits.reshape(array.shape).tolist()


def _numbers(value: Any) -> np.ndarray:
    array = np.asarray(value)
    # "V" holds bfloat16 and its like, but raw bytes and structures too.
    if array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.isbuiltin == 2):
        return array
    raise TypeError(f"a record cannot hold an array of {array.dtype}")


@dataclasses.dataclass(frozen=True)
class Reading:
    records: list[dict[str, Any]]
    torn: list[Torn]


def read(run_dir: str | os.PathLike[str]) -> Reading:
    """All records in the order of parts and lines, and the lines that were torn.

    Errors as in `scan`.
    """
    reading = Reading([], [])
    for found in scan(run_dir):
        if isinstance(found, Torn):
            reading.torn.append(found)
        else:
            reading.records.append(found)
    return reading


def scan(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any] | Torn]:
    """As `read`, but one at a time: a long run's logbook need not fit in memory.

    Raises:
      CannotDo: the run has no logbook, a part of it cannot be read, or a line that is not the last
        of its part is not a record.
    """
    for _, records in scan_parts(run_dir):
        yield from records


def scan_parts(
    run_dir: str | os.PathLike[str],
) -> Iterator[tuple[pathlib.Path, Iterator[dict[str, Any] | Torn]]]:
    """As `scan`, part by part: a process that died shows in where its part ends."""
    folder = pathlib.Path(run_dir) / "logbook"
    if not folder.is_dir():
        raise CannotDo(f"{run_dir} is damaged, or no run: it has no logbook/; restore it")
    for path in _parts(folder):
        yield path, _scan_part(path)


def _scan_part(path: pathlib.Path) -> Iterator[dict[str, Any] | Torn]:
    try:
        file = files.opened(path)
    except OSError as error:
        raise CannotDo(f"cannot read the logbook {path}: {error}; restore it") from error
    with file:
        line, following, number = file.readline(), b"", 1
        while line:
            following = file.readline()
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no end")
                yield _parse(line)
            except ValueError as error:
                if following:
                    raise CannotDo(
                        f"{path}, line {number} is not a record of a logbook ({error}); nothing "
                        "after it can be trusted: restore the file from a copy"
                    ) from error
                yield Torn(path, number)
            line, number = following, number + 1


def _parse(line: bytes) -> dict[str, Any]:
    record = files.parsed(line.decode())
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise ValueError("a record is an object with an event")
    if record["event"] == "step":
        for field in ("segment", "attempt", "step"):
            if not is_count(record.get(field)):
                raise ValueError(f"the record of a step lacks {field!r}")
        for field in ("computed", "bits"):
            if not isinstance(record.get(field), dict):
                raise ValueError(f"the record of a step lacks {field!r}")
    return record


def is_count(value: Any) -> TypeGuard[int]:
    """A whole number that is not negative and no larger than any that is written here."""
    return type(value) is int and 0 <= value < _END


def required(record: Mapping[str, Any], path: pathlib.Path, **kinds: type) -> None:
    """Check an event that is relied on.

    Args:
      path: of the run.
      kinds: fields and their types; int means `is_count`.
    Raises:
      CannotDo: a field lacks, or is of another type.
    """
    for field, kind in kinds.items():
        value = record.get(field)
        if not (is_count(value) if kind is int else isinstance(value, kind)):
            raise damaged(record, path, field)


def damaged(record: Mapping[str, Any], path: pathlib.Path, field: str) -> CannotDo:
    """The error of a field that lacks, or makes no sense."""
    name, value = record["event"], json.dumps(record.get(field))
    where = f" of step {record['step']}" if name == "step" else ""
    return CannotDo(
        f"the logbook of {path} is damaged: an event {name!r}{where} has {field}={value[:100]}; "
        "restore it"
    )


def _parts(folder: pathlib.Path) -> list[pathlib.Path]:
    found = [path for path in folder.iterdir() if _PART.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem))


def _sync_folder(folder: pathlib.Path) -> None:
    # A new file survives a loss of power only when its folder's entry does.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class History:
    """Which steps were executed how often, and what their first attempt computed."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[int, int], int] = {}
        self._first: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self.torn: list[Torn] = []

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str]) -> History:
        """Errors as in `scan`."""
        history = cls()
        for found in scan(run_dir):
            if isinstance(found, Torn):
                history.torn.append(found)
            else:
                history.add(found)
        return history

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in a record; events other than steps change nothing."""
        if record["event"] != "step":
            return
        place, attempt = (record["segment"], record["step"]), record["attempt"]
        self._attempts[place] = max(attempt, self._attempts.get(place, 0))
        if place not in self._first or attempt < self._first[place][0]:
            self._first[place] = (attempt, record["bits"])

    def steps_of(self, segment: int) -> int:
        """The step after the last one that was recorded in a segment; 0 if none was."""
        return max((step + 1 for s, step in self._attempts if s == segment), default=0)

    def next_attempt(self, segment: int, step: int) -> int:
        """Number of the next execution of a step; the first is 1."""
        return self._attempts.get((segment, step), 0) + 1

    def first_attempt(self, segment: int, step: int) -> dict[str, Any] | None:
        """Bits of the earliest recorded attempt; None if the step was never recorded."""
        found = self._first.get((segment, step))
        return None if found is None else found[1]


def last_attempts(run_dir: str | os.PathLike[str], segment: int) -> dict[int, dict[str, Any]]:
    """{step: the record of its last attempt} of a segment. Errors as in `scan`."""
    return {
        found["step"]: found
        for found in scan(run_dir)
        if isinstance(found, dict) and found["event"] == "step" and found["segment"] == segment
    }


def skip_limits(run_dir: str | os.PathLike[str], segment: int) -> dict[int, float]:
    """{step: its recorded `skip_above`}, each step's last attempt. Errors as in `scan`.

    The limit is a control: whoever executes a step again gives it the one that it had.
    """
    limits = {}
    for step, found in last_attempts(run_dir, segment).items():
        if "skip_above" not in found["computed"]:
            continue
        limit = number(found["computed"]["skip_above"])
        if limit is None:
            raise damaged(found, pathlib.Path(run_dir), "computed")
        limits[step] = limit
    return limits


MICROBATCH_DIGESTS = "microbatch_digests"
# What log.microbatch_digests and log.vitals switch on and off, and per-layer and per-table fields.
_OPTIONAL = {
    MICROBATCH_DIGESTS,
    "attention_entropy",
    "clip_factor",
    "max_attention_logit",
    "max_log_z",
    "mean_logit",
    "nonfinite_share",
    "underflow_share",
}


def is_optional(field: str) -> bool:
    """Whether a step's record may lack the field, so that it is compared where both have it."""
    return field in _OPTIONAL or "/" in field


def differing_fields(first: Mapping[str, Any], again: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that differ or that one of the two lacks, in the order of `first`."""
    missing = object()
    return tuple(
        field
        for field in dict.fromkeys([*first, *again])
        if first.get(field, missing) != again.get(field, missing)
        and not (is_optional(field) and not (field in first and field in again))
    )


def compare_bits(first: Mapping[str, Any], again: Mapping[str, Any]) -> str | None:
    """Name of the first of `differing_fields`; None if all agree."""
    return next(iter(differing_fields(first, again)), None)


def differing_microbatches(first: Mapping[str, Any], again: Mapping[str, Any]) -> list[int]:
    """Which microbatches of a step had other gradients, where both records can tell."""
    before, after = first.get(MICROBATCH_DIGESTS), again.get(MICROBATCH_DIGESTS)
    if not (isinstance(before, list) and isinstance(after, list)):
        return []
    pairs = enumerate(zip(before, after, strict=False))
    return [place for place, (one, other) in pairs if one != other]
