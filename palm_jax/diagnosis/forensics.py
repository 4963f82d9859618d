"""The suspect data at the fork: which sequences stand out, by loss, by gradient and as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from palm_jax import config, reductions, sharding
from palm_jax import step as stepping
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis.arms import Plan
from palm_jax.diagnosis.experiment import Laboratory
from palm_jax.diagnosis.feeds import ArmSource
from palm_jax.diagnosis.texts import FAR, Reference, TextScores
from palm_jax.spikes import robust
from palm_jax.step import Program, TrainState

MOST_SEQUENCES = 512  # of the window, from the onset on; and as many of the reference
MOST_SHOWN = 8
EXCERPT = 160  # characters
GRADIENT_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A sequence of the window beside those of other data."""

    step: int
    row: int  # of the step's batch
    sequence: int
    loss: float  # nats per target, at the fork
    gradient_norm: float | None  # of its own mean loss; None: not measured on several devices
    text: TextScores
    unusual: dict[str, float]  # sigmas of what stands out
    sources: tuple[str, ...]  # documents with places in them
    excerpt: str


@dataclasses.dataclass(frozen=True)
class StepGradient:
    """Of a step's whole batch, at the fork's parameters."""

    step: int
    norm: float
    cosine: float | None  # with the gradient of the step before; None: the first one
    # Fourth over squared second moment of g / sqrt(v), all elements: 3 if normally distributed,
    # far more where few elements of v are stale. Of g, where the rule has no v of every element.
    kurtosis: float


@dataclasses.dataclass(frozen=True)
class Forensics:
    window_loss: float  # median over sequences, nats per target
    reference_loss: float
    window_gradient_norm: float | None
    reference_gradient_norm: float | None
    suspects: tuple[Suspect, ...]  # the most unusual first
    num_unusual: int
    gradients: tuple[StepGradient, ...]  # of steps around the onset


def examine(lab: Laboratory) -> Forensics:
    """Raises WrongInput if there is no fork state yet."""
    plan, course = lab.plan, lab.course
    a, c = plan.arm("A1"), plan.arm("C0")
    assert a is not None
    assert c is not None
    state, _ = lab.state_of(a)
    program = course.program_at(plan.fork)
    first = plan.onset
    places, ids = _window(lab, a, first, plan.window_stop)
    others = _ids(lab, c, plan)[: len(ids)]
    rows, other_rows = course.corpus.read("train", ids), course.corpus.read("train", others)
    losses = _losses(program, state.params, rows)
    other_losses = _losses(program, state.params, other_rows)
    norms = _gradient_norms(program, state.params, rows, course.corpus.manifest.end_of_document)
    other_norms = _gradient_norms(
        program, state.params, other_rows, course.corpus.manifest.end_of_document
    )
    reference = Reference(other_rows, program.settings.model.vocabulary_size)
    usual_loss = robust.usual(other_losses)
    usual_norm = None if other_norms is None else robust.usual(other_norms)
    suspects = []
    for number, (step, row) in enumerate(places):
        text = reference.scores(rows[number])
        unusual = reference.unusual(text)
        unusual |= _off("loss", losses[number], usual_loss)
        if norms is not None and usual_norm is not None:
            unusual |= _off("gradient_norm", norms[number], usual_norm)
        if unusual:
            suspects.append(
                (
                    max(abs(s) for s in unusual.values()),
                    Suspect(
                        step=step,
                        row=row,
                        sequence=int(ids[number]),
                        loss=losses[number],
                        gradient_norm=None if norms is None else norms[number],
                        text=text,
                        unusual=unusual,
                        sources=_sources(course.corpus, int(ids[number])),
                        excerpt=_excerpt(course.corpus, rows[number]),
                    ),
                )
            )
    suspects.sort(key=lambda pair: (-pair[0], pair[1].step, pair[1].row))
    return Forensics(
        window_loss=robust.median(losses),
        reference_loss=robust.median(other_losses),
        window_gradient_norm=None if norms is None else robust.median(norms),
        reference_gradient_norm=None if other_norms is None else robust.median(other_norms),
        suspects=tuple(suspect for _, suspect in suspects[:MOST_SHOWN]),
        num_unusual=len(suspects),
        gradients=_step_gradients(lab, state),
    )


def _window(
    lab: Laboratory, arm: Any, start: int, stop: int
) -> tuple[list[tuple[int, int]], npt.NDArray[np.int64]]:
    """(step, row) and ids of the sequences of steps [start, stop), MOST_SEQUENCES at most."""
    source = _source(lab, arm)
    places: list[tuple[int, int]] = []
    ids: list[int] = []
    for step in range(start, stop):
        _, batch = source.ids(step)
        places += [(step, row) for row in range(len(batch))]
        ids += batch.tolist()
    return places[:MOST_SEQUENCES], np.array(ids[:MOST_SEQUENCES], np.int64)


def _ids(lab: Laboratory, arm: Any, plan: Plan) -> npt.NDArray[np.int64]:
    source = _source(lab, arm)
    return np.concatenate([source.ids(s)[1] for s in range(plan.fork, plan.window_stop)])


def _source(lab: Laboratory, arm: Any) -> ArmSource:
    course = lab.course
    rows = course.program_at(lab.plan.fork).rows_here
    return ArmSource(course.corpus, course.base, course.segment, lab.plan, arm, rows)


def _losses(program: Program, params: Any, rows: npt.NDArray[np.int32]) -> list[float]:
    """Nats per target of each sequence."""
    numerics = program.settings.numerics
    size = numerics.lanes * numerics.microbatch
    found: list[float] = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        counted = np.arange(size) < len(part)
        tokens = np.zeros((size, rows.shape[1]), np.int32)
        tokens[: len(part)] = part
        here = program.rows_here(size)
        sums = program.losses(params, program.put(tokens[here]), program.put(counted[here]))
        nats = np.asarray(sums.cross_entropy, np.float64).reshape(-1)[: len(part)]
        found += (nats / program.settings.model.sequence_length).tolist()
    return found


def _gradient_norms(
    program: Program, params: Any, rows: npt.NDArray[np.int32], end_of_document: int
) -> list[float] | None:
    """Of each sequence's mean loss; None where several devices sum their sequences."""
    settings = program.settings
    if settings.mesh.data_parallel != 1 or settings.precision.policy == "float8":
        return None
    layout = jax.tree.map(lambda x: x.sharding.spec, params)
    alone = config.override(
        settings,
        [
            *("numerics.lanes=1", "numerics.microbatch=1", "data.ramp={sizes: [1]}"),
            *("log.vitals=basic", "log.microbatch_digests=false"),
        ],
    )

    def norm(params: Any, tokens: jax.Array) -> jax.Array:
        summed = stepping.gradients(params, tokens, alone, end_of_document)
        matrices = reductions.MatrixReductions(reductions.order_of(alone.numerics), 0)
        squares = matrices.sums_of_squares(summed.gradient)
        return reductions.norm_of(squares) / summed.sums.targets.astype(jnp.float32)

    mapped = jax.jit(
        jax.shard_map(
            norm,
            mesh=program.mesh,
            in_specs=(layout, PartitionSpec(None, sharding.DATA_PARALLEL)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    asked = [mapped(wide, jnp.asarray(row)[None, None, None, :]) for row in rows]
    return [float(x) for x in jax.device_get(asked)]


def _off(name: str, value: float, usual: robust.Usual) -> dict[str, float]:
    sigma = max(usual.sigma, 1e-3 * abs(usual.level))
    sigmas = (value - usual.level) / sigma if math.isfinite(value) else math.inf
    return {name: sigmas} if abs(sigmas) > FAR else {}


def _step_gradients(lab: Laboratory, state: TrainState) -> tuple[StepGradient, ...]:
    """Of GRADIENT_STEPS steps before the onset, and as many from there on."""
    plan, course = lab.plan, lab.course
    program = course.program_at(plan.fork)
    if program.settings.precision.policy == "float8":
        return ()  # its products need scales that belong to a step
    mean = _mean_gradient(program, course.corpus.manifest.end_of_document)
    arm = plan.arm("A1")
    assert arm is not None
    source = _source(lab, arm)
    v = _second_moments(state.optimizer, state.params)
    first = max(plan.fork, plan.onset - GRADIENT_STEPS)
    last = min(plan.stop, plan.onset + GRADIENT_STEPS)
    found: list[StepGradient] = []
    before = None
    for step in range(first, last):
        tokens = program.put(source[step].tokens)
        gradient = mean(state.params, tokens, jnp.int32(step))
        norm, cosine, kurtosis = jax.device_get(
            _moments(gradient, gradient if before is None else before, v)
        )
        found.append(
            StepGradient(
                step, float(norm), None if before is None else float(cosine), float(kurtosis)
            )
        )
        before = gradient
    return tuple(found)


def _mean_gradient(program: Program, end_of_document: int) -> Callable[..., Any]:
    """(params, tokens, data step) -> the gradient of the mean loss, in the parameters' layout."""
    settings = program.settings
    layout = jax.tree.map(lambda x: x.sharding.spec, program.state_shapes.params)

    def mean(params: Any, tokens: jax.Array, data_step: jax.Array) -> Any:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        summed = stepping.gradients(params, tokens, settings, end_of_document, data_step)
        per_target = 1.0 / summed.sums.targets.astype(jnp.float32)
        return jax.tree.map(lambda g: g * per_target, summed.gradient)

    return jax.jit(
        jax.shard_map(
            mean,
            mesh=program.mesh,
            in_specs=(layout, PartitionSpec(None, sharding.DATA_PARALLEL), PartitionSpec()),
            out_specs=layout,
            check_vma=False,
        )
    )


def _second_moments(optimizer: Any, params: Any) -> list[jax.Array]:
    """v of Adafactor, or nu of AdamW, leaf by leaf as the parameters; else ones.

    Where not every element has a second moment, the gradient is looked at as it is.
    """
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer)
        if any(getattr(part, "name", None) in ("v", "nu") for part in path)
    ]
    shapes = [p.shape for p in jax.tree.leaves(params)]
    if [v.shape for v in found] != shapes:
        return [jnp.ones(shape, jnp.float32) for shape in shapes]
    return found


@jax.jit
def _moments(
    gradient: Any, before: Any, v: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm, cosine with the gradient before, kurtosis of g / sqrt(v). For a person to read: in
    whatever order XLA adds."""

    def dot(one: Any, other: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return sum((jnp.sum(a * b) for a, b in pairs), jnp.float32(0))

    scaled = [
        # What never had a gradient has no scale.
        jnp.where(w > 0, g * jax.lax.rsqrt(jnp.maximum(w.astype(jnp.float32), 1e-30)), 0.0)
        for g, w in zip(jax.tree.leaves(gradient), v, strict=True)
    ]
    size = sum(x.size for x in scaled)
    squares = [x * x for x in scaled]
    second, fourth = sum(jnp.sum(s) for s in squares) / size, dot(squares, squares) / size
    norm = jnp.sqrt(dot(gradient, gradient))
    cosine = dot(gradient, before) / (norm * jnp.sqrt(dot(before, before)))
    return norm, cosine, fourth / second**2


def _sources(corpus: Any, sequence: int) -> tuple[str, ...]:
    if not isinstance(corpus, Corpus | Corpora):  # a bundle's rows do not say where they come from
        return ()
    spans = corpus.documents("train", sequence)
    return tuple(f"{span.name} [{span.start}:{span.stop}]" for span in spans)


def _excerpt(corpus: Any, tokens: npt.NDArray[np.int32]) -> str:
    if not isinstance(corpus, Corpus | Corpora):
        return " ".join(map(str, tokens[: EXCERPT // 4].tolist()))
    text = corpus.decode(tokens)[:EXCERPT]
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
