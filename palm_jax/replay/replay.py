"""Execute steps of a run again and compare every computed field with the logbook, as bits."""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Any

import jax

from palm_jax import config, data, processes, sharding
from palm_jax.course import Course
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import digests, environment, logbook, segments
from palm_jax.record.folder import RunFolder
from palm_jax.record.steps import computed_fields
from palm_jax.replay import states


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step, and where the recorded run computed it."""

    number: int  # in its batch
    lane: int
    device: int  # among the data-parallel ones
    process: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first field that came out otherwise."""

    step: int
    field: str
    recorded: Any
    replayed: Any
    # Those whose own gradients differ, where the run recorded digests of them.
    microbatches: tuple[Microbatch, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a replay found. `rows` has one entry a step: (step, fields compared, differing)."""

    identical: bool
    compared_steps: int
    fields: tuple[str, ...]
    from_checkpoint: int | None
    first_difference: Difference | None
    expectation: str
    environment_differences: dict[str, tuple[Any, Any]]
    damaged_checkpoints: tuple[str, ...]
    compared_digests: tuple[int, ...]  # checkpoints whose state digest was compared
    rows: tuple[tuple[int, int, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the logbook says of steps of one segment."""

    bits: dict[int, dict[str, Any]]  # by step
    environments: list[dict[str, Any]]  # those in which these attempts were executed
    state_digests: dict[int, str]  # by checkpoint step
    programs: dict[str, set[tuple[str, str]]]  # {lowered digest: {(settings, optimized digest)}}


def recorded(run: RunFolder, segment: int, start: int, stop: int, attempt: int | None) -> Recorded:
    """Read steps [start, stop): of each the last attempt, or attempt number `attempt`.

    Raises:
      WrongInput: the logbook does not have one of them.
      CannotDo: it is damaged.
    """
    found: dict[int, dict[str, Any]] = {}
    governed: dict[int, int] = {}  # step -> which start
    starts: list[dict[str, Any]] = []
    state_digests: dict[int, str] = {}
    programs: dict[str, set[tuple[str, str]]] = {}
    for record in logbook.scan(run.path):
        if not isinstance(record, dict):
            continue
        if record["event"] == "start":
            logbook.required(record, run.path, environment=dict)
            starts.append(record["environment"])
        elif record.get("segment") != segment:
            continue
        elif record["event"] == "step" and start <= record["step"] < stop:
            if attempt is None or record["attempt"] == attempt:
                found[record["step"]] = record["bits"]
                governed[record["step"]] = len(starts) - 1
        elif record["event"] == "checkpoint":
            logbook.required(record, run.path, step=int, state_digest=str)
            if record["step"] <= stop:
                state_digests[record["step"]] = record["state_digest"]
        elif record["event"] == "program":
            digests_of = dict.fromkeys(("lowered_digest", "fingerprint", "optimized_digest"), str)
            logbook.required(record, run.path, **digests_of)
            programs.setdefault(record["lowered_digest"], set()).add(
                (record["fingerprint"], record["optimized_digest"])
            )
    missing = next((step for step in range(start, stop) if step not in found), None)
    if missing is not None:
        which = "" if attempt is None else f" as attempt {attempt}"
        raise WrongInput(
            f"the logbook of {run.path} has no record of step {missing}{which} in segment "
            f"{segment}; it can be compared only where it was recorded"
        )
    if -1 in governed.values():
        raise CannotDo(f"the logbook of {run.path} is damaged: it has steps before any start")
    used = [starts[index] for index in sorted(set(governed.values()))]
    return Recorded(found, used, state_digests, programs)


def replay(
    run: RunFolder,
    start: int,
    stop: int,
    *,
    corpus: data.Rows,
    segment: int | None = None,
    attempt: int | None = None,
    mesh: config.Mesh | None = None,
    allow_environment: bool = False,
    tell: collections.abc.Callable[[int, int], None] = lambda step, stop: None,
) -> Comparison:
    """Replay steps [start, stop) and compare them. Changes nothing in the run.

    Args:
      corpus: the one the run was trained on; its digest is checked, and each batch's.
      segment: which history; the default is the last.
      attempt: which attempt of each step; the default is the last.
      mesh: another mesh than the run's.
      tell: is told (step, stop) as steps are done.
    Raises:
      WrongInput: the steps are not in the logbook, or the corpus is another one.
      CannotDo: the environment may give other bits, and that is not allowed.
    """
    if not 0 <= start < stop:
        raise WrongInput(f"--steps {start}:{stop}: give A:B with 0 <= A < B")
    if run.manifest().digest != corpus.manifest.digest:
        raise WrongInput(
            f"{run.path} was trained on the corpus {run.manifest().digest[:16]}, but "
            f"{corpus.folder} is {corpus.manifest.digest[:16]}; name the run's own with "
            f"{' or '.join(config.PLACES_OF_DATA)}"
        )
    settings = run.config()
    if mesh is not None:
        settings = config.override(
            settings, [f"mesh.{axis}={_yaml(size)}" for axis, size in mesh.model_dump().items()]
        )
    device_mesh = sharding.make_mesh(settings.mesh)
    number = run.last_segment() if segment is None else segment
    course = Course(
        settings,
        segments.read(run.segment(number)),
        corpus,
        device_mesh,
        skip_above=logbook.skip_limits(run.path, number),
    )
    history = recorded(run, number, start, stop, attempt)
    here = environment.capture(numerics=settings.numerics, mesh_shape=dict(device_mesh.shape))
    changed: dict[str, tuple[Any, Any]] = {}
    for there in history.environments:
        changed |= environment.differences(there, here)
    if changed and not allow_environment:
        rows = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        raise CannotDo(
            f"the environment of {run.path} was another one, so other bits would say nothing: "
            f"{rows}. Replay where it is the same, or anyway with --allow-environment"
        )

    found = states.newest_state(run, course, start)
    state = found.state
    first: Difference | None = None
    table: list[tuple[int, int, tuple[str, ...]]] = []
    compared_digests: list[int] = []
    fields: dict[str, None] = {}
    pending: list[tuple[int, data.StepBatch, dict[str, jax.Array]]] = []

    def compare() -> None:
        nonlocal first
        vitals = jax.device_get([v for _, _, v in pending])
        whole = processes.whole_digests([batch.digest for _, batch, _ in pending])
        for (step, batch, _), digest, computed in zip(pending, whole, vitals, strict=True):
            again = logbook.exact_bits(computed_fields(settings, batch, digest, computed))
            before = history.bits[step]
            differing = logbook.differing_fields(before, again)
            fields.update(dict.fromkeys(before))
            table.append((step, len(before), differing))
            if differing and first is None:
                name = differing[0]
                first = Difference(
                    step,
                    name,
                    before.get(name),
                    again.get(name),
                    _located(
                        logbook.differing_microbatches(before, again),
                        settings.numerics.lanes,
                        history.environments[-1],
                    ),
                )
        pending.clear()

    began = None if found.from_checkpoint is None else history.state_digests.get(found.step)
    if began is not None:
        # The checkpoint fits its own record, or it would not have been restored; here it must
        # fit the logbook too.
        compared_digests.append(found.step)
        digest = digests.digest(state).whole
        if digest != began:
            first = Difference(found.step - 1, "state_digest", began, digest)
    for step, batch, after, vitals in course.run(state, found.step, stop):
        state = after
        if step >= start:
            pending.append((step, batch, vitals))
        recorded_digest = history.state_digests.get(step + 1)
        if recorded_digest is not None and step >= start:
            compare()
            digest = digests.digest(state).whole
            compared_digests.append(step + 1)
            if digest != recorded_digest and first is None:
                first = Difference(step, "state_digest", recorded_digest, digest)
        if len(pending) >= settings.log.every:
            compare()
        tell(step + 1, stop)
    compare()
    return Comparison(
        identical=first is None,
        compared_steps=len(table),
        fields=tuple(fields) + (("state_digest",) if compared_digests else ()),
        from_checkpoint=found.from_checkpoint,
        first_difference=first,
        expectation=_expectation(course, history, here),
        environment_differences=changed,
        damaged_checkpoints=found.damaged,
        compared_digests=tuple(compared_digests),
        rows=tuple(table),
    )


def _located(numbers: list[int], lanes: int, environment: dict[str, Any]) -> tuple[Microbatch, ...]:
    """Where these microbatches were computed; nothing if the environment does not say it."""
    names = ("mesh.data", "mesh.fsdp", "process_count")
    sizes = [size for name in names if logbook.is_count(size := environment.get(name)) and size]
    if len(sizes) < len(names):
        return ()
    width = sizes[0] * sizes[1]
    return tuple(
        Microbatch(number, number % lanes, number % width, number % width * sizes[2] // width)
        for number in numbers
    )


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _expectation(course: Course, history: Recorded, here: dict[str, Any]) -> str:
    """What programs, chips and device counts say of the bits, before looking at them."""
    same_chips = all(
        there.get("device_kind") == here["device_kind"]
        and there.get("cpu_model") == here["cpu_model"]
        for there in history.environments
    )
    same_count = all(
        there.get("device_count") == here["device_count"]
        and all(there.get(f"mesh.{a}") == here[f"mesh.{a}"] for a in ("data", "fsdp", "tensor"))
        for there in history.environments
    )
    lowered = {
        compiled.lowered_digest
        for program in course.programs.values()
        for compiled in program.compiled.values()
    }
    if not same_count:
        return "other device count: equal bits are expected in canonical numerics"
    if not lowered <= set(history.programs):
        return "other program: equal bits are not expected"
    if same_chips:
        return "same program, same chips: equal bits are expected"
    return "same program, other chips: equal bits are expected"
