"""Execute an arm: step by step, with the loss on the probe after each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from palm_jax import config, data, processes
from palm_jax.course import Course
from palm_jax.diagnosis.arms import Arm, Plan
from palm_jax.diagnosis.feeds import ArmSource
from palm_jax.errors import WrongInput
from palm_jax.record import digests, logbook
from palm_jax.record.folder import RunFolder
from palm_jax.record.steps import computed_fields
from palm_jax.replay import states
from palm_jax.step import Program, TrainState, controls, make_program

PROBE_SHARE = 4  # of a batch, one part in so many, is enough for the probe,
PROBE_LEAST = 32  # but no fewer sequences, whose own quirks would be taken for the model's
MOST_PENDING = 10  # steps whose numbers may be on the devices
Tell = Callable[[str, int, int], None]  # (arm, steps done, of)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The held-out sequences whose loss is taken after each step: the first of the split, of
    several corpora the first of each in turn."""

    tokens: np.ndarray  # i32[P, L+1]
    counted: np.ndarray  # bool[P]; false for rows that only pad
    ids: list[int]  # of those that count

    @classmethod
    def read(cls, corpus: data.Rows, settings: config.Config) -> Probe:
        """
        Raises:
          WrongInput: the corpus has no held-out sequences.
        """
        numerics, ramp = settings.numerics, settings.data.ramp
        unit = numerics.lanes * numerics.microbatch
        num = -(-max(PROBE_LEAST, max(ramp.sizes) // PROBE_SHARE) // unit) * unit
        ranges = data.id_ranges(corpus, "held_out", settings.data.mixture)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*ranges.values()))
        ids = list(itertools.islice((i for i in in_turn if i is not None), num))
        if not ids:
            raise WrongInput(
                f"{corpus.folder} holds out no sequences, on which arms could be compared; "
                "prepare it with --held-out"
            )
        counted = np.arange(num) < len(ids)
        tokens = np.zeros((num, settings.model.sequence_length + 1), np.int32)
        tokens[counted] = corpus.read("held_out", ids)
        return cls(tokens, counted, ids)

    def asked(self, program: Program) -> Callable[[TrainState], jax.Array | tuple[Any, Any]]:
        """state -> what `loss_of` makes a number of; does not wait for the devices."""
        rows = program.rows_here(len(self.tokens))
        tokens, counted = program.put(self.tokens[rows]), program.put(self.counted[rows])

        def ask(state: TrainState) -> tuple[Any, Any]:
            sums = program.losses(state.params, tokens, counted)
            return sums.cross_entropy, sums.targets

        return ask

    @staticmethod
    def loss_of(asked: Any) -> float:
        """Cross-entropy in nats per target; the sum over sequences does not depend on the mesh."""
        nats, targets = jax.device_get(asked)
        total = np.asarray(nats, np.float64).reshape(-1)
        if not np.isfinite(total).all():
            return math.inf
        return math.fsum(total.tolist()) / int(np.sum(targets))


@dataclasses.dataclass(frozen=True)
class Laboratory:
    """What all arms of a diagnosis share: the run, read only, and its programs on a mesh."""

    run: RunFolder
    course: Course
    plan: Plan
    probe: Probe
    fork_state: Callable[[Any], tuple[TrainState, tuple[str, ...]]]  # from state_shapes

    def program_of(self, arm: Arm, step: int) -> Program:
        course = self.course
        if not arm.overrides:
            return course.program_at(step)
        settings = course.segment.settings_at(course.base, step)
        settings = config.override(settings, arm.overrides)
        key = config.fingerprint(settings)
        if key not in course.programs:
            end = course.corpus.manifest.end_of_document
            course.programs[key] = make_program(settings, course.mesh, end)
        return course.programs[key]

    def state_of(self, arm: Arm) -> tuple[TrainState, tuple[str, ...]]:
        """The arm's first state, its clocks set; and checkpoints that had to be passed over."""
        course, plan = self.course, self.plan
        if arm.state_step == plan.fork and arm.kind != "H":
            state, damaged = self.fork_state(course.program_at(plan.fork).state_shapes)
        else:
            found = states.state_in_history(self.run, course, arm.state_step)
            state, damaged = found.state, found.damaged
        clocks = course.segment.model_copy(
            update={"schedule_step": None, "update_count": arm.update_count}
        )
        if arm.pinned:
            fork, _ = self.fork_state(course.program_at(plan.fork).state_shapes)
            clocks = clocks.model_copy(
                update={
                    "schedule_step": int(fork.schedule_step),
                    "update_count": states.update_count(fork),
                }
            )
        return states.with_clocks(state, clocks), damaged

    @contextlib.contextmanager
    def batches(self, arm: Arm) -> Iterator[Iterator[data.StepBatch]]:
        source = ArmSource(
            self.course.corpus,
            self.course.base,
            self.course.segment,
            self.plan,
            arm,
            self.course.program_at(self.plan.fork).rows_here,
        )
        reading = self.course.base.data
        with contextlib.closing(
            data.batches(
                source,
                arm.first,
                arm.stop,
                threads=reading.read_threads,
                prefetch=reading.prefetch_steps,
            )
        ) as batches:
            yield batches


def execute(
    lab: Laboratory,
    arm: Arm,
    *,
    tell: Tell = lambda name, done, of: None,
    stop_requested: Callable[[], str | None] = lambda: None,
    digests_at: frozenset[int] = frozenset(),
    ended: Callable[[TrainState], None] = lambda state: None,
) -> dict[str, Any] | None:
    """Execute an arm; None if it was stopped before its end.

    Args:
      digests_at: steps before which the state's digest is taken.
      ended: is given the last state.
    Returns:
      its fields, as they are written to the diagnosis's folder.
    """
    began = time.perf_counter()
    state, damaged = lab.state_of(arm)
    limits = lab.course.skip_above if arm.kind in ("H", "W", "A", "N") else {}
    ask = lab.probe.asked(lab.program_of(arm, arm.first))
    probe: list[float] = []
    rows: list[tuple[int, dict[str, Any]]] = []
    pending: list[tuple[int, data.StepBatch, Any, Any]] = []
    state_digests: dict[str, str] = {}

    def collect() -> None:
        whole = processes.whole_digests([batch.digest for _, batch, _, _ in pending])
        vitals = jax.device_get([v for _, _, v, _ in pending])
        for (step, batch, _, asked), digest, numbers in zip(pending, whole, vitals, strict=True):
            settings = lab.program_of(arm, step).settings
            rows.append((step, computed_fields(settings, batch, digest, numbers)))
            probe.append(Probe.loss_of(asked))
        pending.clear()

    begin = Probe.loss_of(ask(state))  # replaced where scoring begins later
    with lab.batches(arm) as batches:
        for step, batch in zip(range(arm.first, arm.stop), batches, strict=True):
            program = lab.program_of(arm, step)
            limit = arm.skip_above if arm.skip_above is not None else limits.get(step, math.inf)
            now = controls(rate_scale=arm.rate_scale, skip_above=limit)
            state, vitals = program.step(state, program.put(batch.tokens), now)
            pending.append((step, batch, vitals, ask(state)))
            done = step + 1
            if done in digests_at:
                state_digests[str(done)] = digests.digest(state).whole
            if len(pending) >= MOST_PENDING or done == arm.stop:
                collect()
                tell(arm.name, done - arm.first, arm.num_steps)
                if processes.agreed(stop_requested()) is not None and done < arm.stop:
                    return None
    lead = arm.scored_from - arm.first
    last = digests.digest(state).whole
    ended(state)
    compared = arm.kind in ("H", "A")
    return {
        "arm": arm.model_dump(mode="json"),
        "begin": begin if lead == 0 else probe[lead - 1],
        "probe": probe[lead:],
        "loss": [float(fields["loss"]) for _, fields in rows][lead:],
        "gradient_norm": [float(fields["gradient_norm"]) for _, fields in rows][lead:],
        "rate": [float(fields["rate"]) for _, fields in (*rows[:1], *rows[-1:])],
        "applied": sum(bool(fields["applied"]) for _, fields in rows),
        "bits": {str(s): logbook.exact_bits(fields) for s, fields in rows} if compared else {},
        "state_digests": state_digests,
        "state_digest": last,
        "damaged": list(damaged),
        "seconds": time.perf_counter() - began,
    }
