"""`palm-jax export` and `palm-jax import`."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from palm_jax import config
from palm_jax.cli.terms import (
    AsJson,
    Overrides,
    Run,
    check_is_run,
    in_bytes,
    moved,
    prepare_one_cpu,
    print_json,
)
from palm_jax.record import folder


class Format(enum.StrEnum):
    safetensors = "safetensors"
    hf = "hf"


def export(
    run: Run,
    out: Annotated[pathlib.Path, typer.Option(help="A new folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="data.corpus=DIR, where it lies now."),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="safetensors: palm_jax's own parameters; hf: as Hugging Face's transformers have "
            "them, where it has the same architecture."
        ),
    ] = Format.safetensors,
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint; the default is the newest.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint of RUN, its settings, tokenizer and a model card.

    Of the train state the parameters alone. Reads arrays one by one, on the CPU.
    """
    check_is_run(run)
    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "exported")
    prepare_one_cpu(settings)

    from palm_jax.report.read import read
    from palm_jax.use import card, hugging_face, portable

    model = portable.take(there, settings, step, segment)
    told = card.card(model, read(run, segment))
    if format is Format.hf:
        hugging_face.write(model, out, told)
    else:
        portable.write(model, out, told)
    size = sum(path.stat().st_size for path in out.iterdir())
    if as_json:
        print_json(
            {
                "run": str(run),
                "step": model.origin.step,
                "format": format.value,
                "out": str(out),
                "bytes": size,
                "digest": model.origin.digest,
            }
        )
    else:
        print(f"{out}: step {model.origin.step} of {run}, {in_bytes(size)}")
        print(f"parameters {model.origin.digest}")


def import_(
    model: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="What `palm-jax export` wrote.")
    ],
    run: Annotated[pathlib.Path, typer.Option(help="Folder of the run to make.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that begins with the parameters of an exported model, bit for bit.

    It begins at the step that the model had. `palm-jax train RUN/config.yaml --run RUN steps=...`
    trains it on, with an optimizer that begins anew; KEY=VALUE changes settings first, such as
    data.corpus=DIR for another corpus.
    """
    recorded = config.load(model / folder.CONFIG)
    settings = config.override(recorded, overrides or ())
    prepare_one_cpu(settings)

    from palm_jax.use import importing, portable

    found = portable.read(model)
    digest = importing.create(found, settings, run, model.name)
    if as_json:
        print_json(
            {
                "run": str(run),
                "step": found.origin.step,
                "digest": found.origin.digest,
                "state_digest": digest.whole,
            }
        )
    else:
        print(f"{run}: begins at step {found.origin.step} with parameters {found.origin.digest}")
