"""Stopping a run where a test wants it."""

from __future__ import annotations


class StopAfter:
    """A stop request that comes during the n-th step from now, counted from 0."""

    def __init__(self, last: int) -> None:
        self.left = last + 1

    def __call__(self) -> str | None:
        self.left -= 1
        return "SIGTERM" if self.left == 0 else None
