"""Parts of entries: environments, changed settings, torn lines, the table of all numbers;
entries of few words."""

from __future__ import annotations

from typing import Any

from palm_jax.record.chronicle import values, words
from palm_jax.record.chronicle.values import Record


def first_environment(record: Record) -> list[str]:
    lines = []
    if values.is_whole(record.get("parameters")):
        lines.append(f"Parameters: {record['parameters']:,}.")
    environment = record.get("environment")
    if isinstance(environment, dict):
        names = (
            "jax",
            "jaxlib",
            "libtpu",
            "device_kind",
            "device_count",
            "process_count",
            "commit",
        )
        there = [name for name in names if environment.get(name) is not None]
        told = ", ".join(f"{words.code(name)} {words.value(environment[name])}" for name in there)
        lines += [f"Environment: {told}."] if told else []
    return lines


def changes(of: str, changes: Any) -> list[str]:
    if not changes:
        return []
    if not isinstance(changes, dict):
        return [f"{of}changed: {words.value(changes)}."]
    lines = []
    for key, both in changes.items():
        if isinstance(both, list) and len(both) == 2:
            lines.append(
                f"{of}{words.code(key)} was {words.value(both[0])}, is {words.value(both[1])}."
            )
        else:
            lines.append(f"{of}{words.code(key)} changed: {words.value(both)}.")
    return lines


def torn_line(where: str) -> str:
    return f"{words.code(where)} is torn: a process died while writing it. It was left out."


def parity(record: Record) -> list[str]:
    if record.get("left_out") is not None:
        return [f"They were not compared: {words.told(record['left_out'])}."]
    on = words.value(record.get("platform"))
    return [
        f"Mean of {words.value(record.get('sequences'))} sequences: "
        f"{words.value(record.get('loss'))} on {on}, "
        f"{words.value(record.get('loss_on_cpu'))} on a CPU.",
        f"The largest relative difference of one is {words.value(record.get('difference'))}; "
        f"{words.value(record.get('tolerance'))} is allowed.",
    ]


def alert_failed(record: Record) -> list[str]:
    return [
        f"{words.code('log.alert_command')} {words.value(record.get('command'))} ended with exit "
        f"code {words.value(record.get('exit_code'))}."
    ]


def corruption(record: Record) -> list[str]:
    differing = record.get("differing")
    count = len(differing) if isinstance(differing, list) else words.told(differing)
    suspects = record.get("suspects")
    return [
        f"{count} of {words.told(record.get('microbatches'))} microbatches gave another gradient "
        "on another device.",
        *(
            f"Suspected: device {words.told(place.get('device'))} on "
            f"{words.value(place.get('host'))}, process {words.told(place.get('process'))}."
            for place in (suspects if isinstance(suspects, list) else [])
            if isinstance(place, dict)
        ),
    ]


def restart(record: Record) -> list[str]:
    step = record.get("step")
    after = "" if step is None else f", after news of step {words.told(step)}"
    vain = record.get("in_vain")
    return [
        f"Why: {words.told(record.get('cause'))}{after}.",
        f"It waited {words.told(record.get('wait_seconds'))} s"
        + (f"; {words.told(vain)} restarts before made no newer checkpoint." if vain else "."),
    ]


def pruned(record: Record) -> list[str]:
    lines = [f"Steps: {words.told(record.get('steps'))}."]
    if record.get("damaged"):
        lines.append(f"Damaged were: {words.told(record['damaged'])}.")
    if values.is_whole(record.get("newest_left")):
        lines.append(f"The newest state left is that of step {record['newest_left']:,}.")
    if values.is_whole(record.get("bytes")):
        lines.append(f"Freed: {record['bytes']:,} bytes.")
    return lines


def table(totals: dict[str, Any]) -> str:
    redone, left = (
        words.duration(totals["redone_seconds"]),
        words.duration(totals["left_behind_seconds"]),
    )
    rows = {
        "steps made": f"{totals['steps_made']:,}",
        "attempts": f"{totals['attempts']:,}",
        "steps redone": f"{totals['steps_redone']:,} ({redone})",
        "steps left behind": f"{totals['steps_left_behind']:,} ({left})",
        "sequences excluded": f"{totals['sequences_excluded']:,}",
        "time training": words.duration(totals["training_seconds"]),
        "time compiling": words.duration(totals["compile_seconds"]),
        "segments": f"{totals['segments']:,}",
        "starts": f"{totals['starts']:,}",
        "ends without a stop": f"{totals['ends_without_stop']:,}",
        "skipped updates": f"{totals['skipped_updates']:,}",
        "losses not finite": f"{totals['non_finite_losses']:,}",
        "incidents": f"{totals['incidents']:,}",
        "differences": f"{totals['differences']:,}",
        "torn lines": f"{len(totals['torn_lines']):,}",
    }
    for name in ("verifications", "restarts"):
        if totals[name]:
            rows[name] = f"{totals[name]:,}"
    if totals["attempts_without_time"]:
        rows["attempts without a measured time"] = f"{totals['attempts_without_time']:,}"
    lines = ["| in all | |", "| --- | ---: |"]
    return "\n".join(["## Summary", "", *lines, *(f"| {k} | {v} |" for k, v in rows.items())])
