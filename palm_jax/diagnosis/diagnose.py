"""Diagnose a spike of a run: plan the arms, execute those that are needed, say what they show."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import math
import statistics
from typing import Any

from palm_jax import config, data, processes, sharding
from palm_jax.course import Course
from palm_jax.diagnosis import arms, forensics, leading, procedure, treatments
from palm_jax.diagnosis.arms import Arm, Plan
from palm_jax.diagnosis.casefile import FORENSICS, VERDICT, CaseFile
from palm_jax.diagnosis.experiment import Laboratory, Probe, Tell, execute
from palm_jax.diagnosis.procedure import Findings, Record
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import environment, logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay
from palm_jax.spikes import history
from palm_jax.spikes.incidents import Incident

BEFORE, AFTER = 20, 80  # steps of an arm before and after the onset
BUDGET = 4000  # steps
SAME_RATE = 0.02  # clocks that are not pinned may differ by so much
_CALM_FOR = 20  # steps that an arm goes on after the spike, and as long again as it took


@dataclasses.dataclass(frozen=True)
class Located:
    """A spike of a run, as recorded."""

    segment: int
    onset: int
    incident: Incident | None  # None: the step was named by hand
    recorded_stop: int  # the first step that the segment's record lacks


def incidents(run: RunFolder, settings: config.Spikes, segment: int) -> list[Incident]:
    """Of one segment, spikes only: a stall has no onset to go back from."""
    fold, found = history.detector(run, settings, segment)
    closed = [x for x in found if isinstance(x, Incident) and x.outcome is not None]
    still_open = [] if fold.open is None else [fold.open]
    first = segments.read(run.segment(segment)).start_step
    return [
        x for x in (*closed, *still_open) if x.kind not in ("stall", "skips") and x.onset >= first
    ]


def locate(
    run: RunFolder, settings: config.Spikes, at: int | None, segment: int | None
) -> Located | None:
    """The newest incident, or that nearest to `at`, or the step `at` itself; None: no incident.

    Args:
      segment: where to look; by default in all, the newest first.
    Raises:
      WrongInput: the step is not recorded.
    """
    numbers = range(run.last_segment(), -1, -1) if segment is None else [segment]
    for number in numbers:
        found = incidents(run, settings, number)
        first = segments.read(run.segment(number)).start_step
        recorded = [s for s, _ in history.steps(run, number) if s >= first]
        stop = recorded[-1] + 1 if recorded else first
        if at is None:
            if found:
                return Located(number, found[-1].onset, found[-1], stop)
            continue
        if recorded and recorded[0] <= at <= recorded[-1]:
            near = [x for x in found if x.onset - BEFORE <= at <= (x.closed or x.onset) + BEFORE]
            best = min(near, key=lambda x: abs(x.onset - at), default=None)
            return Located(number, at if best is None else best.onset, best, stop)
    if at is not None:
        raise WrongInput(f"--at {at}: the logbook of {run.path} has no record of that step")
    return None


def make_plan(
    run: RunFolder,
    settings: config.Config,
    corpus: data.Rows,
    located: Located,
    *,
    before: int = BEFORE,
    after: int = AFTER,
    budget: int = BUDGET,
    pinned: bool = True,
    other_rate: bool = False,
) -> Plan:
    """All arms for a spike, from the run's record.

    Raises:
      WrongInput: the spike is too early, the corpus has no other data, or unpinned clocks would
        have another rate.
    """
    for option, number in (("--before", before), ("--after", after), ("--budget", budget)):
        if number > config.MOST_STEPS:
            raise WrongInput(f"{option} {number}: give at most {config.MOST_STEPS:,}")
    described = segments.read(run.segment(located.segment))
    onset = located.onset
    fork = max(described.start_step, onset - before)
    # The last step that was off its course. Where it stayed off, any of its data may be why; a
    # half of the arm is left to see what becomes of it.
    incident = located.incident
    over = onset if incident is None else onset + after // 2
    if incident is not None and incident.recovery is not None:
        over = min(over, incident.recovery - 1)
    # As long as it took and as long again, so that a recovery is seen.
    until = onset + min(after, 2 * (over - onset) + _CALM_FOR)
    stop = min(until, located.recorded_stop)
    if stop <= onset:
        raise WrongInput(f"the logbook of {run.path} ends with step {stop - 1}, before the spike")
    window_stop = min(stop, over + 1)
    earlier = _earlier_states(run, located.segment, fork)
    if not earlier:
        raise WrongInput(
            f"the spike at step {onset} comes at the run's beginning: no earlier state is left "
            "to compare with"
        )
    fed = described.stream_of(settings)
    suspects = collections.Counter(
        name for step in range(fork, stop) for name in fed.corpora(described.data_step(step))
    )
    for name, own in data.id_ranges(corpus, mixture=settings.data.mixture).items():
        if len(own) < 2 * suspects[name]:
            raise WrongInput(
                f"{corpus.folder if name is None else name} has {len(own)} sequences, and the "
                f"arms' steps {fork} to {stop} read {suspects[name]}: there are no other data to "
                "compare with. Give fewer steps with --after"
            )
    far = [s for s in earlier if onset - s >= min(settings.spikes.rewind_steps, onset // 2)]
    well = {
        c.step
        for c in history.candidates(run, settings.spikes, earlier, located.segment)
        if not c.complaints
    }
    # A run's first state is healthy, and too young to tell of a later one.
    healthy = next((s for s in far if s in well and s > 0), far[0] if far else earlier[-1])
    vitals = [(s, v) for s, v in history.steps(run, located.segment) if s < fork]
    recent = [v.gradient_norm for _, v in vitals[-settings.spikes.window :]]
    fold, _ = history.detector(
        run, settings.spikes, located.segment, before=onset - settings.spikes.lag + 1
    )
    in_force = described.settings_at(settings, fork)
    plan = arms.planned(
        asked=(before, after, pinned),
        segment=located.segment,
        onset=onset,
        fork=fork,
        window_stop=window_stop,
        stop=stop,
        start=described.start_step,
        earlier=earlier,
        healthy=healthy,
        budget=budget,
        seconds_per_step=_seconds_per_step(run, located.segment),
        treatments=treatments.available(
            in_force,
            [n for n in recent if n is not None and math.isfinite(n)],
            fold.skip_above(onset),
        ),
    )
    if not pinned and not other_rate:
        _check_rates(run, plan)
    return plan


def _earlier_states(run: RunFolder, segment: int, fork: int) -> list[int]:
    """Steps before the fork whose states are at hand, the newest first, also of the segments
    that this one departed from."""
    found: set[int] = set()
    until = fork
    for folder, described, _ in reversed(history.chain(run, segment)):
        with Checkpoints(folder.checkpoints(described.segment), config.Checkpoint()) as saved:
            found |= {s for s in saved.steps() if described.start_step <= s < until}
        if described.start_step < fork:
            found.add(described.start_step)
        until = min(until, described.start_step)
    return sorted(found, reverse=True)


def _seconds_per_step(run: RunFolder, segment: int) -> float | None:
    steps = logbook.last_attempts(run.path, segment).values()
    measured = (record.get("measured") for record in steps)
    found = (logbook.number(m.get("step_seconds")) for m in measured if isinstance(m, dict))
    seconds = [one for one in found if one is not None and math.isfinite(one)]
    return round(statistics.median(seconds), 6) if seconds else None


def _check_rates(run: RunFolder, plan: Plan) -> None:
    """Raise WrongInput where an earlier state's own clock has another rate than the spike's."""
    rates = {
        step: logbook.number(record["computed"].get("rate"))
        for step, record in logbook.last_attempts(run.path, plan.segment).items()
    }
    here = rates.get(plan.fork)
    for step in {arm.state_step for arm in plan.arms if arm.kind == "B"}:
        there = rates.get(step)
        if here and there is not None and abs(there / here - 1) > SAME_RATE:
            raise WrongInput(
                f"at step {step} the rate was {there:.4g}, at the fork {here:.4g}: with the "
                "clocks of that state an arm would differ by its rate, too. Leave the clocks "
                "pinned, or say --other-rate"
            )


def shared_memory(settings: config.Config, fork_count: int, distance: int) -> float:
    """The share of the second moments at the fork that an earlier state has, too.

    The product of beta2 over the updates between them: late in PaLM's schedule beta2 remembers
    k^0.8 updates. Of rules that have no second moments of most parameters, their momentum's share.
    """
    match settings.optimizer:
        case config.AdamW() | config.Lion() | config.SOAP():
            return settings.optimizer.beta2**distance
        case config.Muon() | config.SGD():
            return settings.optimizer.momentum**distance
        case config.Sophia(beta2=beta2, refresh_every=k):
            # Those updates average before which a multiple of k others were made.
            first = max(0, fork_count - distance)
            return beta2 ** len(range(-(-first // k) * k, fork_count, k))
    exponent = settings.optimizer.beta2_exponent
    first = max(1, fork_count - distance)
    return math.exp(
        math.fsum(
            math.log(1 - k**-exponent) if k > 1 else -math.inf
            for k in range(first + 1, fork_count + 1)
        )
    )


class Diagnosis:
    """One spike of a run under diagnosis; the run itself is only read."""

    def __init__(
        self,
        run: RunFolder,
        settings: config.Config,
        corpus: data.Rows,
        located: Located,
        plan: Plan,
        allow_environment: bool = False,
    ) -> None:
        """
        Args:
          settings: the run's, perhaps on another mesh.
        Raises:
          WrongInput: the corpus is another one, or holds nothing out.
          CannotDo: the environment may give other bits, and that is not allowed.
        """
        if run.manifest().digest != corpus.manifest.digest:
            raise WrongInput(
                f"{run.path} was trained on the corpus {run.manifest().digest[:16]}, but "
                f"{corpus.folder} is {corpus.manifest.digest[:16]}; name the run's own with "
                f"{' or '.join(config.PLACES_OF_DATA)}"
            )
        self.run, self.located, self.settings = run, located, settings
        self.case = CaseFile.of(run, plan.segment, plan.onset)
        mesh = sharding.make_mesh(settings.mesh)
        self.plan = plan = self.case.planned_before(plan)
        before = min(arm.first for arm in plan.arms if arm.kind == "H")
        self.recorded = replay.recorded(run, plan.segment, before, plan.stop, None)
        here = environment.capture(numerics=settings.numerics, mesh_shape=dict(mesh.shape))
        self.changed: dict[str, tuple[Any, Any]] = {}
        for there in self.recorded.environments:
            self.changed |= environment.differences(there, here)
        if self.changed and not allow_environment:
            rows = "; ".join(f"{k} was {o!r}, is {n!r}" for k, (o, n) in self.changed.items())
            raise CannotDo(
                f"the environment of {run.path} was another one: {rows}. Diagnose where it is the "
                "same, or anyway with --allow-environment; replays are then compared with each "
                "other, not with the record"
            )
        if processes.is_first():
            self.case.begin(plan)
        processes.wait_for_all("the diagnosis's plan is there")
        course = Course(
            settings,
            segments.read(run.segment(plan.segment)),
            corpus,
            mesh,
            skip_above=logbook.skip_limits(run.path, plan.segment),
        )
        probe = Probe.read(corpus, settings)
        self.lab = Laboratory(run, course, self.plan, probe, self._fork_state)

    def _fork_state(self, shapes: Any) -> tuple[Any, tuple[str, ...]]:
        return self.case.fork(self.plan.fork, shapes), ()

    # --- arms ---

    def execute(
        self,
        arm: Arm,
        tell: Tell = lambda name, done, of: None,
        stop_requested: collections.abc.Callable[[], str | None] = lambda: None,
    ) -> bool:
        """Execute an arm and write what it gave; False if it was stopped before its end."""

        def ended(state: Any) -> None:
            if arm.kind == "H":
                self.case.save_fork(self.plan.fork, state)

        fields = execute(
            self.lab,
            arm,
            tell=tell,
            stop_requested=stop_requested,
            digests_at=frozenset(self.recorded.state_digests) if arm.kind in "HA" else frozenset(),
            ended=ended,
        )
        if fields is None:
            return False
        fields["environment_differences"] = {k: list(v) for k, v in self.changed.items()}
        if processes.is_first():
            self.case.add(arm, fields)
        processes.wait_for_all(f"arm {arm.name} is written")
        return True

    def findings(self) -> Findings:
        return procedure.found(self.plan, self.case.results(self.plan), self.record())

    def record(self) -> Record:
        return Record(self.recorded.bits, self.recorded.state_digests, not self.changed)

    def next_arm(self) -> Arm | None:
        return procedure.next_arm(self.plan, self.case.results(self.plan), self.findings())

    def conduct(
        self,
        tell: Tell = lambda name, done, of: None,
        stop_requested: collections.abc.Callable[[], str | None] = lambda: None,
        decided: collections.abc.Callable[[Arm, Findings], None] = lambda arm, findings: None,
    ) -> str | None:
        """Execute arms until the verdict is clear or the budget spent; a signal's name if one
        came."""
        while (arm := self.next_arm()) is not None:
            signal = processes.agreed(stop_requested())
            if signal is not None or not self.execute(arm, tell, stop_requested):
                return signal or stop_requested()
            decided(arm, self.findings())
        replays = self.findings().replays
        if replays is not None and replays.first_difference is None:
            self.examine_data()
        return None

    def examine_data(self) -> None:
        """Look at the suspect sequences, if that was not done yet."""
        if self.case.forensics() is None:
            found = dataclasses.asdict(forensics.examine(self.lab))
            if processes.is_first():
                self.case.write(FORENSICS, found)
            processes.wait_for_all("the forensics are written", seconds=3600)

    # --- the verdict ---

    def report(self, run_name: str) -> dict[str, Any]:
        """What was found, in numbers and words; written to the diagnosis's folder, too."""
        plan, findings, results = self.plan, self.findings(), self.case.results(self.plan)
        incident = self.located.incident
        recovered = incident is not None and incident.outcome == "recovered"
        steps = logbook.last_attempts(self.run.path, plan.segment)
        vitals = [(s, r["computed"]) for s, r in sorted(steps.items()) if s < plan.stop]
        first = leading.departures(vitals, plan.onset, plan.window_stop)
        in_force = self.lab.course.segment.settings_at(self.settings, plan.fork)
        at_fork = steps.get(plan.fork)
        counted = at_fork["computed"].get("schedule_step") if at_fork else None
        fork_count = counted if logbook.is_count(counted) else plan.fork
        fields = {
            "verdict": findings.verdict.cause,
            "because": findings.verdict.because,
            "next_arms": list(findings.verdict.next_arms),
            "segment": plan.segment,
            "onset": plan.onset,
            "fork": plan.fork,
            "window": [plan.fork, plan.window_stop],
            "stop": plan.stop,
            "noise": findings.noise,
            "threshold": findings.threshold,
            "votes": {
                kind: {"spiked": v.spiked, "of": v.of, "interval": list(v.interval())}
                for kind, v in findings.votes.items()
                if v.of
            },
            "arms": {
                name: {**score._asdict(), "seconds": results[name]["seconds"]}
                for name, score in findings.scores.items()
            },
            "steps_executed": findings.steps,
            "budget": plan.budget,
            "first_vitals": [d._asdict() for d in first[:5]],
            "shared_second_moments": {
                str(step): shared_memory(in_force, fork_count, plan.fork - step)
                for step in sorted({arm.state_step for arm in plan.arms} - {plan.fork})
            },
            "forensics": self.case.forensics(),
            "damaged_checkpoints": sorted({d for r in results.values() for d in r["damaged"]}),
            "environment_differences": {k: list(v) for k, v in self.changed.items()},
            "recommendation": treatments.recommended(
                run_name,
                plan,
                findings.verdict.cause,
                in_force,
                findings.scores,
                recovered,
                plan.segment == self.run.last_segment(),
            ),
        }
        if processes.is_first():
            self.case.write(VERDICT, fields)
        return fields
