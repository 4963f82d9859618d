"""The suspect data at the fork: which sequences stand out, by loss, by gradient and as text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from palm_jax import config, reductions, sharding
from palm_jax import step as stepping
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis.arms import Plan
from palm_jax.diagnosis.experiment import Laboratory
from palm_jax.diagnosis.feeds import ArmSource
from palm_jax.diagnosis.texts import FAR, Reference, TextScores
from palm_jax.spikes import robust
from palm_jax.step import Program

MOST_SEQUENCES = 512  # of the window, from the onset on; and as many of the reference
MOST_SHOWN = 8
EXCERPT = 160  # characters


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
class Forensics:
    window_loss: float  # median over sequences, nats per target
    reference_loss: float
    window_gradient_norm: float | None
    reference_gradient_norm: float | None
    suspects: tuple[Suspect, ...]  # the most unusual first
    num_unusual: int


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


def _sources(corpus: Any, sequence: int) -> tuple[str, ...]:
    if not isinstance(corpus, Corpus):  # a bundle's rows do not say where they come from
        return ()
    spans = corpus.documents("train", sequence)
    return tuple(f"{span.name} [{span.start}:{span.stop}]" for span in spans)


def _excerpt(corpus: Any, tokens: npt.NDArray[np.int32]) -> str:
    if not isinstance(corpus, Corpus):
        return " ".join(map(str, tokens[: EXCERPT // 4].tolist()))
    text = corpus.decode(tokens)[:EXCERPT]
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
