"""A plan as one page of HTML that loads nothing."""

from __future__ import annotations

import html

from palm_jax.plan.answer import Answer, Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 54rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 0.4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 0.2rem 0.6rem; border-bottom: 1px solid #d8dee4;
  font-variant-numeric: tabular-nums; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
figure { margin: 1.6rem 0; }
svg { max-width: 100%; height: auto; }
li { margin: 0.2rem 0; }
"""


def render(answer: Answer) -> str:
    """Tables, pictures, and what they rest on."""
    title = html.escape(answer.title)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *map(_table, answer.tables),
        *(f"<figure>{picture}</figure>" for picture in answer.pictures),
        _list("Hypotheses, of what may explain the ratio", answer.hypotheses),
        _list("Assumed", answer.assumptions),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _list(title: str, lines: tuple[str, ...]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>{html.escape(title)}</h2><ul>{items}</ul>" if lines else ""


def _table(table: Table) -> str:
    heading = f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
    first = _row(table.headings, "th") if any(table.headings) else ""
    rows = "".join(_row(row, "td") for row in table.rows)
    return f"{heading}<table>{first}{rows}</table>"


def _row(cells: tuple[str, ...], tag: str) -> str:
    # Two blanks before a name say that it belongs to the row above.
    def cell(text: str) -> str:
        indent = "&emsp;" if text.startswith("  ") else ""
        return f"<{tag}>{indent}{html.escape(text.strip())}</{tag}>"

    return f"<tr>{''.join(map(cell, cells))}</tr>"
