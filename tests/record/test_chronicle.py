"""The chronicle tells every event, in order, and what each crash and rollback cost."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import tempfile
import time
import tracemalloc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import chronicle, logbook
from palm_jax.record.chronicle import histories, teller


def at(clock: str) -> str:
    return f"2026-03-01T{clock}+00:00"


def event(name: str, clock: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields, "time": at(clock)}


def start(clock: str, segment: int, step: int, steps: int, **fields: Any) -> dict[str, Any]:
    rest = {"settings_changed": {}, "environment_changed": {}, "environment": {"jax": "0.10.2"}}
    rest |= {"parameters": 12345, "recorded_steps": 0, "torn_lines": [], "leftovers": []}
    return event("start", clock, segment=segment, step=step, steps=steps, **rest | fields)


def steps(
    first: int, stop: int, *, segment: int = 0, attempt: int = 1, seconds: float = 0.5
) -> list[dict[str, Any]]:
    return [
        {
            "event": "step",
            "segment": segment,
            "attempt": attempt,
            "step": step,
            "computed": {"loss": 5.0 - step / 10, "applied": True},
            "bits": {},
            "measured": {"step_seconds": seconds},
        }
        for step in range(first, stop)
    ]


def write(run: pathlib.Path, *parts: list[dict[str, Any]], torn: str = "") -> pathlib.Path:
    """A run's folder with these parts; `torn` ends the first of them."""
    (run / "logbook").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("steps: 1\n")
    for number, records in enumerate(parts):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run / "logbook" / f"{number:04d}.jsonl").write_text(text + (torn if not number else ""))
    return run


def saved(clock: str, step: int, segment: int = 0) -> dict[str, Any]:
    return event("checkpoint", clock, segment=segment, step=step, state_digest="ab12")


def stop(clock: str, step: int, segment: int = 0, signal: str | None = None) -> dict[str, Any]:
    return event("stop", clock, segment=segment, step=step, signal=signal, state_digest="ab12")


def test_a_run_without_trouble_is_told_in_three_entries(tmp_path):
    run = write(
        tmp_path / "quick_start",
        [
            start("10:00:00", 0, 0, 40),
            event("program", "10:00:00", segment=0, step=0, batch_size=8, compile_seconds=1.25),
            *steps(0, 20),
            event("evaluation", "10:00:12", segment=0, step=20, loss=3.5, bits_per_byte=2.25),
            saved("10:00:13", 20),
            *steps(20, 40, seconds=1.5),
            event("evaluation", "10:00:45", segment=0, step=40, loss=2.5, bits_per_byte=1.75),
            saved("10:00:46", 40),
            stop("10:00:47", 40),
        ],
    )
    assert (
        chronicle.render(run)
        == """\
# Logbook of quick_start

## 2026-03-01 10:00:00 UTC: started at step 0, segment 0

- Steps planned: 40.
- Parameters: 12,345.
- Environment: `jax` `0.10.2`.

## from 2026-03-01 10:00:00 UTC: steps 0 to 39, segment 0

- Made 40 steps in 40.0 s; loss 5 to 1.1.
- Compiled 1 program in 1.2 s.
- Held-out loss 3.5 (2.25 bits per byte) at step 20, 2.5 (1.75 bits per byte) at step 40.
- Saved 2 checkpoints, the last at step 40.

## 2026-03-01 10:00:47 UTC: finished, 40 steps made

- The state is saved; its digest is `ab12`.

## Summary

| in all | |
| --- | ---: |
| steps made | 40 |
| attempts | 40 |
| steps redone | 0 (0.0 s) |
| steps left behind | 0 (0.0 s) |
| sequences excluded | 0 |
| time training | 40.0 s |
| time compiling | 1.2 s |
| segments | 1 |
| starts | 1 |
| ends without a stop | 0 |
| skipped updates | 0 |
| losses not finite | 0 |
| incidents | 0 |
| differences | 0 |
| torn lines | 0 |
"""
    )


def test_a_pruned_newest_checkpoint_makes_going_on_after_a_crash_cost_more(tmp_path):
    crashed = [start("10:00:00", 0, 0, 16), *steps(0, 4), saved("10:00:02", 4)]
    crashed += [*steps(4, 8), saved("10:00:04", 8), *steps(8, 10)]
    fields = {"segment": 0, "steps": [8], "damaged": [8], "newest_left": 4, "bytes": 12345}
    other = event("pruned", "11:00:00", **fields | {"segment": 3, "newest_left": 0})
    run = write(tmp_path / "run", crashed, [other], [event("pruned", "12:00:00", **fields)])
    told = chronicle.render(run)
    assert "To go on from step 4 would cost: 6 recorded steps (4 to 9), 3.0 s" in told
    assert (
        """\
## 2026-03-01 12:00:00 UTC: checkpoints of segment 0 removed

- Steps: 8.
- Damaged were: 8.
- The newest state left is that of step 4.
- Freed: 12,345 bytes.
"""
        in told
    )


def crashed(run: pathlib.Path) -> list[list[dict[str, Any]]]:
    """Dies after step 11 with step 8 saved; goes on, and finishes."""
    return [
        [
            start("10:00:00", 0, 0, 16),
            *steps(0, 8),
            saved("10:00:04", 8),
            *steps(8, 10, seconds=2.0),
            *steps(10, 12, seconds=3.0),
        ],
        [
            start(
                "10:00:44",
                0,
                8,
                16,
                recorded_steps=12,
                torn_lines=["0000.jsonl:15"],
                leftovers=["12.half"],
                settings_changed={"log.every": [5, 10]},
                environment_changed={"jax": ["0.10.2", "0.12.0"]},
            ),
            *steps(8, 12, attempt=2),
            *steps(12, 16),
            saved("10:00:48", 16),
            stop("10:00:49", 16),
        ],
    ]


def test_a_crash_costs_the_steps_after_the_state_from_which_the_run_went_on(tmp_path):
    run = write(tmp_path / "run", *crashed(tmp_path), torn='{"event":"step","segm')
    text = chronicle.render(run)
    # 2 x 2 s and 2 x 3 s are lost. It goes on 40 s after the last checkpoint, and 10 of them
    # were training.
    assert (
        """
## after 2026-03-01 10:00:04 UTC: ended without a stop, segment 0

- The process died.
- Recorded up to step 11; saved was the state of step 8.
- `logbook/0000.jsonl:15` is torn: a process died while writing it. It was left out.
- The run went on from step 8. What that cost: 4 recorded steps (8 to 11), 10.0 s of training.
- It stood still for at most 30.0 s.

## 2026-03-01 10:00:44 UTC: went on at step 8, segment 0

- Steps planned: 16.
- `log.every` was `5`, is `10`.
- Environment: `jax` was `0.10.2`, is `0.12.0`.
- Executes 4 recorded steps again (8 to 11): the bits must be the same.
- Checkpoint `12.half` was never finished.

## from 2026-03-01 10:00:44 UTC: steps 8 to 15, segment 0

- Made 8 steps in 4.0 s; loss 4.2 to 3.5.
- Executed before: 4 steps.
- Saved 1 checkpoint, the last at step 16.
"""
        in text
    )
    assert chronicle.summary(run) == {
        "run": "run",
        "steps_made": 16,
        "attempts": 20,
        "attempts_without_time": 0,
        "steps_redone": 4,
        "redone_seconds": 10.0,
        "steps_left_behind": 0,
        "left_behind_seconds": 0.0,
        "training_seconds": 18.0,  # 8 x 0.5 + 10 + 8 x 0.5
        "compile_seconds": 0.0,
        "evaluations": 0,
        "checkpoints": 2,
        "starts": 2,
        "stops": 1,
        "ends_without_stop": 1,
        "interventions": 0,
        "promotions": 0,
        "incidents": 0,
        "alarms": 0,
        "decisions": 0,
        "notes": 0,
        "differences": 0,
        "verifications": 0,
        "restarts": 0,
        "skipped_updates": 0,
        "non_finite_losses": 0,
        "sequences_excluded": 0,
        "segments": 1,
        "torn_lines": ["logbook/0000.jsonl:15"],
    }


def test_a_checkpoint_that_was_never_finished_does_not_lessen_the_cost(tmp_path):
    first = [start("10:00:00", 0, 0, 9), *steps(0, 4), saved("10:00:01", 4), *steps(4, 8)]
    first.append(saved("10:00:02", 8))  # begun, but the process died before its end
    run = write(tmp_path, first, [start("10:00:09", 0, 4, 9, recorded_steps=8)])
    assert "went on from step 4. What that cost: 4 recorded steps (4 to 7), 2.0 s" in (
        chronicle.render(run)
    )


def test_restarts_say_why_and_verifications_whom_they_suspect(tmp_path):
    place = {"segment": 0, "step": 4}
    healthy = {"event": "verification", **place, "microbatches": 8, "differing": [], "suspects": []}
    suspect = {"device": 2, "process": 1, "host": "h", "ids": [2]}
    ill = {**healthy, "differing": [1, 2], "suspects": [suspect]}
    again = {"event": "restart", **place, "cause": "it was killed by SIGKILL", "wait_seconds": 5.0}
    run = write(
        tmp_path,
        [start("10:00:00", 0, 0, 9), *steps(0, 4), healthy, ill],
        [{**again, "in_vain": 0}],
        [{**again, "in_vain": 2}],
    )
    told = chronicle.render(run)
    for words in (
        "2 of 8 microbatches gave another gradient on another device.",
        "Suspected: device 2 on `h`, process 1.",
        "Why: it was killed by SIGKILL, after news of step 4.",
        "It waited 5 s.",
        "It waited 5 s; 2 restarts before made no newer checkpoint.",
        "| verifications | 2 |",
        "| restarts | 2 |",
    ):
        assert words in told, told


def test_two_crashes_at_the_same_place_cost_twice(tmp_path):
    run = write(
        tmp_path,
        [start("10:00:00", 0, 0, 9), *steps(0, 4), saved("10:00:01", 4), *steps(4, 8)],
        [start("11:00:00", 0, 4, 9, recorded_steps=8), *steps(4, 5, attempt=2)],
        [start("12:00:00", 0, 4, 9, recorded_steps=8), *steps(4, 6, attempt=3)],
    )
    numbers = chronicle.summary(run)
    assert (numbers["attempts"], numbers["steps_redone"], numbers["steps_made"]) == (11, 5, 6)
    text = chronicle.render(run)
    assert "What that cost: 4 recorded steps (4 to 7), 2.0 s" in text
    assert "What that cost: 1 recorded step (4), 0.5 s" in text


def test_a_last_process_without_a_stop_may_still_be_running(tmp_path):
    records = [start("10:00:00", 0, 0, 9), *steps(0, 4), saved("10:00:01", 4), *steps(4, 7)]
    note = [event("note", "10:00:05", text="looks fine")]
    text = chronicle.render(write(tmp_path, records, note))
    assert (
        """
- The process died, or is still running.
- Recorded up to step 6; saved was the state of step 4.
- To go on from step 4 would cost: 3 recorded steps (4 to 6), 1.5 s of training.

## 2026-03-01 10:00:05 UTC: note

```text
looks fine
```
"""
        in text
    )


def test_a_stop_by_a_signal_costs_the_time_until_the_run_goes_on(tmp_path):
    run = write(
        tmp_path,
        [start("10:00:00", 0, 0, 9), *steps(0, 4), stop("10:00:10", 4, signal="SIGTERM")],
        [start("11:30:10", 0, 4, 9, recorded_steps=4)],
        [start("11:40:00", 0, 4, 9, recorded_steps=4), *steps(4, 9), stop("11:41:00", 9)],
    )
    text = chronicle.render(run)
    assert text.count("had stood still") == 1  # not told again after the crash
    assert "UTC: stopped by `SIGTERM`, 4 steps made" in text
    assert "- The run had stood still for 1 h 30 min." in text
    assert "- The run went on from step 4. What that cost: no recorded step." in text
    assert chronicle.summary(run)["steps_redone"] == 0


def rolled_back() -> list[list[dict[str, Any]]]:
    return [
        [start("10:00:00", 0, 0, 30), *steps(0, 20), stop("10:00:10", 20)],
        [
            event(
                "intervention",
                "11:00:00",
                segment=1,
                from_step=10,
                at=12,
                changes={"schedule.peak": [0.01, 0.005]},
                exclusions=[[80, 96]],
                reason="spike at 12",
            )
        ],
        [start("11:00:10", 1, 10, 30), *steps(10, 20, segment=1), stop("11:00:20", 20, 1)],
        [
            event(
                "promotion",
                "12:00:00",
                segment=2,
                branch="gentle",
                from_step=14,
                changes={},
                exclusions=[[90, 100], [200, 201]],
                reason="calmer",
            ),
            # Copies of the branch's records, which ends without a stop.
            start("12:00:00", 2, 14, 16),
            *steps(14, 16, segment=2, seconds=4.0),
        ],
        [start("12:00:30", 2, 16, 30), *steps(16, 18, segment=2), stop("12:00:40", 18, 2)],
    ]


def test_a_rollback_leaves_steps_behind_and_opens_a_segment(tmp_path):
    run = write(tmp_path, *rolled_back())
    text = chronicle.render(run)
    assert (
        """
## 2026-03-01 11:00:00 UTC: intervention; segment 1 begins at step 10

- In force from step 12 on.
- `schedule.peak` was `0.01`, is `0.005`.
- Excluded: 16 sequences, positions 80:96.
- Reason: spike at 12
- Left behind: 10 recorded steps (10 to 19), 5.0 s of training.

## 2026-03-01 11:00:10 UTC: went on at step 10, segment 1
"""
        in text
    )
    assert (
        """
## 2026-03-01 12:00:00 UTC: branch `gentle` promoted; segment 2 begins at step 14

- Excluded: 10 sequences, positions 90:100.
- Excluded: 1 sequence, positions 200:201.
- Reason: calmer
- Left behind: 6 recorded steps (14 to 19), 3.0 s of training.

## 2026-03-01 12:00:00 UTC: the branch's records from step 14 on, now segment 2

- Steps planned: 16.

## from 2026-03-01 12:00:00 UTC: steps 14 to 15, segment 2
"""
        in text
    )
    numbers = chronicle.summary(run)
    wanted = {
        "steps_made": 18,
        "attempts": 20 + 10 + 2 + 2,
        "steps_left_behind": 10 + 6,
        "left_behind_seconds": 8.0,
        "steps_redone": 0,
        "sequences_excluded": 21,  # 80 to 99, and 200
        "segments": 3,
        "starts": 3,  # the branch's own is not the run's
        "ends_without_stop": 0,
        "interventions": 1,
        "promotions": 1,
    }
    assert {key: numbers[key] for key in wanted} == wanted


def departs(run: pathlib.Path, segment: int, parent: int | None, step: int) -> None:
    """The description of a segment of the run."""
    path = run / "segments" / f"{segment:03d}" / "segment.json"
    path.parent.mkdir(parents=True)
    place = None if parent is None else {"segment": parent, "step": step}
    path.write_text(json.dumps({"segment": segment, "parent": place, "start_step": step}))


def test_a_promoted_branch_of_an_older_segment_takes_that_segments_steps_up_again(tmp_path):
    run = write(tmp_path, *rolled_back())
    for segment, parent, step in [(0, None, 0), (1, 0, 10), (2, 0, 14)]:
        departs(run, segment, parent, step)
    text = chronicle.render(run)
    # Segment 1 began at step 10; the branch left segment 0, which had steps 10 to 13 itself.
    assert (
        """
- Left behind: 10 recorded steps (10 to 19), 5.0 s of training.
- Taken up again: 4 recorded steps (10 to 13), 2.0 s of training.

## 2026-03-01 12:00:00 UTC: the branch's records from step 14 on, now segment 2
"""
        in text
    )
    numbers = chronicle.summary(run)
    # Segment 0 loses 14 to 19, segment 1 all of its ten.
    assert (numbers["steps_made"], numbers["steps_left_behind"]) == (18, 6 + 10)
    assert numbers["left_behind_seconds"] == 8.0


def test_a_damaged_description_of_a_segment_is_an_error_that_names_it(tmp_path):
    run = write(tmp_path, *rolled_back())
    departs(run, 1, 0, 10)
    (run / "segments" / "001" / "segment.json").write_text("{")
    with pytest.raises(CannotDo, match=r"001/segment\.json is damaged"):
        chronicle.render(run)


def test_a_start_in_another_segment_leaves_steps_behind_even_if_nothing_announced_it(tmp_path):
    before, _, after, *_ = rolled_back()
    text = chronicle.render(write(tmp_path, before, after))
    assert "- Left behind: 10 recorded steps (10 to 19), 5.0 s of training." in text


def test_after_a_crash_a_rollback_is_told_as_the_way_on(tmp_path):
    dead, intervention, *_ = rolled_back()
    text = chronicle.render(write(tmp_path, dead[:-1], intervention))
    assert "- The process died.\n" in text
    assert "- The run did not go on from there: segment 1 begins at step 10." in text
    assert "went on from step" not in text


def test_losses_that_are_not_finite_and_skipped_updates_name_their_steps(tmp_path):
    records = steps(0, 60)
    for step in (0, 7, 8, 9, 59):
        records[step]["computed"]["loss"] = {0: "inf", 59: "-inf"}.get(step, "nan")
    for step in range(1, 40, 2):  # 20 places, of which 12 are shown
        records[step]["computed"]["applied"] = False
    records[30]["computed"]["loss"] = 11.0
    run = write(tmp_path, [start("10:00:00", 0, 0, 60), *records, stop("10:01:00", 60)])
    text = chronicle.render(run)
    assert "- Made 60 steps in 30.0 s; loss 4.9 to -0.8." in text  # of steps 1 and 58
    assert "- The highest loss was 11, at step 30." in text
    assert "- The loss was not finite at 5 steps: 0, 7 to 9, 59." in text
    assert (
        "- The update was skipped at 20 steps: 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23 "
        "and 8 more." in text
    )
    numbers = chronicle.summary(run)
    assert (numbers["non_finite_losses"], numbers["skipped_updates"]) == (5, 20)


def test_many_evaluations_are_told_by_the_first_the_last_and_the_lowest(tmp_path):
    losses = [4.0, "nan", 2.0, 3.0]
    found = [
        event("evaluation", "10:00:01", segment=0, step=10 * i, loss=loss, bits_per_byte=1.5)
        for i, loss in enumerate(losses)
    ]
    text = chronicle.render(write(tmp_path, [start("10:00:00", 0, 0, 60), *found]))
    assert (
        "- Held-out loss 4 (1.5 bits per byte) at step 0, 3 (1.5 bits per byte) at step 30; "
        "the lowest of 4 was 2 (1.5 bits per byte) at step 20." in text
    )


def test_a_difference_is_told_with_both_bits_and_ends_the_process(tmp_path):
    first, second = crashed(tmp_path)
    different = event(
        "difference",
        "10:00:46",
        **{"segment": 0, "step": 9, "field": "loss", "first": "aa", "again": "bb", "attempt": 2},
    )
    text = chronicle.render(write(tmp_path, first, [*second[:5], different]))
    assert (
        """
## 2026-03-01 10:00:46 UTC: step 9 of segment 0 computed other bits

- `loss` had the bits `aa` at first, and `bb` in attempt 2.
- Machine, environment or checkpoint is not what it was. Nothing was saved since.

## after 2026-03-01 10:00:46 UTC: ended because of the difference, segment 0
"""
        in text
    )
    assert "still running" not in text


def test_incidents_and_decisions_are_told_in_words(tmp_path):
    seen = {"segment": 0, "kind": "jump", "onset": 7, "detected": 8, "vital": "loss"}
    records = [
        start("10:00:00", 0, 0, 60),
        *steps(0, 9),
        event("incident", "10:00:05", **seen, value=7.25, limit=5.512345, outcome=None),
        event(
            "decision",
            "10:00:06",
            **{"segment": 0, "step": 8, "incident": ["jump", 7, 8], "action": "rollback"},
            **{"checkpoint": 4, "again": True, "exclude": [3, 9]},
        ),
        event("incident_closed", "10:00:07", **seen, outcome="bad plateau", closed=9, rows=[1, 2]),
        event("incident", "10:00:08", incident=3, step=9, kind="a <b>"),
        event("decision", "10:00:09", step=9),
        event("incident", "10:00:10", segment=0, kind="jump"),
    ]
    text = chronicle.render(write(tmp_path, records))
    assert (
        """
## 2026-03-01 10:00:05 UTC: incident: jump of loss, at step 7, segment 0

- Detected: 8.
- Value: 7.25.
- Limit: 5.5123.

## 2026-03-01 10:00:06 UTC: decided: rollback (incident jump since step 7), at step 8, segment 0

- Checkpoint: 4.
- Again: yes.
- Exclude: 3, 9.

## 2026-03-01 10:00:07 UTC: incident, jump since step 7, closed: bad plateau, at step 9, segment 0

- Detected: 8.
- Vital: loss.
- Rows: 1, 2.

## 2026-03-01 10:00:08 UTC: incident 3: a \\<b>, at step 9

## 2026-03-01 10:00:09 UTC: decision, at step 9

## 2026-03-01 10:00:10 UTC: event `incident`

- `segment`: `0`
- `kind`: `"jump"`
"""
        in text
    )
    numbers = chronicle.summary(tmp_path)
    assert (numbers["incidents"], numbers["decisions"]) == (2, 2)
    assert "| incidents | 2 |" in text


def test_alarms_and_traces_are_told_with_the_steps_around_them(tmp_path):
    def alarm(step: int, vital: str = "gradient_norm") -> dict[str, Any]:
        return event("alarm", "10:00:05", segment=0, step=step, kind="high", vital=vital, value=2.5)

    traced = event(
        "profile", "10:00:04", segment=0, step=3, stop_step=6, folder="segments/000/profile/3"
    )
    records = [start("10:00:00", 0, 0, 60), *steps(0, 9), traced, *map(alarm, (3, 4, 6))]
    records += [alarm(7, f"v{n}") for n in range(14)]
    text = chronicle.render(write(tmp_path, [*records, *steps(9, 12)]))
    assert text.count("\n## ") == 4  # the start, one stretch, an end, the summary
    assert "- Alarm high, gradient_norm, at 3 steps: 3 to 4, 6." in text
    assert "- Alarm high, v10, at 1 step: 7." in text
    assert "- Alarm for other reasons, at 3 steps: 7, 7, 7." in text
    assert "- The profiler traced steps 3 to 5, in `segments/000/profile/3`." in text


def test_losses_beside_a_cpus_and_alerts_that_failed_are_told(tmp_path):
    compared = event(
        *("parity", "10:00:01"),
        **{"segment": 0, "step": 0, "platform": "tpu", "sequences": 4, "loss": 5.625},
        **{"loss_on_cpu": 5.5, "difference": 0.0625, "tolerance": 0.125},
    )
    reason = {"left_out": "the host is too small"}
    left_out = event("parity", "10:00:02", segment=0, step=0, **reason)
    failed = event("alert_failed", "10:00:03", command="page | me", exit_code=3)
    text = chronicle.render(
        write(tmp_path, [start("10:00:00", 0, 0, 9), compared, left_out, failed])
    )
    assert text.count("the losses of step 0 of segment 0 beside a CPU's") == 2
    assert "- Mean of 4 sequences: 5.625 on tpu, 5.5 on a CPU." in text.replace("`", "")
    assert "difference of one is 0.0625; 0.125 is allowed." in text.replace("`", "")
    assert "They were not compared: the host is too small." in text
    assert "nobody was alerted" in text
    assert "page | me" in text.replace("\\", "")
    assert "exit code 3." in text.replace("`", "")


def test_an_unknown_event_is_told_with_all_its_fields(tmp_path):
    strange = event("surprise", "10:00:00", segment=0, step=3, kind="spike", rows=[{"a|b": None}])
    damaged = event("checkpoint", "10:00:01", segment=0, step="four")
    untimed = {"event": "odd", "time": "yesterday", "text": "a`b"}
    text = chronicle.render(write(tmp_path, [strange, damaged, untimed]))
    assert (
        """
## 2026-03-01 10:00:00 UTC: event `surprise`

- `segment`: `0`
- `step`: `3`
- `kind`: `"spike"`
- `rows`: `[{"a|b": null}]`

## 2026-03-01 10:00:01 UTC: event `checkpoint`

- `segment`: `0`
- `step`: `"four"`

## unknown time: event `odd`

- `time`: `"yesterday"`
- `text`: ``"a`b"``
"""
        in text
    )


def test_a_note_cannot_break_the_structure(tmp_path):
    run = write(tmp_path / "a_*b*_#", [start("10:00:00", 0, 0, 1), stop("10:00:01", 0)])
    chronicle.note(run, "| a | b |\n# not a title\n```\n- x\r\n\x1b[31mred\u2028# no title\n````")
    text = chronicle.render(run)
    assert text.startswith("# Logbook of a\\_\\*b\\*\\_\\#\n")
    assert (
        """
`````text
| a | b |
# not a title
```
- x
\ufffd[31mred
# no title
````
`````

## Summary
"""
        in text
    )


def test_a_reason_stays_in_its_line_and_is_no_markdown(tmp_path):
    intervention = event("intervention", "10:00:00", segment=1, from_step=0, changes={})
    intervention["reason"] = "a|b\n\n# c `d` <i> **e** _f_ snake_case &lt; R&D [f](g)"
    text = chronicle.render(write(tmp_path, [intervention]))
    wanted = r"- Reason: a\|b # c \`d\` \<i> \*\*e\*\* \_f\_ snake_case \&lt; R&D \[f\](g)"
    assert f"\n{wanted}\n" in text


def test_a_note_is_a_part_of_its_own_and_touches_no_other(tmp_path):
    run = write(tmp_path, [start("10:00:00", 0, 0, 1)])
    before = (run / "logbook" / "0000.jsonl").read_bytes()
    chronicle.note(run, "loss rises\nwatch it")
    assert (run / "logbook" / "0000.jsonl").read_bytes() == before
    (line,) = (run / "logbook" / "0001.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert abs(time.time() - datetime.datetime.fromisoformat(record.pop("time")).timestamp()) < 60
    assert record == {"event": "note", "text": "loss rises\nwatch it"}
    assert "```text\nloss rises\nwatch it\n```" in chronicle.render(run)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_note_is_refused_and_writes_nothing(tmp_path, text):
    run = write(tmp_path, [start("10:00:00", 0, 0, 1)])
    with pytest.raises(WrongInput, match="note is empty"):
        chronicle.note(run, text)
    assert os.listdir(run / "logbook") == ["0000.jsonl"]


def test_a_folder_that_is_no_run_is_refused_and_stays_as_it_was(tmp_path):
    for refused in (
        lambda: chronicle.note(tmp_path, "hello"),
        lambda: chronicle.render(tmp_path),
        lambda: chronicle.summary(tmp_path / "nowhere"),
    ):
        with pytest.raises(WrongInput, match=r"not a run's folder: it has no config\.yaml"):
            refused()
    assert os.listdir(tmp_path) == []


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    run = write(tmp_path, [], torn='{"event":"no\n{"event":"note","text":"x"}\n')
    with pytest.raises(CannotDo, match=r"0000\.jsonl, line 1"):
        chronicle.render(run)


def test_a_hundred_thousand_steps_are_told_in_seconds(tmp_path):
    run = tmp_path
    write(run, [start("10:00:00", 0, 0, 100_000)])
    with (run / "logbook" / "0001.jsonl").open("w") as file:
        for step in range(0, 100_000, 10):
            for record in steps(step, step + 10, seconds=0.5 + step / 1e6):
                file.write(json.dumps(record) + "\n")
    began = time.perf_counter()
    text = chronicle.render(run)
    assert time.perf_counter() - began < 20
    assert "| steps made | 100,000 |" in text
    assert len(text) < 2000


def test_what_stays_in_memory_is_a_row_for_each_flush(tmp_path):
    paces = [0.5 + step // 10 / 1e6 for step in range(20_000)]
    run = write(tmp_path, [row for s, p in enumerate(paces) for row in steps(s, s + 1, seconds=p)])
    tracemalloc.start()
    try:
        assert chronicle.summary(run)["steps_made"] == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6  # 2,000 flushes; the records would be 40 times as much


WHOLE = st.integers(-3, 12) | st.integers()
ODD = st.recursive(
    st.none()
    | st.booleans()
    | WHOLE
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.just(10**400)
    | st.sampled_from(["nan", "inf", "-inf", "", "`", "2026-03-01T10:00:00+00:00", "0001-01-01"])
    | st.text(st.characters(), max_size=12),  # halves of surrogate pairs too
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    "steps", "parameters", "settings_changed", "environment_changed", "recorded_steps",
    "torn_lines", "leftovers", "environment", "measured", "compile_seconds",
    "loss", "bits_per_byte", "state_digest", "signal", "field",
    "first", "again", "attempt", "at", "changes",
    "exclusions", "branch", "reason", "text", "time",
    "kind", "vital", "action", "incident", "value", "folder", "onset", "detected",
    "damaged", "newest_left", "bytes",
]  # fmt: skip
EVENTS = [*teller.PLACE, "surprise", "step"]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(EVENTS))
    fields = draw(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=5))
    record = {"event": name, **fields}
    # A step with another number is no record.
    whole = WHOLE.map(lambda n: abs(n) % 2**53) if name == "step" else WHOLE
    for key in ("segment", "step", "from_step", "stop_step"):
        record[key] = draw(whole)
    if name == "step":
        record["attempt"] = draw(whole)
        record["computed"] = draw(
            st.fixed_dictionaries({}, optional={"loss": ODD, "applied": ODD, "rate": ODD})
        )
        record["bits"] = {}
        record["measured"] = draw(ODD | st.fixed_dictionaries({"step_seconds": ODD}))
    elif draw(st.integers(0, 9)) == 0:
        record[draw(st.sampled_from(["segment", "step", "from_step"]))] = draw(ODD)
    return record


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.lists(st.lists(records(), max_size=8), max_size=4))
def test_any_sequence_of_events_is_told_and_every_attempt_is_accounted_for(parts):
    with tempfile.TemporaryDirectory() as folder:
        run = write(pathlib.Path(folder) / "run", *parts)
        text = chronicle.render(run)
        numbers = chronicle.summary(run)
    text.encode()  # could be printed
    json.dumps(numbers, allow_nan=False)
    told = [record for part in parts for record in part]
    assert numbers["attempts"] == sum(record["event"] == "step" for record in told)
    assert numbers["attempts"] == (
        numbers["steps_made"] + numbers["steps_redone"] + numbers["steps_left_behind"]
    )
    # Outside the notes, every line has a form of ours; the table has two columns.
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text)
    for line in outside.splitlines():
        assert line == "" or line.startswith(("# ", "## ", "- ", "| "))
        assert not line.startswith("| ") or line.count("|") == 3
    on_the_way = ("step", "program", "evaluation", "checkpoint", "profile", "alarm", "verification")
    num_entries = sum(record["event"] not in on_the_way for record in told)
    assert outside.count("\n## ") - 1 >= num_entries
    assert logbook.plain(numbers) == numbers


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "go_on", "enter"]), st.integers(0, 9)), max_size=40
    ),
    st.lists(st.integers(0, 5), min_size=8, max_size=8),
    st.booleans(),
)
def test_the_present_history_is_that_of_a_plain_list_of_attempts(moves, parent_of, merged):
    """A history is a list of (step, segment, attempt); departing copies the parent's."""
    parents = {segment: parent % segment for segment, parent in enumerate(parent_of, start=1)}
    followed: histories.Histories[int] = histories.Histories(parents)
    followed.enter(0, 0)
    plain: dict[int, list[tuple[int, int, int]]] = {0: []}
    segment = 0
    for attempt, (move, number) in enumerate(moves):
        before = plain[segment]
        if move == "add":
            step = before[-1][0] + 1 if before else number
            value = 0 if merged else attempt
            before.append((step, segment, value))
            followed.add(step, value)
        elif move == "go_on":
            plain[segment] = [row for row in before if row[0] < number]
            lost = followed.go_on(number)
            assert spread(lost) == [row for row in before if row[0] >= number]
        elif segment < 8:
            segment += 1
            plain[segment] = [row for row in plain[parents[segment]] if row[0] < number]
            left, again = followed.enter(segment, number)
            if not merged:  # else equal rows need not be the same attempts
                assert spread(left) == [row for row in before if row not in plain[segment]]
                assert spread(again) == [row for row in plain[segment] if row not in before]
            assert len(before) - len(spread(left)) == len(plain[segment]) - len(spread(again))
    assert spread(followed.rows) == plain[segment]
    assert len(followed) == len(plain[segment])
    for number in range(9):
        rows = followed.of(number)
        assert (None if rows is None else spread(rows)) == plain.get(number)


def spread(rows: histories.Rows[int]) -> list[tuple[int, int, int]]:
    return [(step, row.segment, row.value) for row in rows for step in range(row.first, row.stop)]
