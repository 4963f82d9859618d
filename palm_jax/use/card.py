"""The model card: what a run's own records say of the model, and what they do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from palm_jax import config
from palm_jax.corpus.manifest import Manifest
from palm_jax.plan import parameters
from palm_jax.report.read import Reading
from palm_jax.report.series import MEASURED
from palm_jax.use.portable import Model

# Sections of the config that say what was trained and how; others say where and when.
_RECIPE = ("model", "data.ramp", "optimizer", "schedule", "precision", "numerics")


def card(model: Model, reading: Reading) -> str:
    """The card in Markdown.

    Args:
      reading: of the model's run, its history ending in the model's segment.
    """
    step = model.origin.step
    blocks = [
        [
            f"# {reading.name}, step {step:,}",
            "",
            "A decoder-only language model of "
            f"{parameters.number(model.settings.model):,} parameters, trained with palm_jax. "
            "What follows is from the records of its run.",
        ],
        ["## Data", "", *_data(model), *_tokens(reading, step)],
        ["## Training", "", *_training(model, reading, step)],
        ["## Evaluation", "", *_evaluation(reading, step)],
        ["## Compute and energy", "", *_compute(reading, step)],
        ["## Recipe", "", "| setting | value |", "| --- | --- |", *_recipe(model.settings)],
        ["## Which bits", "", *_bits(model, reading)],
        [
            "## Not in the records",
            "",
            "Licence, intended use, limitations, and what is in the data beyond its sources: "
            "whoever passes the model on has to say.",
        ],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _data(model: Model) -> list[str]:
    contents = model.contents
    each = {"": contents} if isinstance(contents, Manifest) else contents.corpora
    lines = [f"- corpus digest: `{contents.digest}`"]
    for name, corpus in each.items():
        train = corpus.splits["train"]
        sources = ", ".join(f"`{source}`" for source in corpus.source)
        lines.append(
            f"- {name + ': ' if name else ''}from {sources}: {train.documents:,} documents to "
            f"train on, {train.bytes:,} bytes, {train.tokens:,} tokens; "
            f"{corpus.documents_in_both_splits:,} documents also held out"
        )
    tokenizer = contents.tokenizer
    lines.append(f"- tokenizer: `{tokenizer.identity}`, {tokenizer.vocabulary_size:,} ids")
    return lines


def _tokens(reading: Reading, step: int) -> list[str]:
    count = _at(reading, "tokens", step - 1)
    told = "unknown: the logbook lacks the step" if count is None else f"{int(count):,}"
    return [f"- target tokens up to step {step:,}: {told}"]


def _at(reading: Reading, name: str, step: int) -> float | None:
    series = reading.history.series(name)
    (places,) = np.nonzero(series.steps_S == step)
    return float(series.values_S[places[0]]) if len(places) else None


def _training(model: Model, reading: Reading, step: int) -> list[str]:
    history = reading.history
    before = history.steps_S < step
    applied = history.series("applied")
    skipped = int(np.sum(applied.values_S[applied.steps_S < step] == 0))
    loss = _at(reading, "loss", step - 1)
    lines = [
        f"- {int(before.sum()):,} steps are in the logbook, of {step:,}; {skipped:,} of their "
        "updates were skipped",
        f"- training loss of the last one: {'unknown' if loss is None else f'{loss:.4f} nats'}",
    ]
    incidents, interventions = [], []
    for event in reading.events:
        record = event.record
        if record["event"] == "incident" and _is_before(record.get("onset"), step):
            incidents.append(
                f"- incident: {record.get('kind')} from step {record['onset']} on, seen at step "
                f"{record.get('detected')}"
            )
        if record["event"] in ("intervention", "promotion") and _is_before(
            record.get("from_step"), step
        ):
            reason = f": {record['reason']}" if record.get("reason") else ""
            interventions.append(f"- {record['event']} at step {record['from_step']}{reason}")
    return [*lines, *(incidents or ["- incidents: none recorded"]), *interventions]


def _is_before(value: Any, step: int) -> bool:
    return type(value) is int and value < step


def _evaluation(reading: Reading, step: int) -> list[str]:
    rows = [row for row in reading.evaluations if row["step"] <= step]
    if not rows:
        return ["Not evaluated: the logbook has none up to this step."]
    newest = max(row["step"] for row in rows)
    lines = []
    if newest != step:
        lines.append(f"Not evaluated at this step; the newest before it is of step {newest:,}.\n")
    lines += ["| split | loss | perplexity | bits per byte | sequences |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in rows:
        if row["step"] == newest:
            cells = [row.get(key) for key in ("loss", "perplexity", "bits_per_byte", "sequences")]
            told = " | ".join(f"{c:.4f}" if isinstance(c, float) else str(c) for c in cells)
            lines.append(f"| {row.get('split')} | {told} |")
    return lines


def _compute(reading: Reading, step: int) -> list[str]:
    environment = reading.environment
    count = environment.get("device_count")
    devices = f"{count} x {environment.get('device_kind')}" if count else "unknown"
    series = reading.history.series(MEASURED + "step_seconds")
    seconds = series.values_S[(series.steps_S < step) & np.isfinite(series.values_S)]
    lines = [f"- devices of the last start: {devices}"]
    if len(seconds) and count:
        hours = float(seconds.sum()) / 3600
        lines.append(
            f"- {hours:.3g} hours in {len(seconds):,} measured steps, {hours * count:.3g} "
            "device-hours; evaluations, compilations and what is not in this history left out"
        )
    else:
        lines.append("- time: unknown, no step was measured")
    lines.append("- energy and emissions: unknown, nothing measured them")
    return lines


def _recipe(settings: config.Config) -> list[str]:
    return [
        f"| `{key}` | {value} |"
        for key, value in config.flat(settings).items()
        if config.is_within(key, _RECIPE)
    ]


def _bits(model: Model, reading: Reading) -> list[str]:
    origin, environment = model.origin, reading.environment
    lines = [
        f"- parameters: digest `{origin.digest}`",
        f"- state that they are of: digest `{origin.state_digest}`, before step {origin.step:,}",
        f"- settings: fingerprint `{origin.fingerprint}`",
    ]
    for key in ("commit", "source", "jax", "jaxlib", "palm_jax"):
        if environment.get(key) is not None:
            lines.append(f"- {key}: `{environment[key]}`")
    return lines
