"""Who may write to a run: one process, whichever machine it is on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from palm_jax.errors import CannotDo
from palm_jax.record import lock

HOLD = """
import pathlib, sys, time
from palm_jax.record import lock
with lock.held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def owner(run, host, age_s=0.0):
    """Left behind by a process of another machine."""
    path = run / lock.FILE_NAME
    path.write_text(json.dumps({"host": host, "process": 7}) + "\n")
    now = time.time()
    os.utime(path, (now - age_s, now - age_s))
    return path


def test_owner_is_named_while_it_holds_the_run_and_leaves_nothing_behind(tmp_path):
    with lock.held(tmp_path):
        with pytest.raises(CannotDo) as caught, lock.held(tmp_path):
            pass
        assert f"(process {os.getpid()} on {socket.gethostname()})" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with lock.held(tmp_path):
        pass


def test_killed_owner_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CannotDo, match=f"process {holder.pid} on"), lock.held(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / lock.FILE_NAME).exists()
    with lock.held(tmp_path):
        assert json.loads((tmp_path / lock.FILE_NAME).read_text())["process"] == os.getpid()


def test_owner_on_another_machine_is_respected_until_it_is_old(tmp_path):
    owner(tmp_path, "elsewhere", age_s=lock.STALE_S - 60)
    with pytest.raises(CannotDo) as caught, lock.held(tmp_path):
        pass
    for words in ("another machine", "process 7 on elsewhere", lock.FILE_NAME):
        assert words in str(caught.value)
    owner(tmp_path, "elsewhere", age_s=lock.STALE_S + 60)
    with lock.held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"host": "x"}', "\x00"])
def test_owner_file_that_says_nothing_is_replaced(tmp_path, text):
    (tmp_path / lock.FILE_NAME).write_text(text)
    with lock.held(tmp_path):
        assert json.loads((tmp_path / lock.FILE_NAME).read_text())["process"] == os.getpid()


def test_owner_touches_its_file_and_ends_where_another_has_taken_over(tmp_path):
    impatient = HOLD.replace("with lock", "lock.TOUCH_S = 0.05\nwith lock")
    with subprocess.Popen(
        [sys.executable, "-c", impatient, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        path = tmp_path / lock.FILE_NAME
        os.utime(path, (1, 1))
        while path.stat().st_mtime == 1:
            time.sleep(0.01)
        owner(tmp_path, "elsewhere")
        assert holder.wait(timeout=30) == CannotDo.exit_code
        assert "was taken over (process 7 on elsewhere)" in holder.stderr.read()
