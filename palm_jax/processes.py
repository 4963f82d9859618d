"""Several processes of one run: what they share, and what only the first one does.

All execute the same steps and read the same folder; each reads the rows that its own devices
hold. Only the first writes the logbook. With one process all of this does nothing.

What concerns no device goes through the key-value store of JAX's coordination service, which
process 0 serves: there a missing process can be named, and waiting has an end.
"""

from __future__ import annotations

import collections.abc
import contextlib
import itertools
import json
import re
import socket
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from palm_jax import data, meeting
from palm_jax.errors import LostPeer, WrongInput

_ROUND = itertools.count()  # every process asks the same questions in the same order
_LISTEN_S = 1  # between two questions to process 0, which answers a hundred of them in that time
_FAREWELL_S = 3


def are_several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    return jax.process_index() == 0


def name() -> str:
    """This process as its peers' messages call it."""
    return f"process {jax.process_index()} ({socket.gethostname()})"


def wait_for_all(what: str, seconds: int | None = None) -> None:
    """Return when every process has come here.

    Args:
      seconds: how long to wait; the default is `distributed.start_timeout_s`.
    Raises:
      LostPeer: some have not come; it names them.
    """
    if jax.process_count() == 1:
        return
    seconds = seconds or meeting.waits().start_timeout_s
    try:
        _client().wait_at_barrier(f"palm_jax: {what} {next(_ROUND)}", seconds * 1000)
    except jax.errors.JaxRuntimeError as error:
        missing = missing_at_barrier(str(error))
        if not missing:
            raise
        raise LostPeer(
            f"{_listed(missing)} of {jax.process_count()} did not come as far as {what!r} within "
            f"{seconds} s (distributed.start_timeout_s)"
        ) from error


def missing_at_barrier(text: str) -> list[int]:
    """Indices of the processes that XLA's message about a barrier misses."""
    found = re.search(r"timed out task names:\s*((?:\d+\s+)+)", text + "\n")
    return sorted(map(int, found[1].split())) if found else []


def _listed(indices: collections.abc.Sequence[int]) -> str:
    names = ", ".join(map(str, indices))
    return f"process {names}" if len(indices) == 1 else f"processes {names}"


def hosts() -> list[str]:
    """Every process's host. All processes ask together."""
    if jax.process_count() == 1:
        return [socket.gethostname()]
    folder = f"palm_jax/hosts/{next(_ROUND)}"
    _client().key_value_set(f"{folder}/{jax.process_index()}", socket.gethostname())
    wait_for_all("saying where they run")
    found = dict(_client().key_value_dir_get(folder))
    return [found[f"{folder}/{index}"] for index in range(jax.process_count())]


class Disagreement(WrongInput):
    """Raised in all processes at once, so that none needs to tell the others."""


def check_agreement(identity: collections.abc.Mapping[str, Any]) -> None:
    """Raise Disagreement if the processes were not all given the same to train, by name.

    Args:
      identity: plain JSON that must be the same everywhere.
    """
    if jax.process_count() == 1:
        return
    folder = f"palm_jax/identity/{next(_ROUND)}"
    # Where it runs, beside what it is, so that an answer can name the host.
    mine = {"host": socket.gethostname(), "identity": dict(identity)}
    _client().key_value_set(f"{folder}/{jax.process_index()}", json.dumps(mine))
    wait_for_all("saying what they train")
    said = {
        int(key.rpartition("/")[2]): json.loads(value)
        for key, value in _client().key_value_dir_get(folder)
    }
    if problem := disagreement(said):
        raise Disagreement(problem)


def disagreement(said: collections.abc.Mapping[int, dict[str, Any]]) -> str | None:
    """Which process was given something else than process 0, and what; None: none was."""
    first = said[0]
    for index, other in sorted(said.items()):
        keys = {**first["identity"], **other["identity"]}
        rows = [
            f"{key} is {there!r} there and {here!r} in process 0"
            for key in keys
            if (there := other["identity"].get(key)) != (here := first["identity"].get(key))
        ]
        if rows:
            more = f"; and {len(rows) - 5} more" if rows[5:] else ""
            return (
                f"process {index} ({other['host']}) is not about to train what process 0 "
                f"({first['host']}) is: {'; '.join(rows[:5])}{more}. Give all processes the same "
                "command, the same corpus and the same version"
            )
    return None


# --- the end of one is the end of all ---

_GONE = "palm_jax/gone"


@contextlib.contextmanager
def shared_fate() -> collections.abc.Iterator[None]:
    """End all processes of the run where one ends by an error, and say to each which and why.

    A process that fails tells the others, and does not wait for them; they end with exit code
    6. Without it they would wait for its part of the next sum until XLA misses its heartbeat.
    """
    if jax.process_count() == 1:
        yield
        return
    is_over = threading.Event()
    listener = threading.Thread(target=_end_with_another, args=(is_over,), name="peers")
    listener.start()
    try:
        yield
    except Disagreement:
        _let_others_hear()
        raise
    except Exception as error:
        if _is_xlas(error):
            # Most likely a connection to a peer that is gone. XLA finds out which one, and aborts.
            time.sleep(meeting.waits().timeout_s + _FAREWELL_S)
            raise LostPeer(f"the processes' connections failed: {_first_line(error)}") from error
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was quicker
            text = f"{type(error).__name__}: {_first_line(error)}"
            _client().key_value_set(_GONE, json.dumps({"process": name(), "error": text}))
        _let_others_hear()
        raise
    finally:
        is_over.set()
        listener.join()


# What begins an error of XLA, of the kinds that a lost connection has.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


def _is_xlas(error: Exception) -> bool:
    """Whether XLA's runtime raised it; what fails as it is dispatched reaches us as ValueError."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    return isinstance(error, ValueError) and _STATUS.match(str(error)) is not None


def _end_with_another(is_over: threading.Event) -> None:
    # Not one long question: a thread that waits in C++ when Python ends aborts the process.
    while not is_over.wait(_LISTEN_S * max(1, jax.process_count() / 100)):
        try:
            told = json.loads(_client().key_value_try_get(_GONE))
        except jax.errors.JaxRuntimeError:
            continue  # nobody has told; if the service has ended, XLA says so
        if told["process"] != name():
            print(f"error: {told['process']} has ended: {told['error']}", file=sys.stderr)
            _let_others_hear()
            meeting.leave(LostPeer.exit_code)


def _let_others_hear() -> None:
    # With process 0 the service ends, and XLA then aborts whoever has not ended by itself.
    if is_first():
        time.sleep(_FAREWELL_S)


def _client() -> Any:
    # JAX has no public name for its key-value store.
    client = distributed.global_state.client
    assert client is not None
    return client


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# --- numbers of all processes ---


def whole_digests(parts: collections.abc.Sequence[str]) -> list[str]:
    """Digests of whole batches from those of the rows that each process read."""
    if jax.process_count() == 1:
        return list(parts)
    # As two 32-bit words each: JAX would halve 64-bit ones.
    words = np.array([[int(p[:8], 16), int(p[8:], 16)] for p in parts], np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(words))
    return [
        data.add_digests(f"{int(high):08x}{int(low):08x}" for high, low in gathered[:, place])
        for place in range(len(parts))
    ]


def by_process(number: float) -> list[float]:
    """Every process's number, in float32 if there are several; the same answer in all of them."""
    if jax.process_count() == 1:
        return [number]
    gathered = multihost_utils.process_allgather(np.array([number], np.float32))
    return [float(each) for each in np.asarray(gathered).ravel()]


def agreed(reason: str | None) -> str | None:
    """A reason to stop that any process has; the same answer in all of them."""
    if jax.process_count() == 1:
        return reason
    flags = np.asarray(multihost_utils.process_allgather(np.array([reason is not None])))
    if not flags.any():
        return None
    return reason or "a signal to another process"
