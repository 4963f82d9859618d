"""`palm-jax logbook`: what a run did, as a person would have written it down."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from palm_jax.cli.terms import AsJson, check_is_run, print_json
from palm_jax.errors import WrongInput


def logbook(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RUN | note RUN TEXT", help="What to read, or what to add."),
    ],
    as_json: AsJson = False,
) -> None:
    """The chronicle of RUN in Markdown: when, what was seen, what was done, what it cost.

    `logbook note RUN TEXT` adds a person's words to it.
    """
    from palm_jax.record import chronicle

    if words[0] == "note":
        if len(words) != 3:
            raise WrongInput("logbook note takes a run and one text, in quotes")
        run, text = pathlib.Path(words[1]), words[2]
        check_is_run(run)
        chronicle.note(run, text)
        if as_json:
            print_json({"run": str(run), "text": text})
        else:
            print(f"noted in {run}")
        return
    if len(words) != 1:
        raise WrongInput(f"logbook takes one run, not {len(words)}")
    run = pathlib.Path(words[0])
    check_is_run(run)
    if as_json:
        print_json({"run": str(run), **chronicle.summary(run)})
    else:
        print(chronicle.render(run), end="")
