"""Keeps a training process: passes on signals, and starts it again where that is wanted."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from palm_jax import config
from palm_jax.errors import CannotDo
from palm_jax.record import folder, logbook
from palm_jax.supervise import worker
from palm_jax.supervise.endings import LOST_PEER, NO, STOPPED, Ending, Life, ending
from palm_jax.supervise.pace import Pace

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.1
_STACKS_S = 5  # after the limit, for the process to show where it hangs
_MEMORY_EVENTS = pathlib.Path("/sys/fs/cgroup/memory.events")
# Where XLA begins to say that another process is lost, and then aborts.
_LAST_WORDS = re.compile(
    r"coordination_service|CoordinationService|JAX distributed service detected"
)


class Keeper:
    def __init__(
        self,
        command: collections.abc.Sequence[str],
        settings: config.Config,
        run: str,
        restarts: bool,
    ) -> None:
        """Keep the process that `command` starts; `restarts`: start it again, within bounds."""
        self._command, self._settings, self._run = list(command), settings, run
        self._restarts = restarts
        self._child: subprocess.Popen[str] | None = None
        self._signals: list[int] = []
        self._checkpoint = -1  # the newest that was told of
        self._step: int | None = None
        self._segment: int | None = None

    def keep(self) -> int:
        """Until the process is done, must not go on or was stopped; returns the exit code."""
        in_vain, wait = 0, self._settings.supervise.backoff_s
        with self._forwarding():
            while True:
                before = self._checkpoint
                found = self._live()
                if not found.is_said:
                    _say(f"error: {found.cause}" + f"; {found.remedy}" * bool(found.remedy))
                if not self._restarts or not found.again or self._signals:
                    return STOPPED if self._signals and found.again else found.exit_code
                if self._checkpoint > before:
                    in_vain, wait = 0, self._settings.supervise.backoff_s
                in_vain += 1
                if in_vain > self._settings.supervise.restarts:
                    _say(
                        f"the run gave up: {found.cause}, and {in_vain - 1} restarts in a row made "
                        f"no newer checkpoint (supervise.restarts={in_vain - 1})"
                    )
                    return NO
                self._record(found, in_vain, wait)
                _say(f"restarts after {wait:g} s: {found.cause}")
                if self._stopped_within(wait):
                    return STOPPED
                wait = min(2 * wait, self._settings.supervise.longest_backoff_s)

    # --- one life of the process ---

    def _live(self) -> Ending:
        news_here, news_there = os.pipe()
        stderr = os.dup(2)
        kills = _out_of_memory_kills()
        self._child = subprocess.Popen(
            self._command,
            env={**os.environ, worker.KEPT: f"{news_there},{stderr}"},
            pass_fds=(news_there, stderr),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C is passed on, once
        )
        os.close(news_there)
        os.close(stderr)
        assert self._child.stderr is not None
        pace, native = Pace(self._settings.supervise), _Native(self._child.stderr)
        news = _News(news_here, pace)
        silent = self._wait(news, pace)
        native.join()
        for told in news.all():
            self._hear(told)
        waits = self._settings.distributed
        found = ending(
            Life(
                self._child.returncode,
                native.last_words,
                silent_s=silent,
                out_of_memory=_out_of_memory_kills() > kills,
                told_to_stop=bool(self._signals),
                waits=f" within distributed.start_timeout_s={waits.start_timeout_s}",
            )
        )
        if found.exit_code != LOST_PEER:
            sys.stderr.write(native.last_words)
        return found

    def _wait(self, news: _News, pace: Pace) -> float | None:
        """Until the process ends; how long it was silent, if it was killed for that."""
        assert self._child is not None
        while self._child.poll() is None:
            time.sleep(_LOOK_S)
            silent = time.monotonic() - news.last
            if self._restarts and silent > pace.limit() + _STACKS_S:
                self._child.kill()
                self._child.wait()
                return silent
        return None

    def _hear(self, told: dict[str, Any]) -> None:
        self._step = told["step"]
        if told["event"] == "start":
            self._segment = told["segment"]
        if told["event"] == "checkpoint":
            self._checkpoint = max(self._checkpoint, told["step"])

    # --- between two lives ---

    def _record(self, found: Ending, in_vain: int, wait: float) -> None:
        """Enter the restart into the run's logbook, if there is a run."""
        if int(os.environ.get("PALM_JAX_PROCESS_ID", "0")) or not folder.is_run(self._run):
            return
        try:
            with logbook.Logbook.open(self._run) as book:
                book.append(
                    "restart",
                    segment=self._segment,
                    step=self._step,
                    cause=found.cause,
                    exit_code=found.exit_code,
                    in_vain=in_vain - 1,
                    wait_seconds=wait,
                )
        except CannotDo as error:
            _say(f"the restart could not be recorded: {error}")

    def _stopped_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return bool(self._signals)

    @contextlib.contextmanager
    def _forwarding(self) -> collections.abc.Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            self._signals.append(number)
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        before = {number: signal.signal(number, forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _News(threading.Thread):
    """Hears what a process tells, until it ends."""

    def __init__(self, descriptor: int, pace: Pace) -> None:
        super().__init__(name="news", daemon=True)
        self.last = time.monotonic()
        self._file, self._pace = os.fdopen(descriptor, encoding="utf-8"), pace
        self._heard: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        with self._file:
            for line in self._file:
                if not line.endswith("\n"):
                    return  # killed while telling
                told = json.loads(line)
                self.last = time.monotonic()
                self._pace.hear(told["event"], self.last)
                self._heard.append(told)

    def all(self) -> list[dict[str, Any]]:
        """What was heard, once the process has ended."""
        self.join()
        return self._heard


class _Native(threading.Thread):
    """Passes on what a process's libraries write, and keeps the words before an abort."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__(name="stderr", daemon=True)
        self.last_words = ""
        self._file = file
        self.start()

    def run(self) -> None:
        with self._file:
            for line in self._file:
                if self.last_words or _LAST_WORDS.search(line):
                    self.last_words += line
                else:
                    sys.stderr.write(line)
                    sys.stderr.flush()


def _out_of_memory_kills() -> int:
    """How often the system has killed a process of this container for memory; 0 if unknown."""
    try:
        text = _MEMORY_EVENTS.read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
