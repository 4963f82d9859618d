"""Why a training process ended, and whether it is worth starting again."""

from __future__ import annotations

import dataclasses
import re
import signal

DONE, NO, WRONG_INPUT, CANNOT_DO, STOPPED, DEFECT, LOST_PEER = range(7)

# XLA's, in what it writes before it aborts the process.
_MISSING = re.compile(r"timed out task names:\s*((?:\d+\s+)+)")
_UNHEALTHY = re.compile(r"tasks are unhealthy[^\n]*:\s*((?:\d+\s+)+)")
_DUPLICATE = ("ALREADY_EXISTS", "newer incarnation")
_SERVICE_GONE = ("coordination service", "CoordinationService")


@dataclasses.dataclass(frozen=True)
class Ending:
    cause: str  # a sentence's part: "it was killed by SIGKILL"
    exit_code: int
    again: bool  # whether a supervisor starts it again
    remedy: str = ""
    is_said: bool = False  # the process has said so itself


@dataclasses.dataclass(frozen=True)
class Life:
    """What a keeper knows of a training process that has ended."""

    returncode: int  # as subprocess has it: -9 for SIGKILL
    native: str = ""  # what was written to its stderr by code other than Python's
    silent_s: float | None = None  # killed by the keeper after so long without news
    out_of_memory: bool = False  # the system has killed something of this group for memory
    told_to_stop: bool = False  # a signal was passed on
    waits: str = ""  # how long processes wait for each other, for a message


def ending(life: Life) -> Ending:
    code = life.returncode
    if life.silent_s is not None:
        return Ending(f"it hung: no news for {life.silent_s:.0f} s", DEFECT, again=True)
    if code >= 0:
        return _exited(code, life)
    if code == -signal.SIGABRT and (lost := _lost(life)) is not None:
        return lost
    if code == -signal.SIGKILL and life.out_of_memory:
        return Ending("the system killed it for want of memory", 128 + 9, again=True)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Ending(f"it was killed by {name}", 128 - code, again=True)


def _exited(code: int, life: Life) -> Ending:
    if code == STOPPED and not life.told_to_stop:
        return Ending(
            "it was told to stop, as before a preemption", STOPPED, again=True, is_said=True
        )
    causes = {
        DONE: "it is done",
        NO: "the run gave up",
        WRONG_INPUT: "its input was wrong",
        CANNOT_DO: "it could not go on; its message is above",
        STOPPED: "it was stopped by a signal",
        DEFECT: "it failed by a defect; its message is above",
        LOST_PEER: "another process of the run was lost",
    }
    cause = causes.get(code, f"it ended with exit code {code}")
    again = code not in (DONE, NO, WRONG_INPUT, STOPPED)
    return Ending(cause, code, again, is_said=code in causes)


def _lost(life: Life) -> Ending | None:
    """What XLA aborted the process for, where it was another process."""
    text = life.native
    if all(words in text for words in _DUPLICATE):
        return Ending(
            "another process has the same number, or a new one has come in place of this",
            LOST_PEER,
            again=True,
            remedy="give each process its own PALM_JAX_PROCESS_ID",
        )
    if found := _MISSING.search(text + "\n"):
        return Ending(
            f"{_named(found[1])} did not start{life.waits}",
            LOST_PEER,
            again=True,
            remedy="start all processes of the run, with the same coordinator",
        )
    if found := _UNHEALTHY.search(text + "\n"):
        return Ending(f"no sign of life from {_named(found[1])}", LOST_PEER, again=True)
    if "RegisterTask" in text:
        return Ending(
            f"process 0 was not found{life.waits}",
            LOST_PEER,
            again=True,
            remedy="start all processes of the run, with the same coordinator",
        )
    if any(words in text for words in _SERVICE_GONE):
        return Ending("no sign of life from process 0", LOST_PEER, again=True)
    return None


def _named(indices: str) -> str:
    numbers = sorted(map(int, indices.split()))
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
