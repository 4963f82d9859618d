"""`palm-jax doctor`."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import textwrap
from typing import Annotated

import typer

from palm_jax import config
from palm_jax.cli.terms import AsJson, Overrides, print_json
from palm_jax.errors import CannotDo, WrongInput


def doctor(
    config_file: Annotated[
        pathlib.Path | None, typer.Argument(metavar="[CONFIG]", help="What is to be trained.")
    ] = None,
    overrides: Overrides = None,
    # Text: as a path, gs://bucket would lose a slash.
    run: Annotated[
        str | None, typer.Option(help="The run's folder; the default is the working directory.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for devices, disks and the corpus.")
    ] = 120,
    as_json: AsJson = False,
) -> None:
    """Look over this machine, and say how to mend what would keep it from training CONFIG.

    On a slice of several hosts, run it on all of them at the same time.
    Exit code 0: nothing is wrong, though there may be warnings; 3: something is.
    """
    from palm_jax import doctor as examination

    if config_file is not None and "=" in str(config_file) and not config_file.exists():
        raise WrongInput(f"{config_file}: name a config file before settings to override")
    settings = None if config_file is None else config.load(config_file, overrides or ())
    findings = examination.examine(settings, run, timeout)
    is_wrong = examination.is_wrong(findings)
    if as_json:
        print_json({"ok": not is_wrong, "findings": [dataclasses.asdict(f) for f in findings]})
    else:
        _print_findings(findings)
    if is_wrong:
        raise typer.Exit(CannotDo.exit_code)


def _print_findings(findings: list) -> None:
    width = max(len(finding.check) for finding in findings)
    columns = max(shutil.get_terminal_size((100, 24)).columns, width + 40)
    indent = " " * (len("warning  ") + width + 2)
    for finding in findings:
        lines = textwrap.wrap(finding.found, columns - len(indent), break_on_hyphens=False)
        print(f"{finding.status:7}  {finding.check:{width}}  {lines[0] if lines else ''}")
        for line in lines[1:]:
            print(indent + line)
        for line in textwrap.wrap(f"-> {finding.remedy}", columns - len(indent)):
            if finding.remedy:
                print(indent + line)
    counts = [sum(f.status == status for f in findings) for status in ("warning", "wrong")]
    print(f"{counts[1]} wrong, {counts[0]} warnings")
