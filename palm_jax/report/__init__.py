"""The report of a run: one HTML file that opens from disk, with no network.

  read.py      one pass over the logbook, and the run's small files
  series.py    numbers over steps, each step once; fewer points that still show them
  marks.py     what happened at which step
  headline.py  the numbers above the figures
  figures.py   what each panel shows, as data
  page.py      the HTML around it; page.js draws, page.css is how it looks

Only read.py and this file touch files.
"""

from __future__ import annotations

import os
import pathlib
import secrets
from typing import Any

import numpy as np

from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder
from palm_jax.report import figures, marks, page
from palm_jax.report.headline import headline
from palm_jax.report.read import Reading, read

FILE_NAME = pathlib.Path("reports", "report.html")


def write(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    segment: int | None = None,
) -> tuple[pathlib.Path, dict[str, Any]]:
    """Write the report of a run; an earlier one is replaced as a whole.

    Args:
      out: the file; the default is RUN/reports/report.html.
      segment: show the history that ends in this segment; the default is the present one.
    Returns:
      where it is, and the numbers above its figures.
    Raises:
      WrongInput: the folder is no run, it has no such segment, or `out` is a folder.
      CannotDo: the run is damaged, or the disk does not take the file.
    """
    path = pathlib.Path(run_dir) / FILE_NAME if out is None else pathlib.Path(out)
    if path.is_dir():
        raise WrongInput(f"--out {path} is a folder; name the file")
    reading = read(run_dir, segment)
    if out is None:
        folder.check_own(run_dir)
    numbers = headline(reading)
    text = page.render(content(reading, numbers))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise CannotDo(f"cannot write the report {path}: {error.strerror}; name another") from error
    return path, numbers


# As in headline.py.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def content(reading: Reading, numbers: dict[str, Any]) -> page.Content:
    """What the page of a run shows; pure."""
    history = reading.history
    segment = reading.segments[reading.segment]
    found = [
        *marks.of_events(reading.events),
        *marks.of_exclusions(history, segment, reading.settings),
        *marks.of_history(history),
    ]
    keep = [mark.first for mark in found if mark.kind in ("incident", "rollback", "promotion")]
    panels, constant = figures.panels(history, reading.evaluations, keep)
    return page.Content(
        headline=numbers,
        panels=panels,
        marks=figures.marks(found),
        constant=constant,
        entries=reading.teller.entries,
        totals=reading.teller.summary(),
        segments=reading.segments,
        branches=reading.branches,
        diagnosed=reading.diagnosed,
        environment=reading.environment,
        settings=reading.settings,
    )
