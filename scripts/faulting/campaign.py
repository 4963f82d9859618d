"""scripts/faults: trials of one fault each, at random moments, and a table of what they cost."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from trial import SAVE_EVERY, STEPS, Hang, Member, Place, wait_for

from palm_jax.record import logbook

DAY = 86400.0
LITTLE = (2000, 8000)  # bytes: the logbook does not fit, or a checkpoint


@dataclasses.dataclass
class Outcome:
    fault: str
    processes: int
    moment: str
    codes: list[int] = dataclasses.field(default_factory=list)  # of the processes it happened to
    resumed_at: list[int] = dataclasses.field(default_factory=list)
    steps_redone: int = 0
    seconds: float = 0.0
    seconds_lost: float = 0.0
    survived: bool = False
    problem: str = ""


class Trial:
    """One run, one fault."""

    def __init__(self, place: Place, run: str, chance: random.Random, outcome: Outcome) -> None:
        self.place, self.run, self.chance, self.outcome = place, run, chance, outcome
        self.folder = place.folder / run
        self.allowed: set[int] = set()  # exit codes that the fault may end in

    def moment(self, member: Member) -> None:
        """Wait for a random moment: while it starts, at a step, or inside a save."""
        kind = self.chance.choice(["start", "step", "step", "save", "save"])
        step = self.chance.randrange(1, STEPS)
        if kind == "start":
            seconds = self.chance.uniform(0, 8)
            self.outcome.moment = f"after {seconds:.1f} s"
            until = time.monotonic() + seconds
            wait_for(lambda: time.monotonic() > until, member)
        elif kind == "step":
            self.outcome.moment = f"step {step}"
            wait_for(lambda: member.step >= step, member)
            time.sleep(self.chance.uniform(0, 0.05))
        else:
            save = 1 + step // SAVE_EVERY
            self.outcome.moment = f"inside save {save}"
            seen: set[str] = set()

            def saving() -> bool:
                seen.update(
                    p.name.partition(".")[0]
                    for p in self.folder.glob("segments/*/checkpoints/*.orbax-checkpoint-tmp*")
                )
                return len(seen) >= save

            wait_for(saving, member)
            time.sleep(self.chance.uniform(0, 0.02))

    # --- faults: each starts the run, lets something happen, and returns its processes ---

    def killed(self) -> list[Member]:
        members = self.place.start(self.run, self.outcome.processes)
        victim = self.chance.choice(members)
        self.moment(members[0])
        victim.send(signal.SIGKILL)
        self.allowed = {-9, 137, 6, 0}
        return members

    def terminated(self) -> list[Member]:
        members = self.place.start(self.run, self.outcome.processes)
        self.moment(members[0])
        self.chance.choice(members).send(signal.SIGTERM)
        # Before Python has its handlers, a signal ends it as it ends any program.
        self.allowed = {4, 0, -15, 143, 6}
        return members

    def interrupted_twice(self) -> list[Member]:
        members = self.place.start(self.run, self.outcome.processes)
        victim = self.chance.choice(members)
        self.moment(members[0])
        for _ in range(2):
            victim.send(signal.SIGINT)
            time.sleep(1.2 if self.outcome.processes > 1 else 0.05)
        self.allowed = {130, 4, 0, -2, 6}
        return members

    def paused(self) -> list[Member]:
        members = self.place.start(self.run, self.outcome.processes)
        victim = self.chance.choice(members)
        self.moment(members[0])
        # With two processes, at times for longer than the other waits.
        seconds = self.chance.choice([1, 3, 45] if self.outcome.processes > 1 else [1, 3])
        self.outcome.moment += f", for {seconds} s"
        victim.send(signal.SIGSTOP)
        time.sleep(seconds)
        victim.send(signal.SIGCONT)
        self.allowed = {0, 6}
        return members

    def without_disk(self) -> list[Member]:
        little = self.chance.choice(LITTLE)
        members = self.place.start(self.run, self.outcome.processes, largest_file=little)
        self.outcome.moment = f"no file above {little} bytes"
        self.allowed = {3, 6}
        return members

    def damaged(self) -> list[Member]:
        members = self.killed()
        for member in members:
            member.end()
        newest = max(
            (p for p in self.folder.glob("segments/*/checkpoints/*") if p.name.isdigit()),
            key=lambda p: int(p.name),
            default=None,
        )
        files = [] if newest is None else [p for p in newest.rglob("*") if p.is_file()]
        files = [p for p in files if p.stat().st_size]
        if files:
            path = self.chance.choice(sorted(files))
            content = bytearray(path.read_bytes())
            at = self.chance.randrange(len(content))
            content[at] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
            self.outcome.moment += f"; then a bit of {path.relative_to(newest)} flipped"
        # What is damaged is refused, or does not matter; what is refused is removed.
        again = self.place.start(self.run, self.outcome.processes)
        codes = [member.end()[0] for member in again]
        self.outcome.moment += f"; then exit {codes}"
        if 3 in codes:
            prune = ["checkpoints", "prune", self.run, "--damaged"]
            (pruning,) = self.place.start(self.run, command=prune)
            code, said = pruning.end()
            assert code == 0, pruning.text()
            assert said is not None
            assert said["freed_bytes"] > 0
        return []

    def torn(self) -> list[Member]:
        members = self.killed()
        for member in members:
            member.end()
        parts = sorted(self.folder.glob("logbook/*.jsonl"))
        if parts and (size := parts[-1].stat().st_size):
            cut = self.chance.randrange(1, min(size, 200) + 1)
            with parts[-1].open("r+b") as file:
                file.truncate(size - cut)
            self.outcome.moment += f"; then {cut} bytes of the logbook lost"
        return []

    def clock(self) -> list[Member]:
        jump = self.chance.choice([-DAY, DAY, -30 * DAY])
        members = self.place.start(self.run, self.outcome.processes, clock_jumps_by=jump)
        self.moment(members[0])
        self.outcome.moment += f", the clock off by {jump / DAY:+.0f} days"
        self.chance.choice(members).send(signal.SIGKILL)
        self.allowed = {-9, 137, 6, 0}
        return members

    def supervised(self) -> list[Member]:
        members = self.place.start(self.run, self.outcome.processes, supervised=True)
        for _ in range(2):
            self.moment(members[0])
            self.chance.choice(members).send(signal.SIGKILL)
        # A kill while Python starts may hit the keeper, which has started nothing yet.
        self.allowed = {0, -9}
        return members


FAULTS = {
    "kill -9": Trial.killed,
    "SIGTERM": Trial.terminated,
    "SIGINT twice": Trial.interrupted_twice,
    "pause": Trial.paused,
    "full disk": Trial.without_disk,
    "flipped bit": Trial.damaged,
    "torn logbook": Trial.torn,
    "clock jump": Trial.clock,
    "supervised kill -9": Trial.supervised,
}


def attempt(place: Place, number: int, seed: int, only: list[str], straight: str) -> Outcome:
    """One trial: the fault, then the run to its end."""
    chance = random.Random(f"{seed} {number}")
    fault = only[number % len(only)]
    outcome = Outcome(fault, processes=chance.choice([1, 1, 2]), moment="")
    run = f"run-{number:04d}"
    trial = Trial(place, run, chance, outcome)
    began = time.monotonic()
    members: list[Member] = []
    try:
        members = FAULTS[fault](trial)
        outcome.codes = [member.end()[0] for member in members]
        if wrong := [code for code in outcome.codes if code not in trial.allowed]:
            outcome.problem = f"exit code {wrong[0]}:\n" + "\n".join(m.text() for m in members)
            return outcome
        members = place.start(run, outcome.processes)
        ends = [member.end() for member in members]
        outcome.seconds = time.monotonic() - began
        found = {said["state_digest"] if said else None for _, said in ends}
        if [code for code, _ in ends if code] or found != {straight}:
            outcome.problem = f"{ends}\n" + "\n".join(member.text() for member in members)
            return outcome
        records = logbook.read(trial.folder).records
        outcome.resumed_at = [r["step"] for r in records if r["event"] == "start"][1:]
        outcome.steps_redone = sum(r["event"] == "step" and r["attempt"] > 1 for r in records)
        if [r for r in records if r["event"] == "difference"]:
            outcome.problem = "a step that was made again gave other bits"
            return outcome
        outcome.survived = True
    except Hang as error:
        outcome.problem = str(error)
    finally:
        for member in members:
            if member.is_running():
                member.kill()
    return outcome


def report(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "| fault | processes | trials | the undisturbed digest | steps redone, mean | "
        "seconds lost, mean |",
        "|" + "--|" * 6,
    ]
    groups: dict[tuple[str, int], list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        groups[outcome.fault, outcome.processes].append(outcome)
    for (fault, processes), rows in sorted(groups.items()):
        survived = sum(row.survived for row in rows)
        redone = sum(row.steps_redone for row in rows) / len(rows)
        lost = sum(row.seconds_lost for row in rows) / len(rows)
        lines.append(
            f"| {fault} | {processes} | {len(rows)} | {survived} | {redone:.1f} | {lost:.0f} |"
        )
    survived = sum(outcome.survived for outcome in outcomes)
    lines.append(f"| all | | {len(outcomes)} | {survived} | | |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="the number of the first trial")
    parser.add_argument("--minutes", type=float, help="stop after the trial of this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, separated by commas")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/faults"))
    parser.add_argument("--json", type=pathlib.Path, help="a file for all outcomes")
    given = parser.parse_args()
    only = given.only.split(",")
    if unknown := [fault for fault in only if fault not in FAULTS]:
        parser.error(f"no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}")
    shutil.rmtree(given.folder, ignore_errors=True)
    place = Place(given.folder.absolute())
    place.prepare()

    straight: dict[int, tuple[str, float]] = {}
    for processes in (1, 2):
        for _ in range(2):  # the second finds what the first has compiled
            shutil.rmtree(place.folder / f"straight-{processes}", ignore_errors=True)
            began = time.monotonic()
            ends = [m.end() for m in place.start(f"straight-{processes}", processes)]
            assert all(code == 0 and said for code, said in ends), ends
            straight[processes] = ends[0][1]["state_digest"], time.monotonic() - began
    assert straight[1][0] == straight[2][0], "two processes end in other bits than one"

    outcomes: list[Outcome] = []
    began = time.monotonic()
    for number in range(given.first - 1, given.first - 1 + given.trials):
        outcome = attempt(place, number, given.seed, only, straight[1][0])
        outcome.seconds_lost = max(0.0, outcome.seconds - straight[outcome.processes][1])
        outcomes.append(outcome)
        print(
            f"{number + 1} of {given.first - 1 + given.trials}: {outcome.fault}, "
            f"{outcome.processes} process{'es' * (outcome.processes > 1)}, {outcome.moment}: "
            + (
                f"exit {outcome.codes}, resumed at {outcome.resumed_at}, {outcome.steps_redone} "
                f"steps redone, {outcome.seconds_lost:.0f} s lost"
                if outcome.survived
                else f"NOT SURVIVED: {outcome.problem}"
            ),
            file=sys.stderr,
            flush=True,
        )
        if outcome.survived:
            shutil.rmtree(place.folder / f"run-{number:04d}")
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            break
    print("\n".join(report(outcomes)))
    if given.json is not None:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(outcome.survived for outcome in outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(f"error: {error}")
