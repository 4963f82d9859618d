"""A run that begins with the parameters of an exported model.

Its only segment begins at the step that the model had, with those parameters as a checkpoint. The
optimizer begins anew, with no moments and a count of 0, because an export has none; the rate goes
on from where its schedule was.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from palm_jax import config, sharding
from palm_jax.corpus import corpora
from palm_jax.corpus.joint import Contents
from palm_jax.errors import WrongInput
from palm_jax.record import digests, folder, logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.step import TrainState, make_program
from palm_jax.use.portable import Model


def create(
    model: Model,
    settings: config.Config,
    run: pathlib.Path,
    told: str,
) -> digests.Digest:
    """Make the folder of the run; returns the digest of its first state.

    Args:
      settings: the model's, perhaps with others that leave the parameters what they are.
      told: where the model is from, for the logbook.
    Raises:
      WrongInput: the folder exists, or the settings are of another model or tokenizer.
      CannotDo: it cannot be written.
    """
    step = model.origin.step
    contents = _contents(model, settings)
    state = _first_state(model, settings, contents.end_of_document)
    segment = segments.Segment(start_step=step, reason=f"imported from {told}")
    there = RunFolder(run.absolute())
    folder.create(there, settings, contents, segment)
    if model.tokenizer is not None:
        shutil.copyfile(model.tokenizer, there.path / model.tokenizer.name)
    with Checkpoints(there.checkpoints(0), settings.checkpoint) as saved:
        digest = saved.save(step, state, {"segment": 0}, None)
    with logbook.Logbook.open(there.path) as book:
        book.append("note", text=f"imported from {told}: parameters {model.origin.digest}")
        book.append("checkpoint", segment=0, step=step, state_digest=digest.whole)
    return digest


def _contents(model: Model, settings: config.Config) -> Contents:
    """The manifest of what the run is to read: the model's own corpus, or another one."""
    if model.settings.data.places == settings.data.places:
        return model.contents
    contents = corpora.contents(settings.data)
    for what, old, new in (
        ("tokenizer", model.contents.tokenizer.identity, contents.tokenizer.identity),
        ("sequence_length", model.contents.sequence_length, contents.sequence_length),
    ):
        if old != new:
            raise WrongInput(
                f"{settings.data.told} has {what}={new}, and the model was trained with {old}; "
                "prepare it again alike"
            )
    return contents


def _first_state(model: Model, settings: config.Config, end_of_document: int) -> Any:
    alone = settings.model_copy(
        update={
            "mesh": config.Mesh(emulated_devices=1),
            # The kernel of splash wants a TPU, and here nothing is attended to.
            "model": settings.model.model_copy(update={"attention": "xla"}),
        }
    )
    program = make_program(alone, sharding.make_mesh(alone.mesh), end_of_document)
    like = program.state_shapes.params
    wanted = {path: digests.describe(leaf) for path, leaf in digests.named_leaves(like).items()}
    there = {path: digests.describe(leaf) for path, leaf in model.weights.items()}
    for path in sorted(wanted.keys() | there.keys()):
        if wanted.get(path) != there.get(path):
            raise WrongInput(
                f"the settings want {path} as {wanted.get(path, 'nothing')}, and the model has it "
                f"as {there.get(path, 'nothing')}; leave model and precision as they are"
            )
    leaves = [
        jax.device_put(model.weights[path], leaf.sharding)
        for path, leaf in digests.named_leaves(like).items()
    ]
    params = jax.tree.unflatten(jax.tree.structure(like), leaves)
    fresh: TrainState = program.init()

    def counted(value: int) -> jax.Array:
        return jax.device_put(jnp.int32(value), fresh.step.sharding)

    return fresh.replace(  # type: ignore[attr-defined]
        step=counted(model.origin.step),
        schedule_step=counted(model.origin.schedule_step),
        params=params,
    )
