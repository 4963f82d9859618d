"""`palm-jax lab noise-scale`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer

from palm_jax.cli.plan.showing import show
from palm_jax.cli.terms import AsJson, Run, check_is_run, moved, prepare_jax
from palm_jax.errors import WrongInput
from palm_jax.plan.answer import Answer, Table, number

FAR = 3.0  # a batch that many times above or below the noise scale is told to be far from it


def noise_scale(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Before which step, once or more; default: each checkpoint."),
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, max=10_000, help="Of the run's batches to read at each step.")
    ] = 8,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How noisy RUN's gradient is, and whether its batches are too small or too large for it."""
    check_is_run(run)
    from palm_jax.record import folder, inventory

    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "measured")
    number_of_segment = there.last_segment() if segment is None else segment
    steps = step or inventory.steps(there.checkpoints(number_of_segment))
    if not steps:
        raise WrongInput(f"{run} has no checkpoint in segment {number_of_segment}; give --step")
    prepare_jax(settings)

    from palm_jax.lab import noise
    from palm_jax.replay import bundles

    found = []
    with bundles.open_rows(there, settings) as corpus:
        for one in steps:

            def tell(done: int, total: int, one: int = one) -> None:
                if sys.stderr.isatty():
                    end = "\n" if done == total else ""
                    print(f"\rstep {one}: block {done} of {total}", end=end, file=sys.stderr)

            found.append(
                noise.measure(there, corpus, settings, one, batches, number_of_segment, tell)
            )
    length = settings.model.sequence_length
    figures: dict[str, Any] = {
        "run": str(run),
        "segment": number_of_segment,
        "steps": [
            {
                **dataclasses.asdict(one),
                "noise_scale_tokens": None if one.noise_scale is None else one.noise_scale * length,
            }
            for one in found
        ],
    }
    rows = tuple(
        (
            f"{one.step:,}",
            f"{one.batch:,}",
            "-" if one.noise_scale is None else f"{one.noise_scale:,.0f}",
            "-" if one.standard_error is None else f"{one.standard_error:,.0f}",
            "-" if one.noise_scale is None else number(one.noise_scale * length),
            _verdict(one.batch, one.noise_scale),
        )
        for one in found
    )
    headings = ("step", "batch", "noise scale", "+-", "in tokens", "")
    assumed = (
        f"gradients of blocks of {found[0].small_batch} sequences, {found[0].small_batches} at a "
        "state, in float32; batches and noise scale in sequences (McCandlish et al., 2018)",
        "+- is one standard error, by leaving out one block at a time",
        "with a batch of the noise scale, a run needs twice the least steps, and twice the least "
        "tokens",
    )
    show(Answer(f"{run}: gradient noise", figures, (Table("", headings, rows),), assumed), as_json)


def _verdict(batch: int, noise: float | None) -> str:
    if noise is None:
        return "no gradient is left in the noise: more --batches"
    if batch * FAR < noise:
        return "a larger batch would save steps"
    return "a smaller batch would save tokens" if batch > FAR * noise else "about right"
