"""Processes of a run that a fault happens to."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

STEPS, SAVE_EVERY, PATIENCE_S = 40, 5, 300
MODEL = {"num_layers": 1, "width": 8, "num_heads": 1, "head_size": 8, "vocabulary_size": 257}
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "model": {**MODEL, "sequence_length": 16},
    "data": {"corpus": "corpus", "ramp": {"starts": [0, 12], "sizes": [4, 8]}},
    "numerics": {"lanes": 2, "microbatch": 2},
    "checkpoint": {"every": SAVE_EVERY},
    "distributed": {"timeout_s": 20, "start_timeout_s": 60},
    "supervise": {"backoff_s": 0.1, "stall_s": 20.0},
    "log": {"every": 1, "tensorboard": False, "vitals": "basic"},
}

# Read by Python at its start, in the folder that a trial puts on its path.
JUMPING_CLOCK = """
import os, time
began, jump = time.monotonic(), float(os.environ["CLOCK_JUMPS_BY"])
true = time.time
time.time = lambda: true() + (jump if time.monotonic() > began + 5 else 0)
"""


class Member:
    """One process of a run; it and what it has started are a group that can be signalled."""

    def __init__(
        self,
        command: collections.abc.Sequence[str],
        folder: pathlib.Path,
        environ: dict[str, str],
        largest_file: int | None = None,
        *,
        keeps: bool,
    ) -> None:
        """Start it; `largest_file`: bytes at which every file's disk is full.

        `keeps`: it starts the process that trains, and is not that process itself.
        """

        self._keeps = keeps
        self.said: list[str] = []
        self.step = 0  # the newest that it has told of
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        # From outside and after the start: Popen's preexec_fn would fork a process with JAX's
        # threads. Python takes longer to start than this.
        if largest_file is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
        self._printed: list[str] = []
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read, self._read_out)
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self._printed.extend(self.process.stdout)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.said.append(line)
                if line.startswith("step "):
                    self.step = int(line.split()[1].partition("/")[0])

    def is_running(self) -> bool:
        return self.process.poll() is None

    def worker(self) -> int:
        """The process that trains: itself, or the one that it keeps."""
        if not self._keeps:
            return self.process.pid
        path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split() if path.exists() else []
        return int(children[0]) if children else self.process.pid

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker(), number)

    def end(self, patience_s: float = PATIENCE_S) -> tuple[int, dict[str, Any] | None]:
        """Exit code and what it printed as JSON; a process that does not end is an error."""
        try:
            self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Hang(f"a process did not end within {patience_s} s:\n{self.text()}") from None
        for reader in self._readers:
            reader.join(timeout=5)
        out = "".join(self._printed).strip()
        return self.process.returncode, json.loads(out) if out else None

    def kill(self) -> None:
        for pid in {self.worker(), self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return "".join(self.said[-40:])


class Hang(Exception):
    pass


class Place:
    """A folder with a corpus and a config, in which runs are made."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        text = self.folder / "text"
        text.mkdir(parents=True, exist_ok=True)
        for number in range(40):
            words = " ".join(f"{'abcdefgh'[(number * k) % 8]}{k % 7}" for k in range(60))
            (text / f"{number:02d}.txt").write_text(words)
        (self.folder / "config.yaml").write_text(json.dumps(SETTINGS))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "palm_jax.cli", "data", "prepare"),
                *("--source", "text:text/*.txt", "--out", "corpus"),
                *("--sequence-length", "16", "--held-out", "0.2"),
            ],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def start(
        self,
        run: str,
        num_processes: int = 1,
        *overrides: str,
        only_second: collections.abc.Sequence[str] = (),
        command: collections.abc.Sequence[str] = (),
        supervised: bool = False,
        largest_file: int | None = None,
        clock_jumps_by: float | None = None,
    ) -> list[Member]:
        """Start training `run`, or another command about it, in so many processes."""
        environ = {}
        if clock_jumps_by is not None:
            (self.folder / "clock").mkdir(exist_ok=True)
            (self.folder / "clock" / "sitecustomize.py").write_text(JUMPING_CLOCK)
            path = os.environ.get("PYTHONPATH", "")
            environ["PYTHONPATH"] = f"{self.folder / 'clock'}{os.pathsep}{path}"
            environ["CLOCK_JUMPS_BY"] = str(clock_jumps_by)
        train = ["train", "config.yaml", *overrides, "--run", run]
        train += ["--supervise"] if supervised else []
        command = [sys.executable, "-m", "palm_jax.cli", *(command or train), "--json"]
        if num_processes == 1:
            return [Member(command, self.folder, environ, largest_file, keeps=supervised)]
        command += [f"mesh.data={num_processes}", f"mesh.emulated_devices={num_processes}"]
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        environ["JAX_COORDINATOR_ADDRESS"] = f"localhost:{port}"
        environ["PALM_JAX_NUM_PROCESSES"] = str(num_processes)
        return [
            Member(
                [*command, *(only_second if n == 1 else ())],
                self.folder,
                {**environ, "PALM_JAX_PROCESS_ID": str(n)},
                largest_file,
                keeps=True,
            )
            for n in range(num_processes)
        ]


def wait_for(condition: collections.abc.Callable[[], bool], member: Member) -> bool:
    """Until it holds; False if the process ended before."""
    while member.is_running():
        if condition():
            return True
        time.sleep(0.005)
    return False
