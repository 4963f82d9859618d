"""Several processes of one run: what they share, and what only the first one does.

All execute the same steps and read the same folder; each reads the rows that its own devices
hold. Only the first writes the logbook. With one process all of this does nothing.
"""

from __future__ import annotations

import collections.abc

import jax
import numpy as np
from jax.experimental import multihost_utils

from palm_jax import data


def is_first() -> bool:
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Return when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


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
