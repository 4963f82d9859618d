"""The data of an arm, step by step: a pure function of the run, the plan and the arm."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from palm_jax import config, data, stream
from palm_jax.diagnosis.arms import Arm, Plan
from palm_jax.record.segments import Segment
from palm_jax.replay import branches

Ids = npt.NDArray[np.int64]
NEIGHBOURS = 4  # batches that a placebo permutes among themselves


@dataclasses.dataclass(frozen=True, eq=False)
class ArmSource:
    """Random access to an arm's batches: `source[step]`, for steps below `arm.stop`."""

    corpus: data.Rows
    base: config.Config
    segment: Segment
    plan: Plan
    arm: Arm
    rows: Callable[[int], Ids]  # of a batch of that size, those that this process reads
    _cache: dict[str, list[Ids]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.arm.stop

    def __getitem__(self, step: int) -> data.StepBatch:
        first_position, ids = self.ids(step)
        rows = self.rows(len(ids))
        tokens = self.corpus.read("train", ids[rows])
        digest = data.batch_digest(rows, ids[rows], tokens)
        return data.StepBatch(
            self._data_step(step), first_position, rows, ids[rows], tokens, digest
        )

    def ids(self, step: int) -> tuple[int, Ids]:
        """Where the run's own batch begins, and the sequences that the arm is fed, of all rows."""
        plan, arm = self.plan, self.arm
        again = arm.feed == "other, then own" and step >= plan.stop
        here = self._step_of_run(step)
        if again:
            here -= plan.horizon
        first, own = self._own(here)
        in_window = plan.fork <= here < plan.window_stop
        match arm.feed:
            case "permuted":
                return first, self._permuted(here)
            case "other, then own" if again:
                return first, self._permuted(here)
            case "other" | "other, then own" if in_window:
                return first, self._drawn(here)
            case "all other":
                return first, self._drawn(here)
            case "excluded":
                first, rest = self._after_exclusion(here)
                if arm.replicate:
                    rest = self._rng("rows", step).permutation(rest)
                return first, rest
            case _:
                return first, own

    def _step_of_run(self, step: int) -> int:
        """The step whose data, or batch size, it is."""
        # B's data are those from the fork on, whatever its clocks count from.
        return step - self.arm.first + self.plan.fork if self.arm.kind == "B" else step

    def _data_step(self, step: int) -> int:
        return self.segment.data_step(self._step_of_run(step))

    def _own(self, step: int) -> tuple[int, Ids]:
        return self._read(step, self.segment.exclusions)

    def _after_exclusion(self, step: int) -> tuple[int, Ids]:
        window = branches.positions_of(
            self.base, self.segment, self.plan.fork, self.plan.window_stop
        )
        return self._read(step, stream.normalized([*self.segment.exclusions, *window]))

    def _read(self, step: int, exclusions: stream.Exclusions) -> tuple[int, Ids]:
        fed, at = stream.Stream.of(self.base.data, exclusions), self.segment.data_step(step)
        return fed.first_position(at), data.ids_at(self.base.seed, fed.places(at), self._id_ranges)

    @property
    def _id_ranges(self) -> dict[stream.Name, range]:
        return data.id_ranges(self.corpus, mixture=self.base.data.mixture)

    def _permuted(self, step: int) -> Ids:
        plan = self.plan
        source = step
        if plan.fork <= step < plan.window_stop:
            # Among a few neighbours, apart before and after the onset, so that what is suspect
            # comes as thick as it did; of one size, so that the ramp stays what it is.
            begin = plan.fork if step < plan.onset else plan.onset
            end = plan.onset if step < plan.onset else plan.window_stop
            first = begin + (step - begin) // NEIGHBOURS * NEIGHBOURS
            size = len(self._own(step)[1])
            near = range(first, min(first + NEIGHBOURS, end))
            same = [s for s in near if len(self._own(s)[1]) == size]
            source = same[int(self._rng("batches", first).permutation(len(same))[same.index(step)])]
        return self._rng("rows", step).permutation(self._own(source)[1])

    def _drawn(self, step: int) -> Ids:
        """The batch of `step` from streams of the corpora in an order of the arm's own."""
        if "drawn" not in self._cache:
            # Row by row from the same corpus, so that a mixture stays what it is.
            fed = self.segment.stream_of(self.base)
            others = {name: self._others(name, own) for name, own in self._id_ranges.items()}
            self._cache["drawn"] = [
                np.array([next(others[name]) for name in fed.corpora(self._data_step(s))], np.int64)
                for s in range(self.arm.first, len(self))
            ]
        return self._cache["drawn"][step - self._step_of_run(self.arm.first)]

    def _others(self, name: stream.Name, own: range) -> Iterator[int]:
        """All sequences of a corpus but the suspects, each once before any comes again."""
        plan = self.plan
        suspects = {
            int(i) for step in range(plan.fork, plan.window_stop) for i in self._own(step)[1]
        }.intersection(own)
        seed = int(self._rng("drawn").integers(2**31))
        for position in itertools.count():
            (sequence,) = data.ids_at(seed, [(name, position)], {name: own}).tolist()
            # A corpus of nothing but suspects has no other data to offer.
            if sequence not in suspects or len(suspects) >= len(own):
                yield sequence

    def _rng(self, what: str, step: int = 0) -> np.random.Generator:
        text = f"{self.base.seed}/{self.plan.onset}/{self.arm.replicate}/{what}/{step}"
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"diagnosis arm").digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))
