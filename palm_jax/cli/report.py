"""`palm-jax report`: a run on one page."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from palm_jax.cli.terms import AsJson, Run, check_is_run, in_bytes, print_json


def report(
    run: Run,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Default: RUN/reports/report.html."),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of RUN: one HTML file with its curves, its chronicle and its settings.

    The file opens from disk and fetches nothing.
    """
    check_is_run(run)
    from palm_jax import report as reports

    path, numbers = reports.write(run, out, segment)
    size = path.stat().st_size
    if as_json:
        print_json({"report": str(path), "bytes": size, **numbers, "run": str(run)})
    else:
        steps, status = numbers["steps"], numbers["status"]
        print(f"{path}: {steps:,} steps, {status}; {in_bytes(size)}")
