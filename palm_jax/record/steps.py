"""Records of steps: kept on the devices until they are flushed, then written and checked."""

from __future__ import annotations

import collections.abc
import time
from typing import Any

import jax
import numpy as np
import tensorboardX

from palm_jax import config, data, processes, stream
from palm_jax.errors import CannotDo
from palm_jax.plan import flops
from palm_jax.record import logbook, profile
from palm_jax.record.logbook import MICROBATCH_DIGESTS, History, Logbook
from palm_jax.record.throughput import Throughput
from palm_jax.spikes.incidents import Alarm

Tell = collections.abc.Callable[[str, dict[str, Any]], None]  # (event, fields)
Flushed = tuple[int, dict[str, Any]]  # a step and its computed fields


def computed_fields(
    settings: config.Config, batch: data.StepBatch, digest: str, vitals: dict[str, Any]
) -> dict[str, Any]:
    """A step's computed fields, which a replay must reproduce: vitals, and what was read.

    Args:
      digest: of the whole batch; `batch` may hold the rows of this process alone.
      vitals: on the host.
    """
    sequences = stream.sequences_before(settings.data.ramp, batch.step + 1)
    if MICROBATCH_DIGESTS in vitals:
        words = vitals[MICROBATCH_DIGESTS].tolist()
        vitals = vitals | {MICROBATCH_DIGESTS: [f"{high:08x}{low:08x}" for high, low in words]}
    return {
        **vitals,
        "tokens": sequences * settings.model.sequence_length,
        "batch_size": stream.batch_size(settings.data.ramp, batch.step),
        "first_position": batch.first_position,
        "batch_digest": digest,
    }


class StepRecorder:
    """Takes each step's batch and vitals; `flush` brings them to the logbook.

    Between flushes vitals stay on the devices, so that no step waits for its predecessor.
    A step that was executed before must have computed the same bits again.
    """

    def __init__(
        self,
        settings: config.Config,
        segment: int,
        book: Logbook,
        history: History,
        summaries: tensorboardX.SummaryWriter | None,
        tell: Tell,
    ) -> None:
        self.settings, self.segment = settings, segment
        self.book, self.history, self.summaries, self.tell = book, history, summaries, tell
        self.last: dict[str, Any] | None = None  # computed fields of the last flushed step
        self.slow: Alarm | None = None  # of the last flush: the run has become slower
        self._throughput = Throughput()
        self._pending: list[tuple[int, data.StepBatch, dict[str, jax.Array]]] = []
        device = jax.devices()[0]
        self._peak = settings.log.peak_flops or flops.peak_flops(device.device_kind)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last flush out of the next step's time."""
        self._since = time.perf_counter()
        self._waited = 0.0  # seconds for batches, since then

    def leave_out(self, seconds: float) -> None:
        """Take time spent on something else, such as compiling, out of the steps' time."""
        self._since += seconds

    def awaited(
        self, batches: collections.abc.Iterator[tuple[int, data.StepBatch]]
    ) -> collections.abc.Iterator[tuple[int, data.StepBatch]]:
        """The same batches; the time until each is here counts as waiting for input."""
        while True:
            began = time.perf_counter()
            found = next(batches, None)
            if found is None:
                return
            self._waited += time.perf_counter() - began
            yield found

    def add(self, step: int, batch: data.StepBatch, vitals: dict[str, jax.Array]) -> None:
        self._pending.append((step, batch, vitals))

    def flush(self) -> list[Flushed]:
        """Write what is pending and wait until it is on the disk; returns it.

        Raises:
          CannotDo: a step that was executed before has now computed other bits.
        """
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        vitals = jax.device_get([v for _, _, v in pending])
        measured = self._measured(pending)
        different, flushed = None, []
        digests = processes.whole_digests([batch.digest for _, batch, _ in pending])
        for (step, batch, _), digest, computed in zip(pending, digests, vitals, strict=True):
            self.last = computed_fields(self.settings, batch, digest, computed)
            flushed.append((step, self.last))
            first = self.history.first_attempt(self.segment, step)
            attempt = self.history.next_attempt(self.segment, step)
            self.book.step(
                segment=self.segment,
                attempt=attempt,
                step=step,
                computed=self.last,
                measured=measured,
            )
            again = logbook.exact_bits(self.last)
            field = logbook.compare_bits(first, again) if first is not None else None
            if field is not None and different is None:
                different = {
                    "step": step,
                    "attempt": attempt,
                    "field": field,
                    "first": (first or {}).get(field),
                    "again": again.get(field),
                    "microbatches": logbook.differing_microbatches(first or {}, again),
                }
            self._summarise(step, measured)
        if different is not None:
            self.book.append("difference", segment=self.segment, **different)
        self.book.flush()
        self.tell("step", {"step": pending[-1][0], **(self.last or {}), **measured})
        if different is not None:
            raise CannotDo(
                f"step {different['step']} was executed before, and its {different['field']} was "
                f"{different['first']}; now it is {different['again']}: this machine, "
                "environment or checkpoint does not give the run's bits. Nothing was saved; "
                "the logbook has both attempts"
            )
        self.restart_clock()
        return flushed

    def _measured(self, pending: list[tuple[int, data.StepBatch, Any]]) -> dict[str, Any]:
        """Means over the steps since the last flush, and the devices' memory now.

        All of a step's targets count. Processes meet here, all at the same flush.
        """
        model, seconds = self.settings.model, time.perf_counter() - self._since
        ramp = self.settings.data.ramp
        num_sequences = sum(stream.batch_size(ramp, batch.step) for _, batch, _ in pending)
        num_tokens = num_sequences * model.sequence_length
        step, last, _ = pending[-1]
        size = stream.batch_size(ramp, last.step)
        self.slow = self._throughput.add(step, size, seconds, num_tokens)
        rate = num_tokens / seconds
        mesh = self.settings.mesh
        num_devices = mesh.data_parallel * mesh.tensor
        measured = {
            "step_seconds": seconds / len(pending),
            "tokens_per_second": rate,
            "model_flops_per_second": rate * flops.train_flops_per_token(model),
        }
        if self._peak is not None:
            measured["model_flops_utilisation"] = flops.model_flops_utilisation(
                rate, model, num_devices, self._peak
            )
        waits = profile.input_wait(self._waited / len(pending))
        return measured | waits | profile.device_memory()

    def _summarise(self, step: int, measured: dict[str, Any]) -> None:
        if self.summaries is None or self.last is None:
            return
        for name, value in {**self.last, **measured}.items():
            # Limits are infinite where they are off.
            is_number = not isinstance(value, str) and np.ndim(value) == 0
            if is_number and name not in ("skip_above", "clip_norm"):
                self.summaries.add_scalar(name, float(value), step)
