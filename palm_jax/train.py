"""The one loop: start or continue a run, step by step, and leave its record.

What is executed when is in `train`, from top to bottom; what a step computes is in step.py.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import tensorboardX

from palm_jax import config, parity, precision, processes, sharding, verify
from palm_jax.corpus.corpora import open_corpus
from palm_jax.corpus.joint import Contents
from palm_jax.course import Course
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import parameters
from palm_jax.record import checkpoints as checkpoint_store
from palm_jax.record import digests, environment, folder, lock, logbook, segments
from palm_jax.record import mirror as mirroring
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.profile import StepTrace
from palm_jax.record.programs import ProgramRecorder
from palm_jax.record.steps import StepRecorder, Tell
from palm_jax.replay import states
from palm_jax.step import Program, TrainState
from palm_jax.use.evaluate import Evaluation, evaluate
from palm_jax.watch import Verdict, Watch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where a call of `train` ended."""

    step: int  # the state's next step
    loss: float  # of the last step
    tokens: int  # target tokens trained on since step 0
    state_digest: str
    evaluation: Evaluation | None  # None if stopped before the end
    stopped_by: str | None  # the signal's name
    gave_up: str | None = None  # why the run must not go on as it is


def check_corpus(settings: config.Config, manifest: Contents) -> None:
    """Raise WrongInput if the model cannot train on this corpus."""
    model, told = settings.model, settings.data.told
    if model.sequence_length != manifest.sequence_length:
        raise WrongInput(
            f"model.sequence_length={model.sequence_length}, but {told} is cut into "
            f"sequences of {manifest.sequence_length}; prepare it again or change the model"
        )
    if model.vocabulary_size != manifest.vocabulary_size:
        raise WrongInput(
            f"model.vocabulary_size={model.vocabulary_size}, but the tokenizer "
            f"{manifest.tokenizer.kind} of {told} has {manifest.vocabulary_size} ids; "
            f"set model.vocabulary_size={manifest.vocabulary_size}"
        )


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def train(
    settings: config.Config,
    run: str | pathlib.Path,
    *,
    tell: Tell = lambda event, fields: None,
    stop_requested: collections.abc.Callable[[], str | None] = lambda: None,
    allow_environment: bool = False,
    keep: bool = True,
) -> Outcome:
    """Train `settings` in the folder `run`, from its newest checkpoint if it has one.

    Where `spikes.policy` rolls the run back, it goes on in the segment that this opens.

    Args:
      tell: is told of each event as it enters the logbook, and of each `phase` that may take
        long: before compiling, evaluating, verifying.
      stop_requested: asked after every step; names the reason to save and stop, or None.
      allow_environment: continue although the environment may give other bits.
      keep: save checkpoints and evaluate at the end; an experiment may do without.
    Raises:
      WrongInput: settings, corpus and run folder do not fit together.
      CannotDo: the devices, the disk, the environment or a damaged checkpoint forbid it.
    """
    _check_agreement(settings, run)
    programs: dict[str, Program] = {}
    while True:
        outcome = _train_segment(
            settings, run, programs, tell, stop_requested, allow_environment, keep
        )
        if outcome is not None:
            return outcome


def _check_agreement(settings: config.Config, run: str | pathlib.Path) -> None:
    """Raise WrongInput if the processes of this run were not given the same to train."""
    if not processes.are_several():
        return
    with open_corpus(settings.data) as corpus:
        identity = {
            "--run": str(run),
            "the corpus's digest": corpus.manifest.digest,
            **environment.code_identity(),
            **config.flat(settings),
        }
    processes.check_agreement(identity)


def _train_segment(
    settings: config.Config,
    run: str | pathlib.Path,
    programs: dict[str, Program],
    tell: Tell,
    stop_requested: collections.abc.Callable[[], str | None],
    allow_environment: bool,
    keep: bool,
) -> Outcome | None:
    """Train the run's last segment to its end; None if another was opened, to go on there."""
    with contextlib.ExitStack() as stack:
        # --- what the run stands on ---
        corpus = open_corpus(settings.data)
        stack.callback(corpus.close)
        check_corpus(settings, corpus.manifest)
        mesh = sharding.make_mesh(settings.mesh)
        run_folder, changes = _open_together(stack, run, settings, corpus.manifest)
        # Left last of all: then the logbook has its last word, and the disk its last checkpoint.
        mirror = stack.enter_context(_mirror(run_folder, settings.checkpoint))
        segment = segments.read(run_folder.segment(run_folder.last_segment()))
        course = Course(settings, segment, corpus, mesh, programs)
        history = logbook.History.read(run_folder.path)
        current = environment.capture(numerics=settings.numerics, mesh_shape=dict(mesh.shape))
        changed = _environment_changes(run_folder, segment, current, allow_environment)
        saved = stack.enter_context(
            Checkpoints(run_folder.checkpoints(segment.segment), settings.checkpoint)
        )
        checkpoint_store.check_space(
            run_folder.path, checkpoint_store.bytes_of(course.program_at(0).state_shapes)
        )

        # --- where it goes on ---
        start = saved.latest()
        if start is None:
            start = segment.start_step
        if start > settings.steps:
            raise WrongInput(
                f"steps={settings.steps}, but {run_folder.path} has already made {start} steps; "
                f"set steps={start} or more"
            )
        state, digest = _state_at(start, run_folder, course, saved)
        _check_data(run_folder, course, start)

        processes.wait_for_all("everything is read")
        book = stack.enter_context(
            logbook.Logbook.open(run_folder.path) if processes.is_first() else logbook.Unwritten()
        )
        beginning = {
            "segment": segment.segment,
            "step": start,
            "steps": settings.steps,
            "parameters": parameters.number(settings.model),
            "fingerprint": config.fingerprint(settings),
            "corpus_digest": corpus.manifest.digest,
            "settings_changed": {key: list(both) for key, both in changes.items()},
            "environment_changed": {key: list(both) for key, both in changed.items()},
            "recorded_steps": history.steps_of(segment.segment),
            "torn_lines": [f"{torn.path.name}:{torn.line}" for torn in history.torn],
            "leftovers": saved.leftovers(),
            "emulated": precision.is_emulated(
                settings.precision.policy, current["platform"], current["device_kind"]
            ),
            "environment": current,
        }
        book.append("start", **beginning)
        book.flush()
        tell("start", beginning)
        if start == 0 and segment.parent is None:
            _check_parity(course, state, book, tell)

        # --- the loop ---
        summaries = _summaries(stack, run_folder.tensorboard(segment.segment), start, settings.log)
        recorder = StepRecorder(settings, segment.segment, book, history, summaries, tell)
        programs_noted = ProgramRecorder(run_folder, segment.segment, book, allow_environment)
        watch = Watch(settings, run_folder, segment, start, book, saved, tell, keep)
        stack.callback(watch.close)
        done, evaluation, stopped_by = start, None, None
        verdict: Verdict | None = None
        trace = StepTrace(settings.log, run_folder, segment.segment, book, tell)
        with course.batches(start, settings.steps) as batches, trace:
            for step, batch in recorder.awaited(batches):
                program = course.program_at(step)
                tokens = program.put(batch.tokens)
                if due(step, settings.verify.every):
                    tell("phase", {"phase": "verifies", "step": step})
                    recorder.leave_out(_verify(program, state, tokens, segment, step, book, tell))
                is_new = not program.is_compiled(tokens)
                if is_new:
                    tell("phase", {"phase": "compiles", "step": step})
                with trace.step(step):
                    state, vitals = program.step(state, tokens, watch.controls(step))
                recorder.leave_out(programs_noted.note(step, program, is_new))
                recorder.leave_out(trace.after(step, vitals))
                recorder.add(step, batch, vitals)
                done = step + 1
                stopped_by = processes.agreed(stop_requested())
                at_end = done == settings.steps or stopped_by is not None
                to_save = keep and (at_end or due(done, settings.checkpoint.every))
                to_evaluate = due(done, settings.eval.every) or (keep and done == settings.steps)
                if to_save or to_evaluate or at_end or due(done, settings.log.every):
                    verdict = watch.after(recorder.flush(), recorder.slow)
                evaluation = None
                if verdict is not None:
                    break
                if to_evaluate:
                    tell("phase", {"phase": "evaluates", "step": done})
                    began = time.perf_counter()
                    evaluation = evaluate(program, state.params, corpus)
                    seconds = time.perf_counter() - began
                    _record_evaluation(book, summaries, tell, segment, done, evaluation, seconds)
                    recorder.restart_clock()
                if to_save:
                    digest = _save(saved, book, tell, segment, done, state, evaluation)
                    if mirror is not None:
                        mirror.saved(done)
                    recorder.restart_clock()
                if stopped_by is not None:
                    break
        if start == settings.steps and keep:  # nothing was left to do
            began = time.perf_counter()
            evaluation = evaluate(course.program_at(start), state.params, corpus)
            seconds = time.perf_counter() - began
            _record_evaluation(book, summaries, tell, segment, done, evaluation, seconds)
        if not keep or verdict is not None:
            digest = digests.digest(state).whole
        saved.wait()  # the run's last words come after its last checkpoint is on the disk
        ending = {
            "segment": segment.segment,
            "step": done,
            "state_digest": digest,
            "signal": stopped_by if verdict is None else verdict.action,
        }
        book.append("stop", **ending)
        book.flush()
        tell("stop", ending)
        if verdict is not None and verdict.action == "rollback":
            return None
        last = recorder.last or _last_step(run_folder, segment.segment, done - 1)
        return Outcome(
            step=done,
            loss=float(last["loss"]),
            tokens=int(last["tokens"]),
            state_digest=digest,
            evaluation=evaluation,
            stopped_by=stopped_by if done < settings.steps else None,
            gave_up=None if verdict is None else verdict.reason,
        )


def _open_together(
    stack: contextlib.ExitStack,
    run: str | pathlib.Path,
    settings: config.Config,
    manifest: Contents,
) -> tuple[folder.RunFolder, dict[str, Any]]:
    """`folder.open_run`, in the first process before the others; the first one holds it."""
    if processes.is_first():
        mirroring.bring_back(settings, pathlib.Path(run))
        opened = folder.open_run(run, settings, manifest)
        stack.enter_context(lock.held(opened[0].path))
    processes.wait_for_all("the run's folder is there")
    return opened if processes.is_first() else folder.open_run(run, settings, manifest)


def _mirror(
    run: folder.RunFolder, settings: config.Checkpoint
) -> contextlib.AbstractContextManager[mirroring.Mirror | None]:
    if settings.mirror is None or not processes.is_first():
        return contextlib.nullcontext()
    return mirroring.Mirror(run, settings)


def _state_at(
    start: int, run: folder.RunFolder, course: Course, saved: Checkpoints
) -> tuple[TrainState, str]:
    """The state whose next step is `start`, and its digest if it comes from a checkpoint."""
    if start in saved.steps():
        state, record = saved.restore(start, course.program_at(start).state_shapes)
        return state, record["digest"]["whole"]
    return states.newest_state(run, course, start).state, ""


def _check_data(run: folder.RunFolder, course: Course, start: int) -> None:
    """Raise CannotDo if the step before `start` would not read today what it read then.

    A change of corpus reader, tokenizer or shuffle shows here, before it can enter the run.
    """
    segment, step = course.segment, start - 1
    if step < segment.start_step:
        return
    recorded = _last_step(run, segment.segment, step).get("batch_digest")
    with course.batches(step, start) as batches:
        (_, batch), *_ = list(batches)
    (digest,) = processes.whole_digests([batch.digest])
    if digest != recorded:
        raise CannotDo(
            f"step {step} of {run.path} read a batch of digest {recorded}, and would now read "
            f"{digest}: the code that reads data has changed. Continue with the version "
            "that the run was made with"
        )


def _check_parity(course: Course, state: TrainState, book: logbook.Logbook, tell: Tell) -> None:
    """Record that the first step's losses are those of a CPU; on a CPU there is nothing to do.

    Raises:
      CannotDo: they are not.
    """
    with course.batches(0, 1) as first:
        ((_, batch),) = list(first)
    end = course.corpus.manifest.end_of_document
    fields = parity.check(course.program_at(0), state.params, batch.tokens, end)
    if fields is not None:
        fields = {"segment": course.segment.segment, "step": 0, **fields}
        book.append("parity", **fields)
        book.flush()
        tell("parity", fields)


def _environment_changes(
    run: folder.RunFolder, segment: segments.Segment, current: dict[str, Any], allowed: bool
) -> dict[str, tuple[Any, Any]]:
    """How the environment differs from that of the last start, and of the run departed from.

    Raises:
      CannotDo: it does, in what can change bits, and that is not `allowed`.
    """
    changed = _changes_since_last_start(run, current, allowed)
    if segment.parent is not None and segment.parent.run is not None:
        departed_from = folder.RunFolder((run.path / segment.parent.run).resolve())
        changed |= _changes_since_last_start(departed_from, current, allowed)
    return changed


def _changes_since_last_start(
    run: folder.RunFolder, current: dict[str, Any], allowed: bool
) -> dict[str, tuple[Any, Any]]:
    recorded = None
    for record in logbook.scan(run.path):
        if isinstance(record, dict) and record["event"] == "start":
            logbook.required(record, run.path, environment=dict)
            recorded = record["environment"]
    if recorded is None:
        return {}
    changed = environment.differences(recorded, current)
    if changed and not allowed:
        rows = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        raise CannotDo(
            f"{run.path} was trained in another environment, and the bits may differ: {rows}. "
            "Restore it, or continue with --allow-environment, which the logbook will say"
        )
    return changed


def _summaries(
    stack: contextlib.ExitStack, path: pathlib.Path, start: int, settings: config.Log
) -> tensorboardX.SummaryWriter | None:
    if not settings.tensorboard or not processes.is_first():
        return None
    writer = tensorboardX.SummaryWriter(str(path), purge_step=start)
    stack.callback(writer.close)
    return writer


def _record_evaluation(
    book: logbook.Logbook,
    summaries: tensorboardX.SummaryWriter | None,
    tell: Tell,
    segment: segments.Segment,
    step: int,
    evaluation: Evaluation,
    seconds: float,
) -> None:
    fields = {"segment": segment.segment, "step": step, **evaluation.fields(), "seconds": seconds}
    book.append("evaluation", **fields)
    book.flush()
    tell("evaluation", fields)
    if summaries is not None:
        for name in ("loss", "perplexity", "bits_per_byte"):
            summaries.add_scalar(f"{evaluation.split}/{name}", fields[name], step)
        for corpus, bits in (evaluation.corpora or {}).items():
            summaries.add_scalar(f"{evaluation.split}/bits_per_byte/{corpus}", bits, step)


def _verify(
    program: Program,
    state: TrainState,
    tokens: jax.Array,
    segment: segments.Segment,
    step: int,
    book: logbook.Logbook,
    tell: Tell,
) -> float:
    """Verify the devices before a step; returns the seconds that it took.

    Raises:
      CannotDo: gradients depend on the device that computes them.
    """
    found = verify.verify(program, state, tokens)
    where = verify.places(program, found.suspects)
    fields = {
        "segment": segment.segment,
        "step": step,
        "microbatches": found.microbatches,
        "differing": list(found.differing),
        "suspects": where,
        "seconds": found.seconds,
    }
    book.append("verification", **fields)
    tell("verification", fields)
    if found.differing:
        book.flush()
        raise CannotDo(
            f"silent corruption before step {step}: {verify.told(found, where)}. Steps since the "
            "last verification may be wrong. Name the host in distributed.denied_hosts, and "
            "continue from a checkpoint not after that verification"
        )
    return found.seconds


def _save(
    saved: Checkpoints,
    book: logbook.Logbook,
    tell: Tell,
    segment: segments.Segment,
    step: int,
    state: TrainState,
    evaluation: Evaluation | None,
) -> str:
    """Start saving `state` as checkpoint `step`; returns its digest."""
    record = {"segment": segment.segment}
    began = time.perf_counter()
    digest = saved.save(step, state, record, None if evaluation is None else evaluation.loss)
    fields = {
        "segment": segment.segment,
        "step": step,
        "state_digest": digest.whole,
        "blocked_seconds": time.perf_counter() - began,  # the rest is written while training
    }
    book.append("checkpoint", **fields)
    book.flush()
    tell("checkpoint", fields)
    return digest.whole


def _last_step(run: folder.RunFolder, segment: int, step: int) -> dict[str, Any]:
    """Computed fields of the last recorded attempt of a step."""
    last: dict[str, Any] | None = None
    for record in logbook.scan(run.path):
        if (
            isinstance(record, dict)
            and record["event"] == "step"
            and (record["segment"], record["step"]) == (segment, step)
        ):
            last = record
    if last is None:
        raise CannotDo(f"the logbook of {run.path} has no record of step {step}; restore it")
    found: dict[str, Any] = last["computed"]
    if logbook.number(found.get("loss")) is None or not logbook.is_count(found.get("tokens")):
        raise logbook.damaged(last, run.path, "computed")
    return found
