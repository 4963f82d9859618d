"""A keeper and what it keeps: processes that stand in for training, and end as they are told."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from palm_jax import config
from palm_jax.record import folder, logbook
from palm_jax.supervise import worker
from palm_jax.supervise.keeper import Keeper

# Tells its keeper what the test wants, life by life; `lives` counts them.
STAND_IN = """
import json, os, pathlib, signal, sys, time
from palm_jax.supervise import worker
from palm_jax import config
lives = pathlib.Path(sys.argv[1]) / "lives"
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("." * (life + 1))
news = worker.News(config.Supervise())
def start(step): news("start", {"segment": 0, "step": step})
def steps(step): news("step", {"step": step})
def saved(step): news("checkpoint", {"step": step})
def native(text): os.write(2, text.encode())
"""


@pytest.fixture
def keeper(tmp_path, monkeypatch):
    """keeper(body, **supervise) -> (exit code, lives)."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))

    def keep(body: str, supervised: bool = True, **supervise) -> tuple[int, int]:
        script = tmp_path / "stand_in.py"
        script.write_text(STAND_IN + textwrap.dedent(body))
        settings = config.from_dict({**SETTINGS, "supervise": {"backoff_s": 0.0, **supervise}})
        command = [sys.executable, str(script), str(tmp_path)]
        code = Keeper(command, settings, str(tmp_path / "run"), supervised).keep()
        return code, len((tmp_path / "lives").read_text())

    return keep


SETTINGS = {
    "steps": 9,
    "model": {
        **{"num_layers": 1, "width": 8, "num_heads": 1, "head_size": 8},
        **{"vocabulary_size": 257, "sequence_length": 8},
    },
    "data": {"corpus": "corpus", "ramp": {"sizes": [8]}},
}


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(5)", "os.abort()"])
def test_what_ends_before_its_time_is_started_again(keeper, capfd, end):
    assert keeper(f"start(0); steps(1)\nif life < 2: {end}") == (0, 3)
    assert capfd.readouterr().err.count("restarts after 0 s: it ") == 2


@pytest.mark.parametrize("code", [0, 1, 2])
def test_what_is_done_or_would_end_the_same_way_is_not(keeper, code):
    assert keeper(f"sys.exit({code})") == (code, 1)


@pytest.mark.parametrize("code", [0, 3, 5, 6])
def test_without_supervision_nothing_is_started_again(keeper, code):
    assert keeper(f"sys.exit({code})", supervised=False) == (code, 1)


def test_restarts_without_a_newer_checkpoint_come_to_an_end(keeper, capfd):
    body = "start(0); steps(1); os.kill(os.getpid(), 9)"
    assert keeper(body, restarts=2) == (1, 3)
    said = capfd.readouterr().err
    assert "the run gave up: it was killed by SIGKILL, and 2 restarts in a row" in said
    assert "supervise.restarts=2" in said


def test_newer_checkpoint_gives_new_patience(keeper):
    # Lives 1 and 3 make progress; 3 in a row without would be too many.
    body = """
        start(0); steps(1)
        if life in (1, 3): saved(life)
        if life < 5: os.kill(os.getpid(), 9)
    """
    assert keeper(body, restarts=2) == (0, 6)


def test_process_that_hangs_is_killed_and_started_again(keeper, monkeypatch, capfd):
    monkeypatch.setattr("palm_jax.supervise.keeper._STACKS_S", 0.2)
    body = """
        start(0)
        steps(1)
        if life == 0: os.kill(os.getpid(), signal.SIGSTOP)
    """
    assert keeper(body, stall_s=1.0) == (0, 2)
    assert "restarts after 0 s: it hung: no news for 1 s" in capfd.readouterr().err


def test_lost_peer_is_named_in_one_line_and_the_pages_are_left_out(keeper, capfd):
    body = """
        native("a warning of a library\\n")
        native("E1 coordination_service.cc:1] The following tasks are unhealthy (x):\\n1\\n")
        native("*** Check failure stack trace: ***\\n    @ 0x7fa91e040634\\n")
        os.abort()
    """
    assert keeper(body, supervised=False) == (6, 1)
    said = capfd.readouterr().err
    assert "a warning of a library" in said
    assert "error: no sign of life from process 1" in said
    assert "stack trace" not in said


def test_abort_for_another_reason_is_shown_whole(keeper, capfd):
    body = 'native("F1 some.cc:1] Check failed: x\\n    @ 0x7f\\n"); os.abort()'
    assert keeper(body, supervised=False) == (134, 1)
    said = capfd.readouterr().err
    assert "Check failed: x\n    @ 0x7f\n" in said
    assert "error: it was killed by SIGABRT" in said


def test_restart_is_an_event_with_its_cause(keeper, tmp_path):
    # A run's folder, as far as a logbook needs one.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folder.CONFIG).write_text("")
    assert keeper("start(4); steps(7)\nif life < 1: os.kill(os.getpid(), 9)") == (0, 2)
    (event,) = logbook.read(tmp_path / "run").records
    assert event["event"] == "restart"
    assert event["cause"] == "it was killed by SIGKILL"
    assert (event["segment"], event["step"], event["exit_code"]) == (0, 7, 137)


KEEP = """
import sys
from palm_jax import config
from palm_jax.supervise.keeper import Keeper
settings = config.from_dict({settings!r})
sys.exit(Keeper([sys.executable, {script!r}, {folder!r}], settings, "run", True).keep())
"""


def kept(tmp_path, body: str) -> subprocess.Popen:
    """A keeper in a process of its own, whose stand-in is up."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN + textwrap.dedent(body))
    text = KEEP.format(settings=SETTINGS, script=str(script), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


STOPS = """
    stop = []
    signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
    start(0)
    (lives.parent / "up").write_text(str(os.getpid()))
    step = 0
    while not stop:
        step += 1
        steps(step)
        time.sleep(0.05)
    (lives.parent / "saved").write_text("yes")
    sys.exit(4)
"""


def test_signal_is_passed_on_and_the_run_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    with kept(tmp_path, STOPS) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 4
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "lives").read_text() == "."


def test_run_whose_keeper_is_killed_saves_and_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    with kept(tmp_path, STOPS) as process:
        process.kill()
    deadline = time.monotonic() + 30
    while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "saved").exists()


def test_news_name_the_pipe_once(monkeypatch):
    reader, writer = os.pipe()
    before = sys.stderr
    monkeypatch.setenv(worker.KEPT, f"{writer},{os.dup(2)}")
    try:
        news = worker.News(config.Supervise())
        news("step", {"step": 3, "loss": 1.0})
        news.close()
    finally:
        sys.stderr.close()
        sys.stderr = before
    assert json.loads(os.read(reader, 1000)) == {"event": "step", "step": 3}
    assert not worker.is_kept()  # what it starts is not kept by the same keeper
    os.close(reader)
    os.close(writer)
