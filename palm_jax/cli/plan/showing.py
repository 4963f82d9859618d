"""How plans print: tables and what they rest on, or one JSON object."""

from __future__ import annotations

import math
import sys

from palm_jax.cli.terms import print_json
from palm_jax.errors import WrongInput
from palm_jax.plan.answer import Answer


def show(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json({**answer.figures, "assumptions": list(answer.assumptions)})
        return
    import rich.box
    import rich.console
    import rich.table

    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    print(answer.title)
    for one in answer.tables:
        if one.title:
            print(f"\n{one.title}")
        table = rich.table.Table(
            box=rich.box.SIMPLE,
            pad_edge=False,
            show_header=any(one.headings),
        )
        for place, heading in enumerate(one.headings):
            # What stands first names the row; numbers end where numbers end.
            table.add_column(heading, justify="left" if place == 0 else "right")
        for row in one.rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)
    for heading, lines in (
        ("Hypotheses, of what may explain the ratio:", answer.hypotheses),
        ("Assumed:", answer.assumptions),
    ):
        if lines:
            print(heading)
        for line in lines:
            print(f"- {line}")


def positive(option: str, value: float | None) -> float | None:
    """The value, if it is one that can be; None is none."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise WrongInput(f"{option} {value:g}: it must be finite and above 0")
    return value


def needed(option: str, value: float | None, why: str) -> float:
    found = positive(option, value)
    if found is None:
        raise WrongInput(f"{option} is missing: {why}")
    return found
