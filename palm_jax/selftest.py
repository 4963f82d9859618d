"""What a machine can be asked before a run: does it give equal bits, and the right losses?

`bits` makes a tiny run, and makes it again in ways that should not matter. Everything there is
done by the command line in processes of its own, as a person would. `parity` compares losses
with a CPU's.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Literal

import yaml

from palm_jax import config, doctor, probe
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook

if TYPE_CHECKING:
    from palm_jax.parity import Outcome

STEPS = 20
SAVE_EVERY = 4  # steps
KILL_AT = 9  # steps done; between two checkpoints
REPLAY_FROM = 6  # between two checkpoints
ATTEMPTS = 3  # at killing a run before it ends by itself
EMULATED = 4  # devices that a CPU stands for unless told otherwise
WORDS = ("the", "a", "model", "step", "loss", "spike", "batch", "token", "and", "of", "again")

# What the test itself decides.
FIXED = ("steps", "data.corpus", "checkpoint", "log.every", "eval")

PROVES = (
    "On this machine, in this environment, a run that was killed and resumed, and steps executed "
    "again in other processes, gave the bits of an undisturbed run: every computed field of every "
    "step, and the state digests of all checkpoints."
)
DOES_NOT_PROVE = (
    "It says nothing of other machines, versions, flags or meshes than those in the table, and "
    "little of larger models: their shapes lead XLA to other code. `palm-jax replay` tells for a "
    "run of your own."
)

Tell = collections.abc.Callable[[str], None]
Verdict = Literal["identical", "DIFFERENT", "not tried"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way of making the run again, and what came of it."""

    what: str
    verdict: Verdict
    compared: str  # what was, or why nothing was
    first_difference: dict[str, Any] | None = None  # {"step", "field", "straight", "again"}


@dataclasses.dataclass(frozen=True)
class Report:
    platform: str
    device_kind: str
    devices: int
    mesh: dict[str, Any]
    state_digest: str  # of the undisturbed run's end
    trials: tuple[Trial, ...]

    @property
    def identical(self) -> bool:
        return all(trial.verdict != "DIFFERENT" for trial in self.trials)


class Place:
    """A folder, and the command line in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            # Nothing compiled before, so that this is made here in full; and nothing stays.
            "XDG_CACHE_HOME": str(folder / "cache"),
            # This package, from wherever it was imported.
            "PYTHONPATH": os.pathsep.join(
                [str(pathlib.Path(__file__).resolve().parents[1])]
                + [path for path in [os.environ.get("PYTHONPATH")] if path]
            ),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "palm_jax.cli", *arguments, "--json"],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, answers: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """What a command says.

        Args:
          answers: exit codes after which it has said something.
        Raises:
          WrongInput, CannotDo: as the command itself; any other end is a CannotDo as well.
        """
        with self.start(*arguments) as process:
            try:
                said, complaints = process.communicate()
            finally:
                process.kill()  # where the wait was interrupted
        if process.returncode in answers:
            spoken: dict[str, Any] = json.loads(said)
            return spoken
        errors = [line for line in complaints.splitlines() if line.startswith("error: ")]
        if process.returncode == WrongInput.exit_code and errors:
            raise WrongInput(errors[-1].removeprefix("error: "))
        if process.returncode == CannotDo.exit_code and errors:
            raise CannotDo(errors[-1].removeprefix("error: "))
        raise CannotDo(
            f"`palm-jax {' '.join(arguments)}` ended with {process.returncode}:\n{complaints}"
        )

    def killed_after(self, done: int, *arguments: str) -> bool:
        """Kill a training command when it says that `done` steps are; False: it had ended."""
        with self.start(*arguments) as process:
            try:
                for line in process.stderr or ():
                    if line.startswith(f"step {done}/"):
                        break
            finally:
                process.kill()
        return process.returncode == -signal.SIGKILL


def bits(
    folder: pathlib.Path,
    overrides: collections.abc.Sequence[str] = (),
    tell: Tell = lambda text: None,
    seconds: float = 300,
) -> Report:
    """Make the tiny run and make it again; `folder` takes what that needs, and must be empty.

    Args:
      overrides: settings of the tiny run; mesh.* as wanted, otherwise all devices of an
        accelerator, or some emulated ones of a CPU.
      tell: is told what is being done.
      seconds: how long devices may take to start.
    Raises:
      WrongInput: the overrides do not fit together, or not the machine.
      CannotDo: there are several hosts, or something could not even be tried.
    """
    for text in overrides:
        name = text.partition("=")[0]
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in FIXED):
            raise WrongInput(f"{text}: selftest itself decides about {name}")
    tell("starting devices")
    found = probe.ask("devices", seconds, settings=doctor.SMALLEST, with_mesh=False)
    if found["processes"] > 1:
        raise CannotDo(
            f"selftest is for one host, and here {found['processes']} processes have met. On a "
            "slice, train a short run on all hosts, and replay it there"
        )
    given_mesh = any(text.startswith("mesh.") for text in overrides)
    settings = tiny_settings(found["platform"], found["count"], given_mesh)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    wanted = config.load(folder / "tiny.yaml", overrides)
    (folder / "tiny.yaml").write_text(config.to_yaml(wanted), encoding="utf-8")
    place = Place(folder)

    tell("preparing a corpus of made-up text")
    _prepare(place, wanted.model)
    tell(f"training {STEPS} steps, undisturbed")
    straight = place("train", "tiny.yaml", "--run", "straight")
    trials = [_killed_and_resumed(place, straight, tell)]
    tell(f"replaying steps {REPLAY_FROM}:{STEPS}")
    trials.append(_replayed(place, f"replayed steps {REPLAY_FROM}:{STEPS}", REPLAY_FROM, []))
    trials.append(_on_another_mesh(place, wanted, found["platform"], tell))
    return Report(
        platform=found["platform"],
        device_kind=found["kind"],
        devices=wanted.mesh.data_parallel * wanted.mesh.tensor,
        mesh=wanted.mesh.model_dump(),
        state_digest=straight["state_digest"],
        trials=tuple(trials),
    )


def tiny_settings(platform: str, num_devices: int, given_mesh: bool) -> dict[str, Any]:
    """Settings of the smallest run that has everything, on the devices there are.

    Args:
      given_mesh: leave the mesh to the caller.
    """
    if platform == "cpu":
        num_devices = EMULATED
    # Data parallelism is a power of two; what is left of the devices is tensor parallelism.
    data_parallel = num_devices & -num_devices
    tensor = num_devices // data_parallel
    lanes = max(8, data_parallel)
    mesh: dict[str, Any] = {}
    if not given_mesh:
        mesh = {"fsdp": data_parallel, "tensor": tensor}
        if platform == "cpu":
            mesh |= {"data": 2, "fsdp": EMULATED // 2, "emulated_devices": EMULATED}
    return {
        "steps": STEPS,
        "model": {
            "num_layers": 2,
            "width": max(32, lanes) * tensor,
            "num_heads": 4 * tensor,
            "head_size": 8,
            "feed_forward": 128 * tensor,
            "vocabulary_size": 257,
            "vocabulary_multiple": 128 * tensor,
            "sequence_length": 32,
        },
        "data": {"corpus": "corpus", "ramp": {"starts": [0, 10], "sizes": [lanes, 2 * lanes]}},
        "schedule": {"hold_steps": 5},
        "numerics": {"lanes": lanes},
        "mesh": mesh,
        "checkpoint": {"every": SAVE_EVERY, "keep_last": STEPS},
        "log": {"every": 1, "tensorboard": False},
    }


def _prepare(place: Place, model: config.Model) -> None:
    """A corpus of bytes, the same for everybody."""
    rng = random.Random(0)
    (place.folder / "text").mkdir()
    for number in range(60):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(100, 300)))
        (place.folder / "text" / f"{number:02d}.txt").write_text(words, encoding="utf-8")
    place(
        *("data", "prepare", "--source", "text:text/*.txt", "--out", "corpus"),
        *("--sequence-length", str(model.sequence_length), "--held-out", "0.1"),
    )


def _killed_and_resumed(place: Place, straight: dict[str, Any], tell: Tell) -> Trial:
    """The run again, killed by SIGKILL and resumed, against the undisturbed one."""
    for attempt in range(ATTEMPTS):
        command = ("train", "tiny.yaml", "--run", f"killed-{attempt}")
        tell(f"training them again, killed after step {KILL_AT}")
        if place.killed_after(KILL_AT, *command):
            break
    else:
        raise CannotDo(
            f"a run of {STEPS} steps ended {ATTEMPTS} times before it could be killed at step "
            f"{KILL_AT}: this machine is too busy to test on; try again"
        )
    tell("resuming it")
    resumed = place(*command)
    what = f"trained again, killed after step {KILL_AT} and resumed"
    before, after = (_record(place.folder / name) for name in ("straight", f"killed-{attempt}"))
    difference = first_difference(before, after)
    if difference is None and resumed["state_digest"] != straight["state_digest"]:
        difference = {
            "step": STEPS,
            "field": "state_digest",
            "straight": straight["state_digest"],
            "again": resumed["state_digest"],
        }
    num_fields = len(before.steps[0][0])
    compared = f"{len(before.steps)} steps x {num_fields} fields, {len(before.states)} states"
    if (again := sum(len(attempts) - 1 for attempts in after.steps.values())) > 0:
        compared += f"; {again} steps were executed twice"
    return Trial(what, "identical" if difference is None else "DIFFERENT", compared, difference)


@dataclasses.dataclass(frozen=True)
class Record:
    """What a logbook says of a run's bits."""

    steps: dict[int, list[dict[str, Any]]]  # computed fields as exact bits, attempt by attempt
    states: dict[int, str]  # state digests by checkpoint


def _record(run: pathlib.Path) -> Record:
    steps: dict[int, list[dict[str, Any]]] = {}
    states: dict[int, str] = {}
    for record in logbook.read(run).records:
        if record["event"] == "step":
            steps.setdefault(record["step"], []).append(record["bits"])
        elif record["event"] == "checkpoint":
            states[record["step"]] = record["state_digest"]
    return Record(steps, states)


def first_difference(straight: Record, again: Record) -> dict[str, Any] | None:
    """The first step, field or checkpoint of which any attempt differs."""
    for step in sorted(straight.steps.keys() | again.steps.keys()):
        expected = straight.steps.get(step, [{}])[0]
        for attempt in itertools.chain(straight.steps.get(step, [{}]), again.steps.get(step, [{}])):
            for field in expected | attempt:
                if expected.get(field) != attempt.get(field):
                    return _difference(step, field, expected, attempt)
    for step in sorted(straight.states.keys() | again.states.keys()):
        if straight.states.get(step) != again.states.get(step):
            one, other = ({"state_digest": r.states.get(step)} for r in (straight, again))
            return _difference(step, "state_digest", one, other)
    return None


def _difference(
    step: int, field: str, straight: dict[str, Any], again: dict[str, Any]
) -> dict[str, Any]:
    return {
        "step": step,
        "field": field,
        "straight": straight.get(field),
        "again": again.get(field),
    }


def _replayed(place: Place, what: str, first: int, mesh: list[str]) -> Trial:
    said = place(*("replay", "straight", "--steps", f"{first}:{STEPS}", *mesh), answers=(0, 1))
    compared = (
        f"{said['compared_steps']} steps x {len(said['fields'])} fields, "
        f"{len(said['compared_digests'])} states"
    )
    found = said["first_difference"]
    difference = found and {
        "step": found["step"],
        "field": found["field"],
        "straight": found["recorded"],
        "again": found["replayed"],
    }
    return Trial(what, "identical" if said["identical"] else "DIFFERENT", compared, difference)


def _on_another_mesh(place: Place, wanted: config.Config, platform: str, tell: Tell) -> Trial:
    """A replay from the first step on fewer devices, where that should not matter."""
    mesh = wanted.mesh
    what = "replayed on another mesh"
    if wanted.numerics.reduction != "canonical":
        return Trial(what, "not tried", "only canonical numerics promise equal bits there")
    if mesh.data_parallel == 1:
        return Trial(what, "not tried", "there is one data-parallel device")
    if platform == "cpu":
        fewer, all_devices = mesh.tensor, mesh.data_parallel * mesh.tensor
        devices = "1 device" if fewer == 1 else f"{fewer} devices"
        what = f"replayed on {devices} instead of {all_devices}"
        other = ["mesh.data=1", "mesh.fsdp=1", f"mesh.emulated_devices={fewer}"]
    else:
        # No device of an accelerator may stand idle, but replicas and slices can be exchanged.
        data, fsdp = (mesh.fsdp, mesh.data) if mesh.fsdp != mesh.data else (mesh.data_parallel, 1)
        what = f"replayed with mesh.data={data}, mesh.fsdp={fsdp}"
        other = [f"mesh.data={data}", f"mesh.fsdp={fsdp}"]
    tell(what.replace("replayed", "replaying"))
    return _replayed(place, what, 0, other)


# --- losses -------------------------------------------------------------------------------


def parity(settings: config.Config) -> tuple[Outcome, str]:
    """The losses of a fresh model here and on a CPU, and what to say if they are too far apart.

    For a process in which start() has been called. The tokens are random.

    Raises:
      CannotDo: there is no such mesh, or the CPU cannot compute this model.
    """
    import numpy as np

    from palm_jax import parity as comparison
    from palm_jax import sharding, step

    model, (size, *_) = settings.model, settings.data.ramp.sizes
    end_of_document = 0  # now and then one of the tokens, so that a text has several
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), end_of_document)
    tokens = np.random.default_rng(settings.seed).integers(
        model.vocabulary_size, size=(size, model.sequence_length + 1), dtype=np.int32
    )
    params = program.init_params()
    rows = tokens[program.rows_here(size)]
    outcome = comparison.examine(program, params, rows, end_of_document)
    if isinstance(outcome, str):
        raise CannotDo(f"cannot compare: {outcome}")
    return outcome, comparison.refusal(outcome, settings.precision.policy)
