"""The report as one HTML page, which fetches nothing: figures' script, data and style are in it.

Whatever comes from the run is escaped. Should that ever fail, the page's own policy still lets
no other script run and nothing be fetched: browsers enforce it.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import hashlib
import html
import importlib.resources
import itertools
import json
import math
from typing import Any

import markdown_it
import plotly.offline

from palm_jax import config, stream
from palm_jax.record.chronicle import values, words
from palm_jax.record.chronicle.stretches import Entry
from palm_jax.record.segments import Segment
from palm_jax.report import diagnoses
from palm_jax.report.diagnoses import Diagnosed
from palm_jax.report.figures import Panel
from palm_jax.report.headline import short
from palm_jax.report.read import Branch

# The page's own text is Markdown's; HTML in it is shown, not obeyed.
_MARKDOWN = markdown_it.MarkdownIt("commonmark", {"html": False})


@dataclasses.dataclass(frozen=True)
class Content:
    """All that a page shows."""

    headline: dict[str, Any]
    panels: list[Panel]
    marks: list[dict[str, Any]]  # as from figures.marks
    constant: dict[str, float]  # series that never change
    entries: list[Entry]  # of the chronicle
    totals: dict[str, Any]  # the numbers under it
    segments: dict[int, Segment]
    branches: list[Branch]
    diagnosed: list[Diagnosed]
    environment: dict[str, Any]
    settings: config.Config


def render(content: Content) -> str:
    """The page's text."""
    plotly_script = plotly.offline.get_plotlyjs()
    script, style = _file("page.js"), _file("page.css")
    head = content.headline
    first, stop = head["first_step"] or 0, head["next_step"] or 1
    data = {
        "name": head["run"],
        "steps": [first, max(first, stop - 1)],
        "panels": content.panels,
        "marks": content.marks,
    }
    policy = (
        f"default-src 'none'; script-src {_hash(plotly_script)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(head['run'])}: training report</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            _header(head),
            "<main>",
            _diagnoses(content.diagnosed),
            _tools(content, first, max(first, stop - 1)),
            *_groups(content.panels),
            _constant(content.constant),
            _chronicle(content.entries, content.totals),
            _segments(content.segments, head["segment"]),
            _branches(content.branches),
            _section("Environment of the last start", _pairs(content.environment)),
            _section("Settings", f"<pre>{_text(config.to_yaml(content.settings))}</pre>"),
            "</main>",
            "<footer>Made by palm-jax report from the run's logbook.</footer>",
            f'<script type="application/json" id="report-data">{_json(data)}</script>',
            f"<script>{plotly_script}</script>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


# --- above the figures ---


def _header(head: dict[str, Any]) -> str:
    incidents, still_open = head["incidents"], head["open_incidents"]
    told = "no incidents" if not incidents else words.count(incidents, "incident")
    if still_open:
        told += f', <span class="bad">{still_open:,} not closed</span>'
    lines = [_text(head["status"]), told]
    if head["non_finite_losses"]:
        times = words.count(head["non_finite_losses"], "loss")
        lines.append(f'<span class="bad">{times.replace("losss", "losses")} not finite</span>')
    if head["skipped_updates"]:
        lines.append(f"{words.count(head['skipped_updates'], 'update')} skipped")
    held_out = head["evaluated_at_step"]
    more = head["attempts"] - head["steps"]
    planned = f"of {head['steps_planned']:,} planned"
    planned += f"; {more:,} more were redone or left behind" if more > 0 else ""
    cells = [
        ("parameters", short(head["parameters"]), _exact(head["parameters"])),
        ("tokens trained", _short(head["tokens"]), _exact(head["tokens"])),
        ("steps", _exact(head["steps"]), planned),
        ("final loss", _number(head["loss"]), "nats a token, training"),
        (
            "held-out bits per byte",
            _number(head["bits_per_byte"]),
            "" if held_out is None else f"at step {held_out}",
        ),
        ("held-out loss", _number(head["held_out_loss"]), "nats a token"),
        ("tokens a second", _short(head["tokens_per_second"]), "median"),
    ]
    if head["model_flops_utilisation"] is not None:
        share = f"{head['model_flops_utilisation']:.1%}"
        cells.append(("model FLOPs utilisation", share, "median"))
    cells.append(("time training", words.duration(head["training_seconds"]), "all attempts"))
    rows = []
    for name, value, below in cells:
        small = "" if below == value else f"<small>{_text(below)}</small>"
        rows.append(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}{small}</dd></div>")
    if head["state_digest"] is not None:
        rows.append(
            f'<div><dt>state digest</dt><dd class="text"><code>{_text(head["state_digest"])}</code>'
            f"<small>state before step {head['state_digest_at_step']:,}</small></dd></div>"
        )
    return (
        f'<header><h1>{_text(head["run"])}</h1><p class="quiet">{" · ".join(lines)}</p>'
        f'<dl class="numbers">{"".join(rows)}</dl></header>'
    )


def _tools(content: Content, first: int, last: int) -> str:
    limits = f'type="number" min="{first}" max="{last}"'
    parts = [
        f'<label>steps <input id="from" {limits} value="{first}"></label>',
        f'<label>to <input id="to" {limits} value="{last}"></label>',
        '<button id="all-steps" type="button">all steps</button>',
        '<button id="all-linear" type="button">all linear</button>',
        '<button id="all-log" type="button">all logarithmic</button>',
    ]
    shown = (series["role"] for panel in content.panels for series in panel.get("series", ()))
    if "abandoned" in shown:
        parts.append(
            '<label><input id="abandoned" type="checkbox" autocomplete="off">'
            '<i class="swatch" style="border-top-color:#9aa3ad"></i>abandoned attempts</label>'
        )
    for kind in content.marks:
        parts.append(
            f'<label><input type="checkbox" checked autocomplete="off" data-kind="{kind["kind"]}">'
            f'<i class="swatch"></i>{_text(kind["name"])} ({len(kind["marks"]):,})</label>'
        )
    hint = "Point at a figure to read every one at that step; drag to zoom, double-click for all."
    return (
        f'<div class="tools"><div class="row">{"".join(parts)}</div>'
        f'<div id="here">{hint}</div></div>'
    )


def _groups(panels: list[Panel]) -> collections.abc.Iterator[str]:
    numbered = enumerate(panels)
    for group, members in itertools.groupby(numbered, key=lambda pair: str(pair[1]["group"])):
        figures = "".join(_figure(number, panel) for number, panel in members)
        yield _section(group, f'<div class="panels">{figures}</div>')


def _figure(number: int, panel: Panel) -> str:
    classes = " ".join(["panel", panel["kind"], *(["wide"] if panel["wide"] else [])])
    parts = [f'<span class="name">{_text(panel["title"])}</span>']
    if panel["unit"]:
        parts.append(f'<span class="unit">{_text(panel["unit"])}</span>')
    parts.append('<button class="log" type="button" aria-pressed="false">log</button>')
    for series in panel.get("series", ()):
        if series["role"] == "held_out" and len(panel["series"]) > 1:
            parts.append(
                '<span class="key"><i class="swatch" style="border-top-color:#e69f00"></i>'
                f"{_text(series['name'])}</span>"
            )
    if panel["num_bad"]:
        parts.append(f'<span class="bad">✖ {panel["num_bad"]:,} not finite</span>')
    parts.append('<span class="value"></span>')
    return (
        f'<figure class="{classes}" id="panel-{number}"><figcaption>{"".join(parts)}</figcaption>'
        '<div class="plot"></div></figure>'
    )


# --- below them ---


def _constant(constant: dict[str, float]) -> str:
    if not constant:
        return ""
    return _section(
        "The same at every step",
        _pairs({name.replace("_", " "): _number(value) for name, value in constant.items()}),
    )


def _chronicle(entries: list[Entry], totals: dict[str, Any]) -> str:
    told = []
    for entry in entries:
        lines = "\n".join(f"- {line}" for line in entry.lines)
        told.append(f"<h3>{_MARKDOWN.renderInline(entry.title)}</h3>")
        told += [_MARKDOWN.render(block) for block in (lines, entry.below) if block]
    numbers = {
        name.replace("_", " "): words.duration(value) if name.endswith("seconds") else value
        for name, value in totals.items()
        if value not in (0, 0.0, [])
    }
    return _section("Chronicle", f'<div class="chronicle">{"".join(told)}</div>{_pairs(numbers)}')


def _diagnoses(diagnosed: list[Diagnosed]) -> str:
    return "".join(_diagnosis(one) for one in diagnosed)


def _diagnosis(one: Diagnosed) -> str:
    verdict, advice = one.verdict, one.verdict["recommendation"]
    votes = [
        [kind, diagnoses.KINDS[kind][1], f"{v['spiked']} of {v['of']}", _percent(v["interval"])]
        for kind, v in verdict["votes"].items()
    ]
    parts = [
        f"<p><strong>{_text(verdict['verdict'])}</strong>: {_text(verdict['because'])}</p>",
        f'<div class="figure">{diagnoses.picture(one)}</div>',
        "<p>Loss on fixed held-out sequences after each step, nats; the line is the onset.</p>",
        _table(["arm", "what", "spiked", "95% interval"], votes) if votes else "",
    ]
    if verdict["first_vitals"]:
        first = [
            f"{d['vital']} at step {d['step']}, {d['before_loss']} steps before the loss"
            for d in verdict["first_vitals"]
        ]
        parts.append(f"<p>Left their range first: {_text(_lines(first))}</p>")
    if (found := verdict["forensics"]) is not None and found["suspects"]:
        rows = [
            [
                f"step {s['step']}, row {s['row']}",
                ", ".join(f"{name} {float(x):+.0f} sigma" for name, x in s["unusual"].items()),
                _lines(s["sources"]),
                s["excerpt"],
            ]
            for s in found["suspects"]
        ]
        parts.append(_table(["sequence", "unusual", "from", "text"], rows))
    commands = "\n".join(advice["commands"])
    parts.append(f"<p>Recommended: {_text(advice['treatment'])} ({_text(advice['why'])})</p>")
    if commands:
        parts.append(f"<pre>{_text(commands)}</pre>")
    return _section(f"Diagnosis of the spike at step {verdict['onset']:,}", "".join(parts))


def _percent(interval: list[float]) -> str:
    return f"{interval[0]:.0%} to {interval[1]:.0%}"


def _segments(segments: dict[int, Segment], shown: int) -> str:
    rows = []
    for number, segment in segments.items():
        parent = "" if segment.parent is None else _departure(segment)
        changes = [f"{k} = {v} from step {i.at}" for i in segment.interventions
                   for k, v in i.changes.items()]  # fmt: skip
        left_out = [stream.told(exclusion) for exclusion in segment.exclusions]
        name = f"{number}{', shown here' if number == shown else ''}"
        rows.append(
            [name, parent, segment.start_step, segment.reason, _lines(changes), _lines(left_out)]
        )
    titles = ["segment", "departs from", "first step", "reason", "in force", "left out"]
    return _section("Segments", _table(titles, rows))


def _branches(branches: list[Branch]) -> str:
    if not branches:
        return ""
    rows = []
    for branch in branches:
        parent = _departure(branch.segment)
        last = "" if branch.last_step is None else branch.last_step
        loss = "" if branch.last_loss is None else _number(branch.last_loss)
        rows.append([branch.name, parent, branch.segment.reason, branch.steps, last, loss])
    titles = ["branch", "departs from", "reason", "steps", "last step", "its loss"]
    return _section("Branches", _table(titles, rows))


def _departure(segment: Segment) -> str:
    if segment.parent is None:
        return ""
    return f"segment {segment.parent.segment}, before step {segment.parent.step}"


def _lines(texts: list[str]) -> str:
    more = len(texts) - 20
    return "; ".join(texts[:20]) + (f" and {more:,} more" if more > 0 else "")


def _table(titles: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if values.is_whole(value):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{_text(value)}</td>"


def _pairs(found: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        if values.is_whole(value):
            return f"{value:,}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    rows = "".join(
        f"<tr><th>{_text(key)}</th><td>{_text(shown(value))}</td></tr>"
        for key, value in found.items()
    )
    return f'<div class="columns"><table>{rows}</table></div>' if rows else "<p>none recorded</p>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


# --- words ---


def _text(value: Any) -> str:
    """As text of HTML, or as an attribute's; halves of surrogate pairs cannot be written."""
    return html.escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.5g}" if math.isfinite(value) else str(value)


def _short(value: float | None) -> str:
    return "unknown" if value is None else short(value)


def _exact(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _json(value: Any) -> str:
    """Strict JSON that no part of ends the script element it stands in, or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _file(name: str) -> str:
    return importlib.resources.files("palm_jax.report").joinpath(name).read_text(encoding="utf-8")
