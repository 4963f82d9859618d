"""Every line is strict JSON, every part is only ever appended to, every bit is kept."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import tracemalloc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from palm_jax.errors import CannotDo
from palm_jax.record import logbook
from palm_jax.record.logbook import History, Logbook, Torn


def strictly(line: str) -> dict[str, Any]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(line, parse_constant=refuse)


def write_step(book: Logbook, step: int, *, attempt: int = 1, segment: int = 0, **computed: Any):
    book.step(segment=segment, attempt=attempt, step=step, computed=computed, measured={"s": 0.5})


def test_records_come_back_in_the_order_of_parts_and_lines(tmp_path):
    with Logbook.open(tmp_path) as book:
        book.append("start", environment={"jax": "1", "flags": ["--a"], "none": None})
        write_step(book, 0, loss=np.float32(1.5))
    with Logbook.open(tmp_path) as book:
        book.append("stop", reason="é \n ☃")
    assert [p.name for p in sorted((tmp_path / "logbook").iterdir())] == [
        "0000.jsonl",
        "0001.jsonl",
    ]
    reading = logbook.read(tmp_path)
    assert reading.torn == []
    times = [record.pop("time") for record in reading.records if record["event"] != "step"]
    assert times == sorted(times)
    assert reading.records == [
        {"event": "start", "environment": {"jax": "1", "flags": ["--a"], "none": None}},
        {
            "event": "step",
            "segment": 0,
            "attempt": 1,
            "step": 0,
            "computed": {"loss": 1.5},
            "bits": {"loss": "3fc00000"},
            "measured": {"s": 0.5},
        },
        {"event": "stop", "reason": "é \n ☃"},
    ]


def test_every_opening_starts_a_new_part_and_touches_no_old_one(tmp_path):
    with Logbook.open(tmp_path) as book:
        book.append("start")
    before = book.path.read_bytes()
    books = [Logbook.open(tmp_path), Logbook.open(tmp_path)]  # two writers at once
    assert len({b.path for b in books}) == 2
    for b in books:
        b.append("start")
        b.close()
    assert book.path.read_bytes() == before
    (tmp_path / "logbook" / "9999.jsonl").write_text('{"event":"older"}\n')
    (tmp_path / "logbook" / "10000.jsonl").write_text('{"event":"newer"}\n')
    (tmp_path / "logbook" / "notes.txt").write_text("not a part")
    with Logbook.open(tmp_path) as book:
        assert book.path.name == "10001.jsonl"  # numbers, not text
        book.append("last")
    events = [record["event"] for record in logbook.read(tmp_path).records]
    assert events == ["start", "start", "start", "older", "newer", "last"]


def test_non_finite_numbers_are_written_as_text(tmp_path):
    values = {"a": math.nan, "b": np.float32("inf"), "c": jnp.float32(-math.inf)}
    with Logbook.open(tmp_path) as book:
        write_step(book, 0, **values, d=np.array([1, np.nan], np.float32))
        book.append("evaluation", loss=math.nan, nested=[{"x": math.inf}])
    lines = [strictly(line) for line in book.path.read_text().splitlines()]
    assert lines[0]["computed"] == {"a": "nan", "b": "inf", "c": "-inf", "d": [1.0, "nan"]}
    assert lines[0]["bits"] == {
        "a": "7ff8000000000000",
        "b": "7f800000",
        "c": "ff800000",
        "d": ["3f800000", "7fc00000"],
    }
    assert lines[1].pop("time")
    assert lines[1] == {"event": "evaluation", "loss": "nan", "nested": [{"x": "inf"}]}


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_bits_of_float32_are_the_patterns_themselves(pattern):
    value = np.array(pattern, np.uint32).view(np.float32)
    assert logbook.exact_bits({"x": value, "y": jnp.asarray(value)}) == {
        "x": f"{pattern:08x}",
        "y": f"{pattern:08x}",
    }
    text = json.dumps(logbook.plain(value), allow_nan=False)
    again = np.float32(json.loads(text))  # takes "nan" and "inf" as well
    assert again.tobytes() == value.tobytes() or (np.isnan(again) and np.isnan(value))


@hypothesis.given(st.floats())
def test_bits_of_python_floats_are_64(value):
    assert logbook.exact_bits({"x": value}) == {"x": struct.pack(">d", value).hex()}


def test_bits_of_other_kinds():
    computed = {
        "bfloat16": ml_dtypes.bfloat16(1.0),
        "float16": np.float16(-0.0),
        "big_endian": np.array(1.0, ">f4"),
        "int32": np.int32(-5),
        "large": 2**70,
        "flag": np.bool_(True),
        "digest": "0123456789abcdef",
        "none": None,
        "rows": np.ones((1, 2), ml_dtypes.bfloat16),
    }
    assert logbook.exact_bits(computed) == {
        "bfloat16": "3f80",
        "float16": "8000",
        "big_endian": "3f800000",
        "int32": -5,
        "large": 2**70,
        "flag": True,
        "digest": "0123456789abcdef",
        "none": None,
        "rows": [["3f80", "3f80"]],
    }
    assert logbook.plain(computed)["rows"] == [[1.0, 1.0]]


@pytest.mark.parametrize("count", [2**31 - 1, 2**24, 2**53, 2**64])
def test_counters_do_not_overflow(tmp_path, count):
    with Logbook.open(tmp_path) as book:
        write_step(book, 0, tokens=count + 1)
    [record] = logbook.read(tmp_path).records
    assert record["computed"]["tokens"] == record["bits"]["tokens"] == count + 1


@pytest.mark.parametrize("value", [object(), {1: 2}, 1j, np.complex64(1), b"x", np.zeros(2, "V4")])
def test_what_json_cannot_hold_is_refused(tmp_path, value):
    with Logbook.open(tmp_path) as book:
        with pytest.raises(TypeError):
            book.append("start", value=value)
        with pytest.raises(TypeError):
            book.step(segment=0, attempt=1, step=0, computed={"value": value}, measured={})
    assert logbook.read(tmp_path).records == []


def test_lines_reach_the_file_at_flush_in_one_write(tmp_path, monkeypatch):
    writes = []
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(data) or true_write(fd, data))
    book = Logbook.open(tmp_path)
    for step in range(100):
        write_step(book, step, loss=np.float32(step))
    assert book.path.read_bytes() == b""
    book.flush()
    book.flush()
    assert len(writes) == 1
    assert book.path.read_bytes() == writes[0]
    assert writes[0].count(b"\n") == 100
    book.close()
    book.close()


def test_a_disk_that_takes_half_leaves_no_half_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Logbook.open(tmp_path) as book:
        book.append("start")
        book.flush()
        for step in range(100):
            write_step(book, step, loss=np.float32(step))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # as a full disk would
        try:
            with pytest.raises(CannotDo, match=r"cannot write the logbook .*0000\.jsonl"):
                book.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [r["event"] for r in logbook.read(tmp_path).records] == ["start"]
    reading = logbook.read(tmp_path)  # closing tried again
    assert len(reading.records) == 101
    assert reading.torn == []


def test_a_place_that_cannot_hold_a_logbook_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotDo, match=r"cannot start a part of the logbook in .*file"):
        Logbook.open(tmp_path / "file")
    with pytest.raises(CannotDo, match="it has no logbook/"):
        logbook.read(tmp_path / "file")


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_part_cut_anywhere_loses_only_its_last_line_and_says_so(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    with Logbook.open(run) as book:
        for step in range(4):
            write_step(book, step, note="é")
    with Logbook.open(run) as later:
        later.append("start")
    whole = book.path.read_bytes()
    kept = whole[: data.draw(st.integers(0, len(whole)))]
    book.path.write_bytes(kept)
    complete = kept.count(b"\n")
    is_torn = not (kept.endswith(b"\n") or kept == b"")
    reading = logbook.read(run)
    assert [r.get("step") for r in reading.records] == [*range(complete), None]
    assert reading.torn == ([Torn(book.path, complete + 1)] if is_torn else [])


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "step", "lo',
        b"\0\0\0\0",
        b'{"event": "evaluation", "loss": NaN}',
        b'{"event": "evaluation", "loss": -Infinity}',
        b'{"no_event": 1}',
        b"[1]",
        b"",
        b'\xff{"event": "start"}',
        b'{"event": "step", "segment": 0, "attempt": 1, "step": 2, "computed": {}}',
    ],
)
def test_a_bad_line_is_torn_at_the_end_and_an_error_elsewhere(tmp_path, line):
    good = b'{"event":"start"}\n'
    (tmp_path / "logbook").mkdir()
    path = tmp_path / "logbook" / "0000.jsonl"
    path.write_bytes(good + line + b"\n")
    reading = logbook.read(tmp_path)
    assert reading.records == [{"event": "start"}]
    assert reading.torn == [Torn(path, 2)]
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(CannotDo, match=r"0000\.jsonl, line 2 is not a record"):
        logbook.read(tmp_path)


def test_history_numbers_attempts_and_keeps_the_first(tmp_path):
    with Logbook.open(tmp_path) as book:
        write_step(book, 3, loss=np.float32(1), ids="aa")
        write_step(book, 4, loss=np.float32(2))
    with Logbook.open(tmp_path) as book:
        write_step(book, 3, attempt=2, loss=np.float32(-1))
        write_step(book, 3, segment=1, loss=np.float32(5))
        book.append("evaluation", segment=0, step=4)
    with book.path.open("ab") as file:
        file.write(b'{"event":"step","segm')
    history = History.read(tmp_path)
    assert history.torn == [Torn(book.path, 4)]
    assert [history.next_attempt(0, s) for s in (2, 3, 4)] == [1, 3, 2]
    assert history.next_attempt(1, 3) == 2
    assert history.first_attempt(0, 3) == {"loss": "3f800000", "ids": "aa"}
    assert history.first_attempt(1, 3) == {"loss": "40a00000"}
    assert history.first_attempt(0, 2) is None
    history.add(logbook.read(tmp_path).records[0] | {"attempt": 3, "bits": {}})
    assert history.next_attempt(0, 3) == 4
    assert history.first_attempt(0, 3) == {"loss": "3f800000", "ids": "aa"}


def test_bits_are_compared_field_by_field():
    first = {"loss": "3f800000", "ids": "aa", "tokens": 5}
    assert logbook.compare_bits(first, dict(reversed(first.items()))) is None
    assert logbook.compare_bits(first, {**first, "ids": "ab"}) == "ids"
    assert logbook.compare_bits(first, {"loss": "3f800000", "tokens": 5}) == "ids"
    assert logbook.compare_bits(first, {**first, "norm": "0"}) == "norm"
    zeros = [logbook.exact_bits({"x": np.float32(x)}) for x in (0.0, -0.0)]
    assert logbook.compare_bits(*zeros) == "x"
    nan = logbook.exact_bits({"x": np.float32("nan")})
    assert logbook.compare_bits(nan, dict(nan)) is None


def test_memory_stays_flat_over_flushes(tmp_path):
    with Logbook.open(tmp_path) as book:
        sizes = []
        tracemalloc.start()
        for step in range(300):
            write_step(book, step, loss=np.float32(step), norms=np.zeros(20, np.float32))
            if step % 100 == 99:
                book.flush()
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[2] < sizes[0] + 20_000
