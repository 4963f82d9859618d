"""Traces of steps, and what is measured of devices and processes."""

from __future__ import annotations

import pathlib
import time

import jax
import pytest
from runs import StopAfter

from palm_jax import config, console, data, processes
from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, logbook, profile, steps

STEPS = 8


def events(run: pathlib.Path, kind: str) -> list[dict]:
    return [record for record in logbook.read(run).records if record["event"] == kind]


def bits_of(run: pathlib.Path) -> dict[int, dict]:
    return {record["step"]: record["bits"] for record in events(run, "step")}


def traced_steps(folder: pathlib.Path) -> list[int]:
    """Steps whose dispatch is in the one trace below a folder."""
    (path,) = folder.rglob("*.xplane.pb")
    found = [
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("train") and "step_num" in dict(event.stats)
    ]
    return sorted(found)


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    """A short run without a trace. Read only."""
    run = tmp_path_factory.mktemp("straight") / "run"
    return run, training.train(small(steps=STEPS), run)


# --- the trace ---


def test_trace_holds_the_steps_asked_for_and_changes_no_bit(small, straight, tmp_path, capfd):
    run, told = tmp_path / "run", []
    settings = small(steps=STEPS, **{"log.profile": "3:6"})
    outcome = training.train(settings, run, tell=lambda *event: told.append(event))
    assert outcome.state_digest == straight[1].state_digest
    assert bits_of(run) == bits_of(straight[0])
    (event,) = events(run, "profile")
    wanted = {"segment": 0, "step": 3, "stop_step": 6, "asked": "3:6"}
    assert {key: event[key] for key in wanted} == wanted
    assert event["folder"] == "segments/000/profile/3"
    assert traced_steps(run / event["folder"] / "process_0") == [3, 4, 5]
    assert [fields for name, fields in told if name == "profile"] == [
        {key: event[key] for key in (*wanted, "folder")}
    ]
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_run_that_stops_and_goes_on_inside_the_interval_traces_both_parts(
    small, straight, tmp_path
):
    run, settings = tmp_path / "run", small(steps=STEPS, **{"log.profile": "3:7"})
    training.train(settings, run, stop_requested=StopAfter(4))  # after step 4
    assert training.train(settings, run).state_digest == straight[1].state_digest
    parts = [(e["step"], e["stop_step"], e["folder"]) for e in events(run, "profile")]
    assert parts == [(3, 5, "segments/000/profile/3"), (5, 7, "segments/000/profile/5")]
    assert traced_steps(run / parts[0][2]) == [3, 4]
    assert traced_steps(run / parts[1][2]) == [5, 6]


def trace_of(text: str, run: pathlib.Path) -> tuple[profile.StepTrace, list[tuple]]:
    """A trace of `log.profile=text`, and what it tells."""
    told: list[tuple] = []
    settings, book = config.Log(profile=text), logbook.Unwritten()
    trace = profile.StepTrace(
        settings, folder.RunFolder(run), 0, book, lambda *event: told.append(event)
    )
    return trace, told


def execute(trace: profile.StepTrace, start: int, stop: int, fails_at: int = -1) -> None:
    with trace:
        for step in range(start, stop):
            with trace.step(step):
                result = jax.numpy.ones(8) + step
            if step == fails_at:
                raise KeyboardInterrupt
            trace.after(step, result)


@pytest.mark.parametrize("steps", [(3, 9), (0, 1)])
def test_steps_outside_the_interval_are_not_traced(tmp_path, steps):
    trace, told = trace_of("1:3", tmp_path)
    execute(trace, *steps)
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_its_trace_without_an_event_and_another_can_begin(tmp_path):
    trace, told = trace_of("1:9", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        execute(trace, 0, 9, fails_at=2)
    assert told == []
    assert traced_steps(tmp_path) == [1, 2]
    trace, told = trace_of("0:1", tmp_path / "other")
    execute(trace, 0, 2)
    assert [fields["stop_step"] for _, fields in told] == [1]


def test_place_that_takes_no_trace_is_named(tmp_path):
    (tmp_path / "segments").write_text("no folder")
    trace, _ = trace_of("2:3", tmp_path)
    with pytest.raises(CannotDo, match=r"log\.profile=2:3: cannot trace step 2 into .*process_0"):
        execute(trace, 0, 9)


def test_trace_that_cannot_be_written_is_an_error(tmp_path):
    trace, told = trace_of("2:3", tmp_path)
    with trace.step(2):
        pass
    place = tmp_path / "segments/000/profile/2/process_0"
    place.rmdir()
    place.write_text("in the way")
    with pytest.raises(CannotDo, match=r"log\.profile=2:3: cannot write the trace"):
        trace.after(2, ())
    assert told == []


@pytest.mark.parametrize("text", ["5:3", "3:3", "a:b", "3", ":3", "-1:3", "3:5:7", "٣:5", ""])
def test_interval_that_is_none_is_refused(small, text):
    with pytest.raises(WrongInput, match=r"log\.profile") as caught:
        small(**{"log.profile": text})
    assert repr(text) in str(caught.value)
    assert "0 <= A < B" in str(caught.value)


def test_console_says_which_part_was_traced(capfd):
    fields = {"segment": 0, "step": 5, "stop_step": 7, "asked": "5:7", "folder": "profile/5"}
    progress = console.TrainingProgress(9)
    progress("profile", fields)
    progress("profile", {**fields, "asked": "3:7"})
    assert capfd.readouterr().err == (
        "profile of steps 5:7 in profile/5\n"
        "profile of steps 5:7, which is what this start made of 3:7 in profile/5\n"
    )


# --- the devices' memory ---


class Device:
    def __init__(self, stats: dict[str, int] | None) -> None:
        self.stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_device_memory_is_that_of_the_fullest_device(monkeypatch):
    stats = [{"peak_bytes_in_use": 5, "bytes_limit": 9}, {"peak_bytes_in_use": 7}]
    monkeypatch.setattr(jax, "local_devices", lambda: list(map(Device, stats)))
    assert profile.device_memory() == {"device_bytes_peak": 7, "device_bytes_limit": 9}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None), Device({})])
    assert profile.device_memory() == {}


def test_step_tells_the_devices_memory_where_it_is_known(small, monkeypatch):
    assert not any("device_bytes" in name for name in flushed(small(), 0.0))
    stats = {"peak_bytes_in_use": 7, "bytes_limit": 9, "num_allocs": 3}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    told = flushed(small(), 0.0)
    assert (told["device_bytes_peak"], told["device_bytes_limit"]) == (7, 9)


# --- waiting for input ---


def flushed(settings: config.Config, seconds: float) -> dict:
    """What is told of two steps, for each of whose batches one waits."""
    told = {}

    def slowly():
        with Corpus.open(settings.data.corpus) as corpus:
            for step in range(2):
                time.sleep(seconds)
                yield step, data.batch(corpus, settings.seed, step, settings.data.ramp)

    recorder = steps.StepRecorder(
        settings, 0, logbook.Unwritten(), logbook.History(), None, told.__setitem__
    )
    for step, batch in recorder.awaited(slowly()):
        recorder.add(step, batch, {"loss": 0.5})
    recorder.flush()
    return told["step"]


def test_one_process_tells_how_long_it_waited_for_input(small, monkeypatch):
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", None)  # costs nothing
    told = flushed(small(), 0.05)
    assert 0.05 <= told["input_wait_seconds"] <= told["step_seconds"]
    assert not {"input_wait_process", "input_wait_seconds_least"} & set(told)


def test_slowest_of_several_processes_is_named(small, monkeypatch):
    monkeypatch.setattr(processes, "by_process", lambda here: [0.25, here, 0.75, 0.5])
    told = flushed(small(), 0.0)
    assert (told["input_wait_seconds"], told["input_wait_process"]) == (0.75, 2)
    assert told["input_wait_seconds_least"] < 0.05


# --- what a person sees ---


def line_of(**fields) -> str:
    """The line of a step."""
    step = {"step": 1, "loss": 1.0, "gradient_norm": 1.0, "applied": True, "step_seconds": 1.0}
    step |= {"tokens_per_second": 1.0, "model_flops_per_second": 1e9, "input_wait_seconds": 0.0}
    return console.TrainingProgress(9)._news(step | fields)


def test_progress_shows_memory_where_it_is_known():
    known = {"device_bytes_peak": 3 * 2**29, "device_bytes_limit": 2**35}
    assert "1.5 of 32.0 GiB at most on a device" in line_of(**known)
    assert "1.5 GiB at most on a device" in line_of(device_bytes_peak=3 * 2**29)
    assert "GiB" not in line_of()


def test_progress_shows_waiting_where_it_is_much():
    assert line_of(input_wait_seconds=0.09) == line_of()
    assert line_of(input_wait_seconds=0.5).endswith("waits for input 50%")
    slowest = {"input_wait_seconds": 0.5, "input_wait_process": 3}
    assert line_of(**slowest).endswith("waits for input 50% in process 3")
