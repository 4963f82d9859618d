"""A run that watches itself: what detection finds goes into the logbook, and policy is obeyed.

What is found and what is decided are pure functions of recorded numbers (`spikes/`); here they
meet the run's folder. Every process sees the same numbers and finds the same; the first one
decides, records, and opens the segment that a rollback begins.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import subprocess
from typing import Any, Literal

from palm_jax import config, processes
from palm_jax.precision import loss_scale
from palm_jax.record import folder, logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.record.logbook import Logbook
from palm_jax.record.segments import Segment
from palm_jax.record.steps import Flushed, Tell
from palm_jax.replay import branches
from palm_jax.spikes import history, policy
from palm_jax.spikes.incidents import NEWEST_PINNED, Alarm, Incident, pinned
from palm_jax.step import Controls, controls


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why the loop must not go on as it does."""

    action: Literal["rollback", "stop"]
    reason: str


class Watch:
    """Watches one segment from step `start` on."""

    def __init__(
        self,
        settings: config.Config,
        run: RunFolder,
        segment: Segment,
        start: int,
        book: Logbook,
        saved: Checkpoints,
        tell: Tell,
        keep: bool,
    ) -> None:
        self._settings, self._run, self._segment = settings, run, segment
        self._book, self._saved, self._tell = book, saved, tell
        in_a_branch = segment.parent is not None and segment.parent.run is not None
        # An experiment is to show what happens, not to be saved from it.
        self._may_act = keep and not in_a_branch
        self._detector, _ = history.detector(run, settings.spikes, before=start)
        self._told = history.told(run)
        # A step that is executed again has the limit that it had.
        self._recorded = logbook.skip_limits(run.path, segment.segment)
        self._onsets = history.onsets(run).get(segment.segment, [])
        self._alerts: list[subprocess.Popen[str]] = []
        self._pin()

    def controls(self, step: int) -> Controls:
        """Those of the next step: what it had before, or what the policy makes of the past."""
        limit = self._recorded.get(step)
        return controls(skip_above=self._detector.skip_above(step) if limit is None else limit)

    def after(
        self, flushed: collections.abc.Sequence[Flushed], slow: Alarm | None = None
    ) -> Verdict | None:
        """Take in steps whose records are on the disk, and whether they took long.

        Raises:
          CannotDo: a segment cannot be opened.
        """
        verdict = None
        for step, computed in flushed:
            for found in self._detector.feed(step, computed):
                self._record(found)
                if verdict is None and isinstance(found, Incident) and found.outcome is not None:
                    verdict = self._judge(found)
            verdict = verdict or self._loss_scale(computed)
        if slow is not None:
            self._record(slow)
        self._pin()  # a checkpoint may have been on its way to the disk
        self._reap()
        self._book.flush()
        return verdict

    def close(self) -> None:
        """Wait for alert commands that still run; a minute at most."""
        for alert in self._alerts:
            try:
                alert.wait(timeout=60)
            except subprocess.TimeoutExpired:
                alert.kill()
        self._reap()
        self._book.flush()

    def _record(self, found: Any) -> None:
        name, fields = history.event(found, self._segment.segment)
        if history.key(name, fields) in self._told:
            return
        self._told.add(history.key(name, fields))
        self._say(name, fields)
        if name == "incident":
            self._onsets.append(found.onset)
            self._pin()
        if name != "incident_closed":
            self._alert(name, fields)

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        self._book.append(event, **fields)
        self._tell(event, logbook.plain(fields))

    def _pin(self) -> None:
        if not self._onsets:
            return
        steps, onsets = self._saved.steps(), self._onsets[-NEWEST_PINNED:]
        wanted = {s for onset in onsets for s in pinned(onset, steps, self._settings.spikes)}
        # Never without one that is wanted: Orbax may look at any time.
        self._saved.pinned.update(wanted)
        self._saved.pinned.intersection_update(wanted)

    # --- what is done ---

    def _judge(self, incident: Incident) -> Verdict | None:
        self._saved.wait()  # a checkpoint that is being written is one to go back to
        segment, spikes = self._segment, self._settings.spikes
        if not self._may_act:
            spikes = spikes.model_copy(update={"policy": "observe"})
        action = None
        if processes.is_first():
            self._book.flush()
            decision = policy.decide(
                incident,
                spikes,
                history.candidates(self._run, spikes, self._saved.steps(), segment.segment),
                history.rollbacks(self._run, segment.segment),
                start_step=segment.start_step,
            )
            opens = segment.segment + 1 if decision.action == "rollback" else None
            fields = history.decision_fields(decision, incident, segment.segment, opens)
            self._say("decision", fields)
            self._book.flush()
            if decision.action == "rollback":
                folder.open_segment(self._run, self._departed(decision))
            action = None if decision.action == "none" else f"{decision.action}: {decision.reason}"
        action = processes.agreed(action)
        processes.wait_for_all("decided about an incident")
        if action is None:
            return None
        if self._run.last_segment() > segment.segment:
            opened = segments.read(self._run.segment(segment.segment + 1))
            return Verdict("rollback", opened.reason)
        return Verdict("stop", action.removeprefix("stop: "))

    def _departed(self, decision: policy.Decision) -> Segment:
        assert decision.checkpoint is not None
        assert decision.at is not None
        changes = branches.Changes(
            overrides=policy.rate_overrides(
                self._segment.settings_at(self._run.config(), decision.at).schedule,
                decision.rate_scale,
            ),
            exclude=() if decision.exclude is None else (decision.exclude,),
        )
        made, _ = branches.departed(
            self._run.config(),
            self._segment,
            decision.checkpoint,
            decision.at,
            changes,
            segments.IN_MID_RUN,
            decision.reason,
        )
        return made.model_copy(update={"segment": self._segment.segment + 1})

    def _loss_scale(self, computed: dict[str, Any]) -> Verdict | None:
        reason = loss_scale.gave_up(
            int(computed.get("skips_at_floor", 0)), self._settings.precision
        )
        return None if reason is None else Verdict("stop", reason)

    # --- log.alert_command ---

    def _alert(self, name: str, fields: dict[str, Any]) -> None:
        command = self._settings.log.alert_command
        if command is None or not processes.is_first():
            return
        # Of the user's own config, to be run as they would type it.
        alert = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._alerts.append(alert)
        assert alert.stdin is not None
        try:
            alert.stdin.write(json.dumps({"event": name, **logbook.plain(fields)}) + "\n")
            alert.stdin.close()
        except BrokenPipeError:
            pass  # it does not read; its exit code is looked at in `_reap`

    def _reap(self) -> None:
        running = []
        for alert in self._alerts:
            if (code := alert.poll()) is None:
                running.append(alert)
            elif code:
                fields = {"command": self._settings.log.alert_command, "exit_code": code}
                self._say("alert_failed", fields)
        self._alerts = running
