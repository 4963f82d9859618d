"""Is the best rate the same at every width? With muP and without, as a table and a picture.

A model of two layers learns from the quickstart's corpus at four widths, each rate from the same
weights on the same data. One program serves all rates of a width: `rate_scale` multiplies the rate.
Losses are means over the last tenth of the steps. What was computed is kept in the folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import pathlib
import sys

import _command

from palm_jax import config, start, svg

WIDTHS = (32, 64, 128, 256)
RATES = tuple(2.0**-k for k in range(11, 3, -1))
HEAD_SIZE, BATCH = 16, 8
COLOURS = ("#0969da", "#1a7f37", "#bf8700", "#cf222e")


def settings_of(width: int, mup: bool, steps: int, seed: int) -> config.Config:
    model = {
        "num_layers": 2,
        "width": width,
        "num_heads": width // HEAD_SIZE,
        "num_key_value_heads": width // HEAD_SIZE,
        "head_size": HEAD_SIZE,
        "mup_base_width": WIDTHS[0] if mup else None,
    }
    schedule = {
        "kind": "cosine",
        "peak": 1.0,
        "final": 0.1,
        "warmup_steps": max(1, steps // 10),
        "decay_steps": steps,
    }
    overrides = [
        *(f"steps={steps}", f"seed={seed}", "log.vitals=basic"),
        *(f"model.{name}={json.dumps(value)}" for name, value in model.items()),
        f"data.ramp={{starts: [0], sizes: [{BATCH}]}}",
        "numerics={microbatch: 2, lanes: 4}",
        "optimizer={name: adamw, weight_decay: 0.0}",
        f"schedule={json.dumps(schedule)}",
    ]
    return config.load("configs/quickstart.yaml", overrides)


def final_losses(settings: config.Config, rates: tuple[float, ...]) -> list[float]:
    """The loss at the end, by rate; infinite where it is no number."""
    import jax

    from palm_jax import data, sharding, step
    from palm_jax.corpus.reader import Corpus

    with Corpus.open(settings.data.corpus) as corpus:
        program = step.make_program(
            settings, sharding.make_mesh(settings.mesh), corpus.manifest.end_of_document
        )
        source = data.BatchSource(corpus, settings.seed, settings.data.ramp, settings.steps)
        batches = [program.put(source[index].tokens) for index in range(settings.steps)]
    last = max(1, settings.steps // 10)
    found = []
    for rate in rates:
        state, losses = program.init(), []
        for batch in batches:
            state, vitals = program.step(state, batch, step.controls(rate_scale=rate))
            losses.append(vitals["cross_entropy"])
        mean = sum(map(float, jax.device_get(losses[-last:]))) / last
        found.append(mean if math.isfinite(mean) else math.inf)
    return found


def picture(found: dict[str, dict[int, list[float]]]) -> str:
    """Loss against rate, a curve for each width; its best rate is marked."""
    width, height, panel, top, bottom = 760, 330, 330, 48, 270
    finite = [x for curves in found.values() for ys in curves.values() for x in ys if x < 6]
    low, high = min(finite), min(max(finite), min(finite) + 1.6)

    def place(left: float, rate: float, loss: float) -> tuple[float, float]:
        first, last = math.log2(RATES[0]), math.log2(RATES[-1])
        across = (math.log2(rate) - first) / (last - first)
        up = (min(loss, high) - low) / (high - low)
        return left + across * (panel - 40), bottom - up * (bottom - top)

    lines = []
    for number, (name, curves) in enumerate(found.items()):
        left = 48 + number * (panel + 30)
        lines.append(svg.text(left, 24, name, size=14))
        lines.append(svg.rule(left, bottom, left + panel - 40, bottom, svg.FAINT))
        for rate in (*RATES[::2], RATES[-1]):
            x, _ = place(left, rate, low)
            lines.append(svg.text(x, bottom + 18, f"2^{round(math.log2(rate))}", "middle"))
        for loss in (low, (low + high) / 2, high):
            _, y = place(left, RATES[0], loss)
            lines.append(svg.text(left - 6, y + 4, f"{loss:.2f}", "end"))
        for (model_width, losses), colour in zip(curves.items(), COLOURS, strict=True):
            points = [place(left, r, x) for r, x in zip(RATES, losses, strict=True)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            x, y = points[losses.index(min(losses))]
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
            if number == 0:
                row = WIDTHS.index(model_width)
                lines.append(
                    svg.text(
                        left + 90 + row * 75, height - 12, f"width {model_width}", colour=colour
                    )
                )
    lines.append(svg.text(48, height - 12, "dots: best rate"))
    return svg.document(width, height, "final loss against rate, by width", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/mup"))
    parser.add_argument("--picture", type=pathlib.Path)
    given = parser.parse_args()
    start.start(settings_of(WIDTHS[0], True, given.steps, 0))
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    given.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, list[float]]] = {}
    for name, mup in (("muP", True), ("standard parametrisation", False)):
        found[name] = {}
        for width in WIDTHS:
            by_seed = []
            for seed in range(given.seeds):
                kept = given.folder / f"{'mup' if mup else 'sp'}-{width}-{given.steps}-{seed}.json"
                if not kept.exists():
                    print(f"training {kept.stem}", file=sys.stderr, flush=True)
                    losses = final_losses(settings_of(width, mup, given.steps, seed), RATES)
                    kept.write_text(json.dumps(losses))
                by_seed.append(json.loads(kept.read_text()))
            found[name][width] = [sum(each) / len(each) for each in zip(*by_seed, strict=True)]
    print("| | width | best rate | " + " | ".join(f"{rate:.4g}" for rate in RATES) + " |")
    print("|" + "--|" * (3 + len(RATES)))
    for name, curves in found.items():
        for width, losses in curves.items():
            best = RATES[losses.index(min(losses))]
            cells = " | ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {name} | {width} | 2^{round(math.log2(best))} | {cells} |")
    if given.picture is not None:
        given.picture.write_text(picture(found))


if __name__ == "__main__":
    _command.run(main)
