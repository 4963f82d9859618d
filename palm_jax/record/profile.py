"""A profiler's trace of a few steps, and what the devices say of their memory."""

from __future__ import annotations

import collections.abc
import contextlib
import pathlib
import time
import types
from typing import Any

import jax

from palm_jax import config, processes
from palm_jax.errors import CannotDo
from palm_jax.record.folder import RunFolder
from palm_jax.record.logbook import Logbook


class StepTrace:
    """Traces those of the steps of `log.profile` that this process executes.

    In RUN/segments/NNN/profile/STEP/process_P, STEP being the first one traced: a folder
    for TensorBoard's profiler, in which each trace has its own time. A run that goes on inside
    the interval traces from there; one that is stopped inside, up to there. A failure leaves
    what was traced until then, without an event.

    The event `profile` says which steps they are. A trace changes times, and no bits.
    """

    def __init__(
        self,
        settings: config.Log,
        run: RunFolder,
        segment: int,
        book: Logbook,
        tell: collections.abc.Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.asked, self.interval = settings.profile, settings.profile_steps or (0, 0)
        self.run, self.segment, self.book, self.tell = run, segment, book, tell
        self._first: int | None = None  # while tracing
        self._done = 0

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._first is None:
            return
        if error is None:
            self._stop()
        else:
            self._export(self._folder(self._first))

    @contextlib.contextmanager
    def step(self, step: int) -> collections.abc.Iterator[None]:
        """Around the dispatch of `step`: the trace begins before it, and knows its number.

        Raises:
          CannotDo: the profiler does not start, or the disk does not take the folder.
        """
        start, stop = self.interval
        if self._first is None and start <= step < stop:
            self._start(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def after(self, step: int, results: Any) -> float:
        """Once `step` is dispatched: wait for the last one's results, and write the trace.

        Returns:
          the seconds that writing took.
        Raises:
          CannotDo: the disk does not take it.
        """
        self._done = step + 1
        if self._first is None or self._done < self.interval[1]:
            return 0.0
        jax.block_until_ready(results)
        began = time.perf_counter()
        self._stop()
        return time.perf_counter() - began

    def _folder(self, first: int) -> pathlib.Path:
        return self.run.segment(self.segment) / "profile" / str(first)

    def _start(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        # Every Python call as an event would slow the host down, and hide the rest.
        options.python_tracer_level = 0
        options.raise_error_on_start_failure = True
        # Traces are named by host, and a host may have several processes.
        folder = self._folder(step) / f"process_{jax.process_index()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(folder, profiler_options=options)
        except (OSError, RuntimeError) as error:
            raise CannotDo(
                f"log.profile={self.asked}: cannot trace step {step} into {folder}: {error}; "
                "set log.profile=null to go on without"
            ) from error
        self._first = step

    def _stop(self) -> None:
        first = self._first
        assert first is not None, "nothing is traced"
        folder = self._folder(first)
        self._export(folder)
        fields = {
            "segment": self.segment,
            "step": first,
            "stop_step": self._done,
            "asked": self.asked,
            "folder": folder.relative_to(self.run.path).as_posix(),
        }
        self.book.append("profile", **fields)
        self.book.flush()
        self.tell("profile", fields)

    def _export(self, folder: pathlib.Path) -> None:
        self._first = None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise CannotDo(
                f"log.profile={self.asked}: cannot write the trace into {folder}: {error}; make "
                "room, or set log.profile=null"
            ) from error


def device_memory() -> dict[str, int]:
    """Bytes in use at most since the process started, and the limit: of the device with most.

    Of this process's devices. Empty where the platform does not count, as on a CPU.
    """
    names = {"device_bytes_peak": "peak_bytes_in_use", "device_bytes_limit": "bytes_limit"}
    counts = [device.memory_stats() or {} for device in jax.local_devices()]
    known = {name: [count[key] for count in counts if key in count] for name, key in names.items()}
    return {name: int(max(values)) for name, values in known.items() if values}


def input_wait(seconds: float) -> dict[str, Any]:
    """Seconds for which processes waited for a batch, where the slowest one reads.

    Args:
      seconds: of this process, the mean of a step: from asking for the batch until it is here.
    Returns:
      input_wait_seconds: of the process that waited longest. With several processes also
      input_wait_process, which one that is, and input_wait_seconds_least, of the quickest one.

    Of a step's time this is what a process has by itself: from dispatch on it waits for its
    devices, and so, through the collectives, for all others. A process whose disk is slow shows
    here; one whose devices are slow shows only in a trace. Devices may have had work meanwhile,
    so the time lost is at most this.
    """
    by_process = processes.by_process(seconds)
    slowest = max(range(len(by_process)), key=by_process.__getitem__)
    waits: dict[str, Any] = {"input_wait_seconds": by_process[slowest]}
    if len(by_process) > 1:
        waits |= {
            "input_wait_process": slowest,
            "input_wait_seconds_least": min(by_process),
        }
    return waits
