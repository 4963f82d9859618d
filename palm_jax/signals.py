"""Stopping a run between two steps when the process is asked to end."""

from __future__ import annotations

import collections.abc
import contextlib
import os
import signal
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_MORE = b"\0"  # no signal has this number


@contextlib.contextmanager
def stop_request(
    tell: collections.abc.Callable[[str], None] = lambda name: None,
    *,
    echo_s: float = 0.0,
) -> collections.abc.Iterator[collections.abc.Callable[[], str | None]]:
    """Yields a function that names the first SIGINT or SIGTERM received, or None.

    A second signal ends the process at once, with exit code 128 + its number; what is on the
    disk is as a killed process leaves it.

    Args:
      tell: is given each signal's name as it comes, in a thread of its own.
      echo_s: within so many seconds of the first, signals are the same one: a group of
        processes was told, and one of them passes on what it was told.
    """
    received: list[str] = []
    first_at = 0.0
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    # A thread, because Python runs a handler only when the main thread is back from C, and
    # compiling can keep it there for minutes.
    def watch() -> None:
        nonlocal first_at
        while (byte := os.read(reader, 1)) != _NO_MORE:
            if byte[0] not in SIGNALS:
                continue
            name = signal.Signals(byte[0]).name
            is_second = bool(received)
            if is_second and time.monotonic() - first_at < echo_s:
                continue
            first_at = time.monotonic()
            received.append(name)
            try:
                tell(name)
            finally:
                if is_second:
                    os._exit(128 + byte[0])

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Without a handler in Python a signal would not be written to the pipe.
    before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    watcher.start()
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.write(writer, _NO_MORE)
        watcher.join()
        os.close(reader)
        os.close(writer)
