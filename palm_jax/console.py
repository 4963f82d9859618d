"""What a person sees while a command runs, on stderr: a live line, or plain lines in a log."""

from __future__ import annotations

import collections.abc
import time
import types
from typing import Any, Self

import rich.console
import rich.progress
import rich.table

from palm_jax.errors import CannotDo

# Of a step's time; below it, waiting for batches is not worth a word.
MUCH_WAITING = 0.1


class _Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process with 1, which says something else.
        raise CannotDo(
            "nobody reads this program's messages any more (stderr is a closed pipe). Send them "
            "to a file; the same command continues a run from its last checkpoint"
        )


class TrainingProgress:
    """Shows the events that `train` tells of."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.console = _Console(stderr=True, highlight=False)
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._signals = 0
        self._began_at = 0  # step of the last start

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        show: dict[str, collections.abc.Callable[[dict[str, Any]], None]] = {
            "start": self._start,
            "parity": self._parity,
            "step": self._step,
            "evaluation": self._evaluation,
            "checkpoint": self._checkpoint,
            "profile": self._profile,
            "alarm": self._alarm,
            "incident": self._incident,
            "incident_closed": self._incident_closed,
            "decision": self._decision,
            "alert_failed": self._alert_failed,
            "verification": self._verification,
            "phase": self._phase,
            "stop": self._stop,
        }
        show[event](fields)

    def signal(self, name: str) -> None:
        """Say what a signal does: the first stops the run, the second ends the process."""
        self._signals += 1
        if self._signals == 1:
            self._print(f"{name}: saves and stops after this step; once more ends it at once")
        elif self._bar is not None:
            self.console.show_cursor()

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _start(self, fields: dict[str, Any]) -> None:
        self._began_at = fields["step"]
        verb = f"continues at step {fields['step']}" if fields["step"] else "starts"
        environment = fields["environment"]
        self._print(
            f"{fields['parameters']:,} parameters on {environment['device_kind']}; the run {verb} "
            f"of {self.steps}"
        )
        if (recorded := fields["recorded_steps"]) > fields["step"]:
            self._print(
                f"  steps {fields['step']} to {recorded - 1} are in the logbook but not in a "
                "checkpoint: they are executed again, and compared"
            )
        for key, (old, new) in fields["settings_changed"].items():
            self._print(f"  {key} was {old}, is {new}")
        for key, (old, new) in fields["environment_changed"].items():
            self._print(f"  environment: {key} was {old}, is {new}; bits may differ")
        if fields["emulated"] is not None:
            self._print(f"  {fields['emulated']}")
        for line in fields["torn_lines"]:
            self._print(f"  logbook/{line} was torn when a process died; it was left out")
        for name in fields["leftovers"]:
            self._print(f"  checkpoints/{name} was never finished; the next save removes it")
        if fields["step"] < self.steps:
            self._print("  compiling; the first step takes longest")
        if self._bar is not None:  # a rollback goes on in a segment of its own
            self._bar.update(self._task, completed=fields["step"])
        elif self.console.is_terminal and not self.console.is_dumb_terminal:
            # Where the terminal is narrow, all but the step may shrink.
            width = len(f"step {self.steps}/{self.steps}")
            step = rich.table.Column(no_wrap=True, min_width=width)
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn(
                    "step {task.completed:.0f}/{task.total:.0f}", table_column=step
                ),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.fields[news]}"),
                rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
            )
            self._task = self._bar.add_task(
                "train", total=self.steps, completed=fields["step"], news=""
            )
            self._bar.start()

    def _parity(self, fields: dict[str, Any]) -> None:
        if "left_out" in fields:
            self._print(f"the first losses were not compared with a CPU's: {fields['left_out']}")
        else:
            self._print(
                f"the first losses are a CPU's within {fields['difference']:.1e} "
                f"({fields['tolerance']:.0e} is allowed)"
            )

    def _phase(self, fields: dict[str, Any]) -> None:
        # The first compilation was announced with the start; the rest is seldom worth a line.
        if fields["phase"] == "compiles" and fields["step"] > self._began_at:
            self._print(f"compiles for the batch size from step {fields['step']} on")

    def _verification(self, fields: dict[str, Any]) -> None:
        if fields["differing"]:
            self._print(f"verification before step {fields['step']}: gradients differ")

    def _step(self, fields: dict[str, Any]) -> None:
        done, news = fields["step"] + 1, self._news(fields)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, news=news)
        else:
            left = (self.steps - done) * fields["step_seconds"]
            self._print(f"step {done}/{self.steps}  {news}  {_duration(left)} left")

    @staticmethod
    def _news(fields: dict[str, Any]) -> str:
        parts = [
            f"loss {fields['loss']:.4f}",
            f"gradient norm {fields['gradient_norm']:.3g}",
            f"{fields['tokens_per_second']:,.0f} tokens/s",
        ]
        if "model_flops_utilisation" in fields:
            parts.append(f"MFU {fields['model_flops_utilisation']:.1%}")
        else:
            parts.append(f"{fields['model_flops_per_second'] / 1e9:,.1f} model GFLOP/s")
        if "device_bytes_peak" in fields:
            parts.append(_memory(fields["device_bytes_peak"], fields.get("device_bytes_limit")))
        if fields["input_wait_seconds"] > MUCH_WAITING * fields["step_seconds"]:
            share = fields["input_wait_seconds"] / fields["step_seconds"]
            parts.append(f"waits for input {share:.0%}")
            if "input_wait_process" in fields:
                parts[-1] += f" in process {fields['input_wait_process']}"
        if not fields["applied"]:
            parts.append("update SKIPPED")
        return "  ".join(parts)

    def _evaluation(self, fields: dict[str, Any]) -> None:
        self._print(
            f"held out after step {fields['step']}: loss {fields['loss']:.4f}, perplexity "
            f"{fields['perplexity']:.3f}, {fields['bits_per_byte']:.4f} bits per byte "
            f"({fields['sequences']} sequences)"
            + "".join(f", {of} {bits:.4f}" for of, bits in fields.get("corpora", {}).items())
        )

    def _checkpoint(self, fields: dict[str, Any]) -> None:
        self._print(f"checkpoint {fields['step']}, state digest {fields['state_digest']}")

    def _profile(self, fields: dict[str, Any]) -> None:
        first, stop, asked = fields["step"], fields["stop_step"], fields["asked"]
        part = "" if asked == f"{first}:{stop}" else f", which is what this start made of {asked}"
        self._print(f"profile of steps {first}:{stop}{part} in {fields['folder']}")

    def _alarm(self, fields: dict[str, Any]) -> None:
        value = fields["value"]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        self._print(f"ALARM at step {fields['step']}: {fields['vital']} {shown}, {fields['why']}")

    def _incident(self, fields: dict[str, Any]) -> None:
        value, limit = fields["value"], fields["limit"]
        shown = f"{value:.4f}" if isinstance(value, float) else value
        above = f" above {limit:.4f}" if isinstance(limit, float) else ""
        self._print(
            f"INCIDENT, {fields['kind']}, from step {fields['onset']} on, seen at step "
            f"{fields['detected']}: {fields['vital']} {shown}{above}"
        )

    def _incident_closed(self, fields: dict[str, Any]) -> None:
        self._print(
            f"the {fields['kind']} incident of step {fields['onset']} after step "
            f"{fields['closed']}: {fields['outcome']}"
        )

    def _decision(self, fields: dict[str, Any]) -> None:
        if fields["action"] != "none":
            self._print(f"{fields['action'].upper()}: {fields['reason']}")

    def _alert_failed(self, fields: dict[str, Any]) -> None:
        self._print(
            f"log.alert_command={fields['command']} failed with exit code {fields['exit_code']}"
        )

    def _stop(self, fields: dict[str, Any]) -> None:
        if fields["signal"] in ("rollback", "stop"):
            return  # the decision has said why
        if fields["signal"] is not None and fields["step"] < self.steps:
            self._print(
                f"stopped by {fields['signal']} after step {fields['step']}, which is saved; "
                "the same command continues"
            )


def _memory(peak: int, limit: int | None) -> str:
    of = "" if limit is None else f" of {limit / 2**30:.1f}"
    return f"{peak / 2**30:.1f}{of} GiB at most on a device"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class _Bar:
    """One live line where there is a terminal; nothing else is printed by it."""

    def __init__(self, *columns: rich.progress.ProgressColumn) -> None:
        self._console = _Console(stderr=True, highlight=False)
        self._bar = rich.progress.Progress(
            *columns,
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._bar.stop()


class PreparationProgress(_Bar):
    """Shows `corpus.prepare`'s (stage, done, total)."""

    _IN_BYTES = ("choosing a sample", "reading")

    def __init__(self) -> None:
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[speed]}"),
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}  # when, and how much was done by then

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "room":
            self._console.print(
                f"on disk this takes about {done / 1e6:,.0f} MB; {total / 1e6:,.0f} MB are free",
                markup=False,
            )
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total, speed="")
            self._began[stage] = time.perf_counter(), done
            if self._bar.disable:
                self._console.print(f"{stage} ...", markup=False)
        began, before = self._began[stage]
        speed = ""
        if stage in self._IN_BYTES and (seconds := time.perf_counter() - began) > 0.1:
            speed = f"{(done - before) / seconds / 1e6:.1f} MB/s"
        self._bar.update(self._tasks[stage], completed=done, total=total, speed=speed)
        if self._bar.disable and speed and done == total:
            self._console.print(f"{stage}: {total / 1e6:,.1f} MB, {speed}", markup=False)


class ReplayProgress(_Bar):
    """Shows how far a replay has come."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(
            rich.progress.TextColumn("replaying step {task.completed:.0f}/{task.total:.0f}")
        )
        self._console.print(f"replaying steps {start}:{stop}; compiling first", markup=False)
        self._task = self._bar.add_task("replay", total=stop)

    def __call__(self, done: int, stop: int) -> None:
        self._bar.update(self._task, completed=done)


class VerificationProgress(_Bar):
    """Shows how much of each checkpoint was read: (which, bytes read, bytes in all)."""

    def __init__(self) -> None:
        super().__init__(
            rich.progress.TextColumn("{task.description}"), rich.progress.DownloadColumn()
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __call__(self, which: str, done: int, total: int) -> None:
        if which not in self._tasks:
            for finished in self._tasks.values():
                self._bar.update(finished, visible=False)
            self._tasks[which] = self._bar.add_task(f"reading {which}", total=total)
            if self._bar.disable:
                self._console.print(f"reading {which} ...", markup=False)
        self._bar.update(self._tasks[which], completed=done)


class DiagnosisProgress(_Bar):
    """Shows the arms of a diagnosis as they are executed, and what each one gave."""

    def __init__(self, seconds_per_step: float | None) -> None:
        super().__init__(rich.progress.TextColumn("{task.description}"))
        self._task = self._bar.add_task("compiling", total=None)
        self._arm = ""
        if seconds_per_step is not None:
            self._console.print(
                f"a step of the run took {seconds_per_step:.3g} s; compiling first", markup=False
            )

    def __call__(self, arm: str, done: int, of: int) -> None:
        if arm != self._arm:
            self._arm = arm
            self._bar.reset(self._task, total=of)
        self._bar.update(self._task, description=f"arm {arm}", completed=done)

    def signal(self, name: str) -> None:
        self._console.print(
            f"{name}: stops within a few steps, and goes on with this arm when called again; "
            "once more ends it at once",
            markup=False,
        )

    def decided(self, arm: Any, findings: Any) -> None:
        """After an arm: its own score, and how the votes stand."""
        score = findings.scores.get(arm.name)
        own = "done"
        if score is not None:
            own = f"{'spiked' if score.spiked else 'calm'}, rise {score.peak:.4f} nats"
        votes = ", ".join(f"{k} {v.spiked}/{v.of}" for k, v in findings.votes.items() if v.of)
        self._console.print(
            f"arm {arm.name}: {own}; {votes or 'no votes yet'}; {findings.steps} steps so far",
            markup=False,
            soft_wrap=True,
        )
