"""Made-up runs: a folder with a logbook of any length, as a run would have left it."""

from __future__ import annotations

import json
import math
import pathlib
import random
from typing import Any

from palm_jax import config
from palm_jax.record.segments import Intervention, Segment

SETTINGS = {
    "steps": 40,
    "model": {
        "num_layers": 3,
        "width": 16,
        "num_heads": 2,
        "head_size": 8,
        "vocabulary_size": 257,
        "sequence_length": 8,
    },
    "data": {"corpus": "corpus", "ramp": {"sizes": [8]}},
}
TIME = "2026-03-01T10:00:00+00:00"


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields, "time": TIME}


def start(segment: int, step: int, **fields: Any) -> dict[str, Any]:
    environment = {"jax": "0.10.2", "device_kind": "TPU v4", "device_count": 8}
    return event(
        "start", segment=segment, step=step, **{"steps": 40, "environment": environment} | fields
    )


def step(number: int, *, segment: int = 0, attempt: int = 1, **computed: Any) -> dict[str, Any]:
    """A step of 8 sequences of 8 tokens; fields that are None are left out."""
    fields = {
        "loss": 5.0 - number / 10,
        "gradient_norm": 1.0 + number % 3,
        "rate_scale": 1.0,
        "skip_above": "inf",
        "applied": True,
        "tokens": 64 * (number + 1),
        "batch_size": 8,
        "first_position": 8 * number,
        "batch_digest": "00ff",
    } | computed
    return {
        "event": "step",
        "segment": segment,
        "attempt": attempt,
        "step": number,
        "computed": {key: value for key, value in fields.items() if value is not None},
        "bits": {},
        "measured": {"step_seconds": 0.5, "tokens_per_second": 128.0 + number % 2},
    }


def steps(first: int, stop: int, **fields: Any) -> list[dict[str, Any]]:
    return [step(number, **fields) for number in range(first, stop)]


def write(
    run: pathlib.Path, *parts: list[dict[str, Any]], segments: tuple[Segment, ...] = (Segment(),)
) -> pathlib.Path:
    """A run's folder with these parts of a logbook, without checkpoints."""
    (run / "logbook").mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml(config.from_dict(SETTINGS)))
    for segment in segments:
        folder = run / "segments" / f"{segment.segment:03d}"
        folder.mkdir(parents=True)
        (folder / "segment.json").write_text(segment.model_dump_json())
    for number, records in enumerate(parts):
        with (run / "logbook" / f"{number:04d}.jsonl").open("w") as file:
            for record in records:
                file.write(json.dumps(record, allow_nan=False) + "\n")
    return run


def lively(run: pathlib.Path, num_steps: int, num_layers: int, every: int = 1) -> pathlib.Path:
    """A long run that has everything: a ramp, a spike, NaNs, a crash, a rollback, vitals.

    Args:
      every: steps between those with vitals for each layer.
    """
    rng = random.Random(0)
    fork, spike, crash = num_steps * 6 // 10, num_steps * 65 // 100, num_steps * 3 // 10
    reached = num_steps * 7 // 10
    wider = num_steps // 4

    def before(number: int) -> int:
        """Sequences in the batches before a step."""
        return 256 * min(number, wider) + 512 * max(0, number - wider)

    def made(number: int, segment: int, attempt: int) -> dict[str, Any]:
        base = 2.0 + 6.0 / (1 + number / (num_steps / 60)) + 0.03 * rng.gauss(0, 1)
        off = segment == 0 and number >= spike
        loss: Any = base + (4.0 * math.exp(-(number - spike) / (num_steps / 80)) if off else 0.0)
        norm: Any = math.exp(0.3 * rng.gauss(0, 1)) * (80.0 if off and rng.random() < 0.2 else 1.0)
        skipped = rng.random() < 20 / num_steps or (number % (num_steps // 4)) in (100, 101)
        if skipped:
            loss, norm = ("nan", "nan") if rng.random() < 0.7 else ("inf", "inf")
        size = before(number + 1) - before(number)
        fields: dict[str, Any] = {
            "cross_entropy": loss if skipped else loss - 1e-3,
            "z_loss": "nan" if skipped else 1e-4 * (9 + rng.gauss(0, 1)),
            "mean_log_z": 0.3 * rng.gauss(0, 1),
            "update_rms": 0.0 if skipped else 1e-3 * math.exp(0.1 * rng.gauss(0, 1)),
            "parameter_norm": 50 + 30 * math.log1p(number / num_steps),
            "rate": 0.01 * min(1.0, (num_steps / 10 / (number + 1)) ** 0.5),
            "beta2": 1 - (number + 1) ** -0.8,
            "clip_factor": 1.0 if skipped else min(1.0, 1.0 / norm),
            "max_attention_logit": 10 + 40 * number / num_steps + rng.gauss(0, 1),
            "attention_entropy": 4 - 2 * number / num_steps + 0.1 * rng.gauss(0, 1),
            "embedding/gradient_norm": 0.3 * math.exp(0.2 * rng.gauss(0, 1)),
            "embedding/parameter_rms": 1.0 + 0.1 * number / num_steps,
            "embedding/update_rms": 1e-3 * math.exp(0.1 * rng.gauss(0, 1)),
        }
        if number % every == 0:
            noise = [math.exp(0.2 * rng.gauss(0, 1)) for _ in range(num_layers)]
            late = number / num_steps
            for name, scale in {
                "gradient_norm": 0.3,
                "normalised_gradient_rms": 1.0,
                "parameter_rms": 0.05,
                "update_rms": 1e-3,
                "residual_rms": 2.0,
                "branch_ratio": 0.2,
                "max_attention_logit": 8.0,
                "attention_entropy": 3.0,
            }.items():
                row: list[Any] = [
                    scale * x * (1 + 30 * (off and layer < 2) + late * layer)
                    for layer, x in enumerate(noise)
                ]
                if skipped:
                    row[0] = "nan"
                fields[f"layers/{name}"] = row
        record = step(
            number,
            segment=segment,
            attempt=attempt,
            loss=loss,
            gradient_norm=norm,
            applied=not skipped,
            batch_size=size,
            first_position=before(number) + (4096 if segment == 1 else 0),
            tokens=8 * before(number + 1),
            **fields,
        )
        record["measured"] = {
            "step_seconds": 0.4 + 0.05 * (number // 10 % 7 == 0),
            "tokens_per_second": 1e5 + 5e3 * rng.gauss(0, 1),
            "model_flops_utilisation": 0.45 + 0.01 * rng.gauss(0, 1),
            "input_wait_seconds": 0.002 * rng.random(),
        }
        return record

    def trained(first: int, stop: int, segment: int, attempt: int = 1) -> list[dict[str, Any]]:
        found = []
        for number in range(first, stop):
            found.append(made(number, segment, attempt))
            if (number + 1) % max(1, num_steps // 20) == 0:
                loss = 2.1 + 6.0 / (1 + number / (num_steps / 60))
                at = {"segment": segment, "step": number + 1}
                rates = {"loss": loss, "bits_per_byte": loss / 2.8, "perplexity": math.exp(loss)}
                found.append(event("evaluation", **at, split="held_out", **rates))
                found.append(event("checkpoint", **at, state_digest="0123456789abcdef"))
        return found

    jump = {"segment": 0, "kind": "jump", "onset": spike, "detected": spike + 2, "vital": "loss"}
    first = [start(0, 0, steps=num_steps, parameters=1_234_567), *trained(0, crash + 200, 0)]
    second = [start(0, crash, steps=num_steps), *trained(crash, crash + 200, 0, 2)]
    second += trained(crash + 200, spike + 3, 0)
    second += [event("incident", **jump, value=8.25, limit=2.75)]
    second += trained(spike + 3, reached, 0)
    second += [event("stop", segment=0, step=reached, signal="SIGTERM", state_digest="ab")]
    change = {"segment": 1, "from_step": fork, "at": fork, "reason": "the spike & <what> follows"}
    excluded = (before(fork), before(fork) + 4096)
    third = [event("intervention", **change, changes={"schedule.peak": [0.01, 0.005]},
                   exclusions=[list(excluded)])]  # fmt: skip
    fourth = [start(1, fork, steps=num_steps), *trained(fork, num_steps, 1)]
    fourth += [event("note", text="looks calm\n<script>alert(1)</script>")]
    fourth += [event("incident_closed", **jump, outcome="recovered", closed=reached)]
    fourth += [
        event("stop", segment=1, step=num_steps, signal=None, state_digest="fedcba9876543210")
    ]
    segments = (
        Segment(),
        Segment.model_validate(
            {
                "segment": 1,
                "parent": {"segment": 0, "step": fork},
                "start_step": fork,
                "reason": change["reason"],
                "exclusions": (excluded,),
                "interventions": (
                    Intervention(at=fork, changes={"schedule.peak": 0.005}, reason="x"),
                ),
            }
        ),
    )
    return write(run, first, second, third, fourth, segments=segments)
