"""Where a run's time went: a logbook made up second by second, and a real run's."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from runs import StopAfter
from typer.testing import CliRunner

from palm_jax import cli, train
from palm_jax.record import logbook, time_spent


def at(second: int) -> str:
    return f"2026-03-01T10:{second // 60:02d}:{second % 60:02d}+00:00"


def event(name: str, second: int, **fields):
    return {"event": name, "segment": 0, **fields, "time": at(second)}


def steps(first: int, stop: int, attempt: int = 1):
    """Of two seconds, half a second of which they wait."""
    measured = {"step_seconds": 2.0, "input_wait_seconds": 0.5}
    rest = {"computed": {"loss": 1.0}, "bits": {}, "measured": measured}
    return [
        {"event": "step", "segment": 0, "attempt": attempt, "step": step, **rest}
        for step in range(first, stop)
    ]


def write(run: pathlib.Path, *parts):
    (run / "logbook").mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 1\n")
    for number, records in enumerate(parts):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run / "logbook" / f"{number:04d}.jsonl").write_text(text)
    return run


def test_every_second_of_a_run_that_died_once_is_accounted_for(tmp_path):
    run = write(
        tmp_path / "run",
        [
            event("start", 0, step=0),
            event("program", 5, step=0, compile_seconds=4.0),  # and 1 s for what came before
            *steps(0, 4),  # until second 13
            event("checkpoint", 15, step=4, state_digest="ab", blocked_seconds=2.0),
            *steps(4, 7),  # until second 21; then it dies
        ],
        [
            event("start", 51, step=4),  # 30 s later
            event("program", 56, step=4, compile_seconds=3.0),  # and 2 s for restoring
            event("verification", 57, step=4, seconds=1.0),
            *steps(4, 10, attempt=2),  # until second 69
            event("evaluation", 72, step=10, seconds=3.0),
            event("stop", 72, step=10),
        ],
    )
    found = time_spent.of(run)
    assert dataclasses.asdict(found) == {
        "all_seconds": 72,
        "useful_seconds": 15,  # ten steps of 2 s, less what they waited
        "waiting_for_data_seconds": 5,
        "redone_seconds": 6,
        "compiling_seconds": 7,
        "saving_seconds": 2,
        "evaluating_seconds": 3,
        "verifying_seconds": 1,
        "standing_still_seconds": 30,
        "starting_seconds": 3,
    }
    assert found.goodput == 15 / 72


def test_of_a_run_that_never_started_nothing_is_known(tmp_path):
    found = time_spent.of(write(tmp_path / "run", []))
    assert (found.all_seconds, found.goodput) == (0, None)


@pytest.mark.parametrize("value", [1e308, -1.0, "inf", None, [3]])
def test_times_that_cannot_be_count_as_nothing(tmp_path, value):
    odd = event("checkpoint", 9, step=0, state_digest="ab", blocked_seconds=value)
    several = [odd] * (2 if value == 1e308 else 1)
    found = time_spent.of(write(tmp_path / "run", [event("start", 0, step=0), *several]))
    assert found.saving_seconds == (float("inf") if value == 1e308 else 0)


def test_a_real_run_is_accounted_for_on_the_command_line(small, tmp_path):
    run = tmp_path / "run"
    train.train(small(), run, stop_requested=StopAfter(5))
    train.train(small(), run)
    done = CliRunner().invoke(cli.app, ["plan", "goodput", "--run", str(run), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    records = logbook.read(run).records
    training = sum(r["measured"]["step_seconds"] for r in records if r["event"] == "step")
    assert told["useful_seconds"] + told["waiting_for_data_seconds"] == pytest.approx(training)
    saves = [r["blocked_seconds"] for r in records if r["event"] == "checkpoint"]
    assert told["saving_seconds"] == pytest.approx(sum(saves))
    assert min(saves) > 0
    compiled = [r["compile_seconds"] for r in records if r["event"] == "program"]
    assert told["compiling_seconds"] == pytest.approx(sum(compiled))
    assert 0 in compiled  # the second start found a program that this process had
    assert told["evaluating_seconds"] > 0
    shown = CliRunner().invoke(cli.app, ["plan", "goodput", "--run", str(run)])
    assert "standing still" in shown.stdout
