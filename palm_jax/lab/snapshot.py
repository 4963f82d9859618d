"""One moment of a run: its weights, the gradient of a step's batch, and the step's update."""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from palm_jax import config, sharding
from palm_jax import step as stepping
from palm_jax.course import Course
from palm_jax.errors import WrongInput
from palm_jax.record import digests, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay import states


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """NumPy arrays, float32, by path such as `layers/w_gate_DF`."""

    segment: int
    step: int
    policy: str
    loss_scale: float | None
    weights: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]  # of the mean loss, computed in float32
    update: dict[str, np.ndarray] | None  # what the step added; None: it was skipped


def take(
    run: RunFolder,
    corpus: Any,
    settings: config.Config,
    step: int | None = None,
    segment: int | None = None,
) -> Snapshot:
    """The moment before `step`, by default at the segment's newest checkpoint.

    Args:
      corpus: what the run was trained on.
      settings: the run's, perhaps on another mesh.
    Raises:
      WrongInput: the step lies before the segment or after the run's steps.
    """
    number = run.last_segment() if segment is None else segment
    course = Course(
        settings, segments.read(run.segment(number)), corpus, sharding.make_mesh(settings.mesh)
    )
    if step is None:
        with Checkpoints(run.checkpoints(number), settings.checkpoint) as saved:
            newest = saved.latest()
        step = course.segment.start_step if newest is None else newest
    if step > settings.steps:
        raise WrongInput(f"--step {step}: {run.path} has {settings.steps} steps")
    state = states.state_before(run, course, step).state
    with course.batches(step, step + 1) as batches:
        ((_, batch),) = batches
    program = course.program_at(step)
    tokens = program.put(batch.tokens)
    before = _on_host(state.params)
    scale = None if state.loss_scale is None else float(state.loss_scale.scale)
    end = corpus.manifest.end_of_document
    gradient = mean_gradient(program, state.params, end)(tokens)
    after, vitals = program.step(state, tokens, stepping.controls())
    changed = _on_host(after.params)
    applied = bool(vitals["applied"])
    return Snapshot(
        segment=number,
        step=step,
        policy=program.settings.precision.policy,
        loss_scale=scale,
        weights=before,
        gradient=gradient,
        update={name: changed[name] - w for name, w in before.items()} if applied else None,
    )


def _on_host(tree: Any) -> dict[str, np.ndarray]:
    leaves = digests.named_leaves(jax.device_get(tree))
    return {name: np.asarray(leaf, np.float32) for name, leaf in leaves.items()}


def mean_gradient(
    program: stepping.Program, params: Any, end_of_document: int
) -> collections.abc.Callable[[jax.Array], dict[str, np.ndarray]]:
    """A function of a batch's tokens: the gradient of their mean loss, in float32.

    Whatever the program's policy. Batches of one size share its compilation.
    """
    exact = program.settings.model_copy(update={"precision": config.Precision()})
    layout = jax.tree.map(lambda x: x.sharding.spec, params)

    def mean(params: Any, tokens: jax.Array) -> Any:
        summed = stepping.gradients(params, tokens, exact, end_of_document)
        per_target = 1.0 / summed.sums.targets.astype(jnp.float32)
        return jax.tree.map(lambda g: g * per_target, summed.gradient)

    mapped = jax.jit(
        jax.shard_map(
            mean,
            mesh=program.mesh,
            in_specs=(layout, PartitionSpec(None, sharding.DATA_PARALLEL)),
            out_specs=layout,
            check_vma=False,
        )
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return lambda tokens: _on_host(mapped(wide, tokens))
