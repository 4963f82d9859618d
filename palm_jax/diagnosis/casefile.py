"""The folder of a diagnosis, RUN/diagnoses/SEGMENT-ONSET.

  plan.json          all arms that may be executed
  fork/STEP          the state before the fork, as a checkpoint; H, the first arm, writes it
  arms/NAME.json     what an arm gave
  forensics.json     the suspect sequences beside others
  verdict.json       as last collected

Nothing else of the run is written to. A file is whole or not there, so that a diagnosis that was
interrupted goes on, and arms executed elsewhere are brought here by copying their files.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

from palm_jax import config, files
from palm_jax.diagnosis.arms import Arm, Plan
from palm_jax.diagnosis.written import Forensics, Result
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder, check_own, write_whole

if TYPE_CHECKING:
    from palm_jax.record.checkpoints import Checkpoints
    from palm_jax.step import TrainState

FOLDER, VERDICT, FORENSICS = "diagnoses", "verdict.json", "forensics.json"


@dataclasses.dataclass(frozen=True)
class CaseFile:
    path: pathlib.Path

    @classmethod
    def of(cls, run: RunFolder, segment: int, onset: int) -> CaseFile:
        return cls(run.path / FOLDER / f"{segment:03d}-{onset:06d}")

    # --- the plan ---

    def plan(self) -> Plan | None:
        """None if there is none yet. Raises CannotDo if it is damaged."""
        path = self.path / "plan.json"
        if not path.is_file():
            return None
        try:
            return files.described(path, Plan)
        except (OSError, ValueError) as error:
            raise CannotDo(
                f"{path} is damaged: {error}; remove {self.path} to begin anew"
            ) from None

    def planned_before(self, plan: Plan) -> Plan:
        """The plan that is there, if it was made for the same question; else `plan`.

        What was planned is kept, whatever has become of the run since; more may be spent on it.

        Raises:
          WrongInput: the folder has another plan.
        """
        there = self.plan()
        if there is None:
            return plan
        if there.asked != plan.asked:
            raise WrongInput(
                f"{self.path} has a diagnosis with other arms (steps {there.fork} to "
                f"{there.stop}); give the options that it was planned with, or remove the folder"
            )
        return there.model_copy(update={"budget": plan.budget})

    def begin(self, plan: Plan) -> None:
        """Write the plan, where there is none. Raises CannotDo if it cannot be written."""
        check_own(self.path.parent.parent)
        if self.plan() is not None:
            return
        try:
            (self.path / "arms").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotDo(f"cannot write {self.path}: {error}") from error
        write_whole(self.path / "plan.json", plan.model_dump_json(indent=1) + "\n")

    # --- the fork ---

    def has_fork(self, step: int) -> bool:
        with self._forks() as saved:
            return step in saved.steps()

    def save_fork(self, step: int, state: TrainState) -> None:
        with self._forks() as saved:
            if step not in saved.steps():
                saved.save(step, state, {}, None)
                saved.wait()

    def fork(self, step: int, shapes: Any) -> TrainState:
        """Raises WrongInput if arm H did not write it."""
        with self._forks() as saved:
            if step not in saved.steps():
                raise WrongInput(
                    f"{self.path} has no state to fork from yet: execute --arm H first"
                )
            state, _ = saved.restore(step, shapes)
        return state

    def _forks(self) -> Checkpoints:
        # Imports JAX's devices, which who only reads results may do without.
        from palm_jax.record.checkpoints import Checkpoints

        return Checkpoints(self.path / "fork", config.Checkpoint())

    # --- results ---

    def result(self, arm: Arm) -> dict[str, Any] | None:
        """Raises CannotDo if it is damaged or that of another arm."""
        path = self._result(arm)
        if not path.is_file():
            return None
        try:
            found = files.described(path, Result)
        except (OSError, ValueError) as error:
            raise CannotDo(f"{path} is damaged: {error}; remove it") from None
        if found.arm != arm:
            raise CannotDo(f"{path} is of an arm that differs from the plan's; remove it")
        return found.model_dump()

    def results(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """By arm."""
        found = {arm.name: self.result(arm) for arm in plan.arms}
        return {name: fields for name, fields in found.items() if fields is not None}

    def add(self, arm: Arm, fields: dict[str, Any]) -> None:
        text = json.dumps(logbook.plain(fields), allow_nan=False)
        write_whole(self._result(arm), text + "\n")

    def write(self, name: str, fields: dict[str, Any]) -> None:
        write_whole(
            self.path / name, json.dumps(logbook.plain(fields), allow_nan=False, indent=1) + "\n"
        )

    def forensics(self) -> dict[str, Any] | None:
        """None if there are none. Raises CannotDo if they are damaged."""
        path = self.path / FORENSICS
        if not path.is_file():
            return None
        try:
            return files.described(path, Forensics).model_dump()
        except (OSError, ValueError) as error:
            raise CannotDo(f"{path} is damaged: {error}; remove it") from None

    def _result(self, arm: Arm) -> pathlib.Path:
        return self.path / "arms" / f"{arm.name.replace(' ', '_')}.json"
