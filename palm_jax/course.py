"""The course of a segment: which program and which data belong to each of its steps."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import math

import jax

from palm_jax import config, data
from palm_jax.record.segments import Segment
from palm_jax.step import Program, TrainState, Vitals, controls, make_program


@dataclasses.dataclass(frozen=True)
class Course:
    """A segment's steps as functions of the state, on one mesh.

    Training, replays and branches all execute the steps of a course; nothing else does.
    """

    base: config.Config
    segment: Segment
    corpus: data.Rows
    mesh: jax.sharding.Mesh
    programs: dict[str, Program] = dataclasses.field(default_factory=dict)  # by fingerprint
    # Recorded limits of the gradient norm, above which `run` skips an update; others have none.
    skip_above: collections.abc.Mapping[int, float] = dataclasses.field(default_factory=dict)

    def program_at(self, step: int) -> Program:
        """The program of the settings in force at `step`; made once for each."""
        settings = self.segment.settings_at(self.base, step)
        key = config.fingerprint(settings)
        if key not in self.programs:
            end = self.corpus.manifest.end_of_document
            self.programs[key] = make_program(settings, self.mesh, end)
        return self.programs[key]

    @contextlib.contextmanager
    def batches(
        self, start: int, stop: int
    ) -> collections.abc.Iterator[collections.abc.Iterator[tuple[int, data.StepBatch]]]:
        """(step, batch) of steps [start, stop), read ahead; leaving ends the readers."""
        first, last = self.segment.data_step(start), self.segment.data_step(stop)
        source = data.BatchSource(
            self.corpus,
            self.base.seed,
            self.base.data.ramp,
            num_steps=last,
            exclusions=self.segment.exclusions,
            rows=self.program_at(start).rows_here,
            mixture=self.base.data.mixture,
        )
        reading = self.base.data
        with contextlib.closing(
            data.batches(
                source, first, last, threads=reading.read_threads, prefetch=reading.prefetch_steps
            )
        ) as batches:
            yield zip(range(start, stop), batches, strict=True)

    def run(
        self, state: TrainState, start: int, stop: int
    ) -> collections.abc.Iterator[tuple[int, data.StepBatch, TrainState, Vitals]]:
        """Execute steps [start, stop) from `state`, which is donated: (step, batch, the state
        after it, its vitals)."""
        with self.batches(start, stop) as batches:
            for step, batch in batches:
                program = self.program_at(step)
                limits = controls(skip_above=self.skip_above.get(step, math.inf))
                state, vitals = program.step(state, program.put(batch.tokens), limits)
                yield step, batch, state, vitals
