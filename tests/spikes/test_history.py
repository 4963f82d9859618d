"""A run's history from its logbook: each step once, and the same incidents however it was read."""

from __future__ import annotations

import json
import math
import pathlib
import random
import tempfile
from typing import Any

import pytest
import series
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_jax.config import Spikes
from palm_jax.errors import CannotDo
from palm_jax.record import logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.record.segments import Departure, Segment
from palm_jax.spikes import detection, history
from palm_jax.spikes.detection import Detector
from palm_jax.spikes.incidents import Incident
from palm_jax.spikes.policy import Rollback, decide

DEFAULT = Spikes()


def run_at(path: pathlib.Path, *parents: Departure) -> RunFolder:
    """A run's folder with segment 0, and one more for each departure."""
    run = RunFolder(path)
    for number, parent in enumerate([None, *parents]):
        segment = Segment(
            segment=number, parent=parent, start_step=0 if parent is None else parent.step
        )
        run.segment(number).mkdir(parents=True)
        text = segment.model_dump_json()
        (run.segment(number) / segments.FILE_NAME).write_text(text)
    (path / "logbook").mkdir()
    return run


def write(
    run: RunFolder,
    values: dict[int, Any],
    *,
    segment: int = 0,
    attempt: int = 1,
    events: tuple[tuple[str, dict[str, Any]], ...] = (),
) -> None:
    """A part of the logbook with these losses by step, then `events`."""
    with logbook.Logbook.open(run.path) as book:
        for step, loss in values.items():
            computed = loss if isinstance(loss, dict) else {"loss": loss}
            book.step(segment=segment, attempt=attempt, step=step, computed=computed, measured={})
        for name, fields in events:
            book.append(name, **fields)


def losses(run: RunFolder, **which: Any) -> list[tuple[int, float]]:
    return [(step, vitals.loss) for step, vitals in history.steps(run, **which)]


def test_a_step_that_was_executed_again_is_there_once_with_its_last_attempt(tmp_path):
    run = run_at(tmp_path)
    write(run, {0: 3.0, 1: 2.9, 2: 2.8, 3: 2.7})
    write(run, {2: 2.8, 3: 2.6, 4: 2.5}, attempt=2)
    assert losses(run) == [(0, 3.0), (1, 2.9), (2, 2.8), (3, 2.6), (4, 2.5)]
    assert losses(run, before=2) == [(0, 3.0), (1, 2.9)]


def test_a_rollback_leaves_behind_what_came_after_the_departure(tmp_path):
    """Reach step 10, roll back to 6, reach 12; roll back to 8, reach 9."""
    run = run_at(tmp_path, Departure(segment=0, step=6), Departure(segment=1, step=8))
    write(run, dict.fromkeys(range(10), 1.0))
    write(run, dict.fromkeys(range(6, 12), 2.0), segment=1)
    write(run, {8: 3.0}, segment=2)
    assert losses(run) == [
        *((s, 1.0) for s in range(6)), *((s, 2.0) for s in (6, 7)), (8, 3.0)
    ]  # fmt: skip
    assert losses(run, segment=1)[-1] == (11, 2.0)
    assert losses(run, segment=0) == [(s, 1.0) for s in range(10)]
    assert losses(run, before=3) == [(s, 1.0) for s in range(3)]


def test_a_branchs_history_begins_in_its_run(tmp_path):
    run = run_at(tmp_path / "run")
    write(run, dict.fromkeys(range(10), 1.0))
    branch = RunFolder(run.path / "branches" / "hot")
    branch.segment(0).mkdir(parents=True)
    (branch.path / "logbook").mkdir()
    first = Segment(parent=Departure(run="../..", segment=0, step=4), start_step=4)
    (branch.segment(0) / segments.FILE_NAME).write_text(first.model_dump_json())
    write(branch, {4: 5.0, 5: 6.0})
    assert losses(branch) == [*((s, 1.0) for s in range(4)), (4, 5.0), (5, 6.0)]


def test_numbers_that_are_not_finite_are_read_back_from_strict_json(tmp_path):
    run = run_at(tmp_path)
    nan, inf = float("nan"), float("inf")
    write(run, {0: 2.0, 1: nan, 2: inf, 3: -inf, 4: 2.0})
    text = (run.path / "logbook" / "0000.jsonl").read_text()
    assert '"loss":"nan"' in text
    values = [loss for _, loss in losses(run)]
    assert [repr(x) for x in values] == ["2.0", "nan", "inf", "-inf", "2.0"]
    _, (opened,) = history.detector(run, DEFAULT)
    assert (opened.kind, opened.onset) == ("nonfinite", 1)
    # And written again: an incident is strict JSON as well.
    write(run, {}, events=(history.event(opened, 0),))
    event = logbook.read(run.path).records[-1]
    assert (event["event"], event["step"], event["value"]) == ("incident", 1, "nan")


def test_a_record_without_a_loss_is_an_error_that_names_it(tmp_path):
    run = run_at(tmp_path)
    write(run, {0: {"loss": 1.0}, 1: {"gradient_norm": 1.0}})
    with pytest.raises(CannotDo, match=r"record of step 1: a step's record has no loss"):
        list(history.steps(run))


def test_right_after_a_resume_the_window_is_that_of_the_steps_before(tmp_path):
    run = run_at(tmp_path)
    write(run, dict(enumerate([10.00, 10.02] * 15)))
    # What the process recorded after its last checkpoint is executed again.
    fold, found = history.detector(run, DEFAULT, before=30)
    assert found == []
    (opened,) = fold.feed(30, {"loss": 10.5})
    assert opened.limit == pytest.approx(10.07)


def test_after_a_rollback_the_window_is_that_of_the_restored_step(tmp_path):
    run = run_at(tmp_path, Departure(segment=0, step=30))
    values = dict(enumerate([10.00, 10.02] * 15)) | dict.fromkeys(range(30, 60), 10.06)
    write(run, values | {60: "nan"})
    before, found = history.detector(run, DEFAULT, segment=0)
    assert [x.kind for x in found] == ["nonfinite"]
    assert before.open is not None
    after, found = history.detector(run, DEFAULT)
    assert (found, after.open, after.last) == ([], None, 29)
    (opened,) = after.feed(30, {"loss": 10.071})
    assert opened.limit == pytest.approx(10.07)


def numbers_with_trouble(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    values: list[Any] = series.planted(series.quiet(300, seed), rng.randrange(250), [1.5, 0.8])
    start = rng.randrange(250)
    values[start : start + 3] = [math.nan, math.inf, values[start + 2]]
    values[start + 40 :] = [x + 1.3 for x in values[start + 40 :]]
    norms = [math.exp(rng.gauss(-1, 0.3)) * (100 if rng.random() < 0.02 else 1) for _ in values]
    return [
        {"loss": x, "gradient_norm": norm, "batch_size": 8 if step < 150 else 16}
        for step, (x, norm) in enumerate(zip(values, norms, strict=True))
    ]


@settings(max_examples=12)
@given(st.integers(0, 50), st.lists(st.integers(0, 299), max_size=4), st.integers(0, 60))
def test_a_history_gives_the_same_whole_or_cut_anywhere_and_resumed_from_the_logbook(
    seed, cuts, redone
):
    spikes = Spikes(policy="skip_update", lag=10)
    computed = numbers_with_trouble(seed)
    rows = list(enumerate(computed))
    whole, expected, limits = Detector(spikes), [], []
    for step, fields in rows:
        limits.append(whole.skip_above(step))
        expected += [history.event(found, 0) for found in whole.feed(step, fields)]

    with tempfile.TemporaryDirectory() as path:
        run = run_at(pathlib.Path(path))
        told: list[tuple[str, dict[str, Any]]] = []
        start = 0
        for attempt, stop in enumerate([*sorted(cuts), 300], 1):
            # A process: goes on at `start`, tells what is new and dies before `stop`.
            fold, found = history.detector(run, spikes, before=start)
            seen = history.told(run)
            assert {history.key(*history.event(x, 0)) for x in found} <= seen
            with logbook.Logbook.open(run.path) as book:
                for step in range(start, stop):
                    assert fold.skip_above(step) == limits[step]
                    fields = computed[step]
                    book.step(segment=0, attempt=attempt, step=step, computed=fields, measured={})
                    for event in (history.event(x, 0) for x in fold.feed(step, fields)):
                        if history.key(*event) not in seen:
                            book.append(event[0], **event[1])
                            told.append(event)
            start = max(0, stop - redone)  # the checkpoint that it left
        assert [repr(x) for x in told] == [repr(x) for x in expected]
        _, offline = history.detector(run, spikes)
        assert [repr(history.event(x, 0)) for x in offline] == [repr(x) for x in expected]
        for step in (0, 45, 299):
            of_records = ((s, computed[s]) for s, _ in history.steps(run))
            assert detection.skip_above(of_records, step, spikes) == limits[step]


def test_candidates_tell_what_was_not_healthy_before_them(tmp_path):
    run = run_at(tmp_path)
    rows = {s: {"loss": 3.0, "gradient_norm": 0.2} for s in range(200)}
    rows |= {s: {"loss": 3.0, "gradient_norm": 0.2 + (s - 200) / 50} for s in range(200, 260)}
    write(run, rows)
    found = history.candidates(run, DEFAULT, [100, 200, 250, 260, 300])
    assert [(c.step, c.complaints) for c in found] == [
        (100, ()),
        (200, ()),
        (250, ("gradient_norm is rising",)),
        (260, ("gradient_norm is rising",)),
    ]


def test_rollbacks_count_where_they_led(tmp_path):
    run = run_at(tmp_path, Departure(segment=0, step=6), Departure(segment=0, step=3))
    spikes = Spikes(policy="rollback")

    def decided(onset: int, opens: int | None) -> tuple[str, dict[str, Any]]:
        incident = Incident("jump", onset, onset, 2.0, 3.0, 8.5, outcome="diverged", closed=9)
        decision = decide(incident, spikes, [], [])
        return "decision", history.decision_fields(decision, incident, 0, opens)

    write(run, {}, events=(decided(8, 1), decided(5, 2), decided(9, 3)))
    assert history.rollbacks(run, 0) == []
    assert history.rollbacks(run, 1) == [Rollback(8)]
    assert history.rollbacks(run) == [Rollback(5)]  # segment 3 was never opened
    fields = logbook.read(run.path).records[0]
    assert json.loads(json.dumps(fields))["exclude"] == [0, 300]
    assert fields["incident"] == ["jump", 8, 8]
