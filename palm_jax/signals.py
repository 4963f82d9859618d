"""Stopping a run between two steps when the process is asked to end."""

from __future__ import annotations

import collections.abc
import contextlib
import signal
import types


@contextlib.contextmanager
def stop_request() -> collections.abc.Iterator[collections.abc.Callable[[], str | None]]:
    """Yields a function that names the first SIGINT or SIGTERM received, or None.

    A second signal has its ordinary effect, at once.
    """
    received: list[str] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: types.FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        restore()

    for number in signals:
        signal.signal(number, handle)
    try:
        yield lambda: received[0] if received else None
    finally:
        restore()
