"""The training process's side: news for its keeper, and stacks when a step hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

from palm_jax import config
from palm_jax.supervise.pace import Pace

# Numbers of two open files, "news,stderr": a pipe to the keeper, and what was its own stderr.
KEPT = "PALM_JAX_KEPT"


def is_kept() -> bool:
    return KEPT in os.environ


class News:
    """Tells the keeper, if there is one, of what `train` tells of; meanwhile watches the time."""

    def __init__(self, settings: config.Supervise) -> None:
        self._pace = Pace(settings)
        self._pipe: int | None = None
        if is_kept():
            news, stderr = map(int, os.environ.pop(KEPT).split(","))
            self._pipe = news
            # What XLA writes, in pages, goes to the keeper; what Python writes to the person.
            sys.stderr = os.fdopen(stderr, "w", buffering=1, encoding="utf-8")
        # By a thread of C, which runs when Python's threads cannot.
        self._watch()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self._pace.hear(event, time.monotonic())
        self._watch()
        news = {"event": event, "step": fields.get("step")}
        if event == "start":
            news["segment"] = fields["segment"]
        self._send(news)

    def _watch(self) -> None:
        faulthandler.dump_traceback_later(self._pace.limit(), repeat=True, file=sys.stderr)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _send(self, news: dict[str, Any]) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, json.dumps(news).encode() + b"\n")
        except (
            BrokenPipeError
        ):  # the keeper is gone, and whoever wants to stop the run knows no other
            self._pipe = None
            os.kill(os.getpid(), signal.SIGTERM)
