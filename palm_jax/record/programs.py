"""Which compiled programs a run has executed, by the digests of their modules."""

from __future__ import annotations

from typing import Any

from palm_jax import config
from palm_jax.errors import CannotDo
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.step import Program


class ProgramRecorder:
    """Enters each program into the logbook when it is first used.

    A run that goes on must be given the module it had: for equal settings and batch size, a
    module with another digest means that this package, or JAX, makes something else of them.
    """

    def __init__(
        self, run: RunFolder, segment: int, book: logbook.Logbook, allow_change: bool
    ) -> None:
        self.segment, self.book, self.allow_change = segment, book, allow_change
        self._noted: set[tuple[int, int]] = set()
        self._before: dict[tuple[str, ...], str] = {}
        for record in logbook.scan(run.path):
            if isinstance(record, dict) and record["event"] == "program":
                logbook.required(record, run.path, lowered_digest=str)
                self._before[_key(record)] = record["lowered_digest"]

    def note(self, step: int, program: Program, is_new: bool) -> float:
        """Record what `program` has compiled since it was last noted; returns the seconds.

        Args:
          is_new: compiled just now, and not for an earlier run of this process: that took no time
            of this one's.
        Raises:
          CannotDo: the run had another module here, and that is not allowed.
        """
        seconds = 0.0
        for batch_size, compiled in program.compiled.items():
            if (id(program), batch_size) in self._noted:
                continue
            self._noted.add((id(program), batch_size))
            fingerprint = config.fingerprint(program.settings)
            record = {
                "segment": self.segment,
                "step": step,
                "batch_size": batch_size,
                "fingerprint": fingerprint,
                "mesh": list(program.mesh.devices.shape),
                "microbatch_digests": program.settings.log.microbatch_digests,
                "vitals": program.settings.log.vitals,
                "lowered_digest": compiled.lowered_digest,
                "optimized_digest": compiled.optimized_digest,
            }
            before = self._before.get(_key(record))
            if before not in (None, compiled.lowered_digest) and not self.allow_change:
                raise CannotDo(
                    f"the program for batches of {batch_size} is not the one this run was made "
                    f"with (its module's digest was {before}, is {compiled.lowered_digest}): "
                    "palm_jax or JAX has changed. Continue with the versions in the logbook's "
                    "start event, or with --allow-environment, which the logbook will say"
                )
            spent = compiled.compile_seconds if is_new else 0.0
            self.book.append("program", **record, compile_seconds=spent)
            seconds += spent
        return seconds


def _key(record: dict[str, Any]) -> tuple[str, ...]:
    names = ("fingerprint", "batch_size", "mesh", "microbatch_digests", "vitals")
    return tuple(str(record.get(name)) for name in names)
