"""`palm-jax serve`: a page on this machine on which a run's model is tried."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from palm_jax.cli.terms import AsJson, Run, check_is_run, moved, prepare_jax, print_json


def serve(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any that is free.")
    ] = 8000,
    step: Annotated[
        int | None, typer.Option(min=0, help="Before which step; the default: newest checkpoint.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A page on which prompts are tried, with each token's probability; Ctrl-C ends it.

    It is for this machine alone, takes nothing from the network, and changes nothing in the run.
    """
    check_is_run(run)
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "used of the run")
    prepare_jax(settings)

    from palm_jax.use import decode, trained
    from palm_jax.use import serve as serving

    found = trained.load(there, settings, step, segment)
    tokenizer = found.tokenizer
    for reason in found.damaged:
        print(reason, file=sys.stderr)
    decoder = decode.make_decoder(found.settings, found.mesh, tokenizer.end_of_document, 1)
    weights = decoder.weights(found.params)
    with serving.server(decoder, weights, tokenizer, port) as server:
        where = f"http://{serving.ADDRESS}:{server.server_address[1]}"
        if as_json:
            print_json(
                {"run": str(run), "segment": found.segment, "step": found.step, "url": where}
            )
        else:
            print(f"{run} before step {found.step}: {where}")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
