"""`palm-jax lab`: experiments, and what many of them say together."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from palm_jax import config
from palm_jax.cli import fit, noise
from palm_jax.cli.terms import AsJson, Run, check_is_run, prepare_jax, print_json
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.lab.snapshot import Snapshot
    from palm_jax.lab.underflow import Shares, Sum, Unchanged

app = typer.Typer(help="Experiments, and what many of them say together.", no_args_is_help=True)


@app.callback()
def lab() -> None:
    """Experiments, and what many of them say together."""


app.command(epilog="Example: palm-jax lab fit losses.csv --flops 1e21 --out runs/fit")(fit.fit)
app.command("noise-scale", epilog="Example: palm-jax lab noise-scale runs/quickstart --step 160")(
    noise.noise_scale
)


@app.command(epilog="Example: palm-jax lab underflow runs/quickstart --step 160")
def underflow(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Before which step; the default: newest checkpoint.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(help="Where the SVG goes; the default is RUN/reports/underflow.svg."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What narrow formats would lose of RUN's gradient, update and sums at one moment.

    The gradient of the step's batch is computed in float32 and rounded to each format under loss
    scales from 2^0 to 2^16; updates are added to weights as each format stores them. Nothing in
    the run changes but the picture.
    """
    check_is_run(run)
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    recorded = there.config()
    settings = config.override(recorded, overrides or ())
    for key in config.differences(recorded, settings):
        if not config.is_within(key, ("mesh", *config.PLACES_OF_DATA)):
            raise WrongInput(
                f"{key} would change the run that is looked at; this takes mesh.* and "
                f"{' or '.join(config.PLACES_OF_DATA)}"
            )
    prepare_jax(settings)

    from palm_jax.lab import picture as drawing
    from palm_jax.lab import snapshot, underflow
    from palm_jax.replay import bundles

    with bundles.open_rows(there, settings) as corpus:
        moment = snapshot.take(there, corpus, settings, step, segment)
    gradient, weights = list(moment.gradient.values()), list(moment.weights.values())
    update = None if moment.update is None else list(moment.update.values())
    shares = underflow.gradient_shares(gradient)
    unchanged = underflow.unchanged(weights, update)
    sums = underflow.repeated_sum()
    where = picture or run / "reports" / "underflow.svg"
    where.parent.mkdir(parents=True, exist_ok=True)
    title = f"{run.name}: the gradient of step {moment.step}"
    where.write_text(drawing.draw(gradient, shares, title), encoding="utf-8")
    zeros = underflow.exact_zeros(gradient)
    if as_json:
        print_json(
            {
                "run": str(run),
                "segment": moment.segment,
                "step": moment.step,
                "policy": moment.policy,
                "loss_scale": moment.loss_scale,
                "exact_zeros": zeros,
                "gradient": [dataclasses.asdict(row) for row in shares],
                "unchanged": [dataclasses.asdict(row) for row in unchanged],
                "sums": [dataclasses.asdict(row) for row in sums],
                "picture": str(where),
            }
        )
        return
    _show(run, moment, zeros, shares, unchanged, sums)
    print(f"picture: {where}")


def _show(
    run: pathlib.Path,
    moment: Snapshot,
    zeros: float,
    shares: list[Shares],
    unchanged: list[Unchanged],
    sums: list[Sum],
) -> None:
    import rich.console
    import rich.table

    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    scale = "" if moment.loss_scale is None else f", loss scale {moment.loss_scale:g}"
    print(
        f"{run}, segment {moment.segment}, before step {moment.step} ({moment.policy}{scale}); "
        f"{zeros:.1%} of the gradient's elements are 0 in float32, and left out"
    )
    by_scale = rich.table.Table(title="gradient elements that become 0 / subnormal / not finite")
    formats = list(dict.fromkeys(row.format for row in shares))
    for heading in ("loss scale", *formats):
        by_scale.add_column(heading, justify="right")
    for scale_ in sorted({row.scale for row in shares}):
        cells = [row for row in shares if row.scale == scale_]
        by_scale.add_row(
            f"2^{int(math.log2(scale_))}",
            *(
                f"{_percent(c.zero)} / {_percent(c.subnormal)} / {_percent(c.overflow)}"
                for c in cells
            ),
        )
    console.print(by_scale)
    by_size = rich.table.Table(title="weights that an update leaves as they are")
    formats = list(dict.fromkeys(row.format for row in unchanged))
    for heading in ("update", *formats):
        by_size.add_column(heading, justify="right")
    for size in dict.fromkeys(row.size for row in unchanged):
        cells_ = [row for row in unchanged if row.size == size]
        name = "this step's" if size is None else f"{size:g}"
        by_size.add_row(name, *(_percent(row.share) for row in cells_))
    console.print(by_size)
    if moment.update is None:
        print("this step's update was skipped, so it has no row")
    for row in sums:
        stalled = "" if row.stalls_after is None else f"; stalls after {row.stalls_after} terms"
        print(f"{row.count} x {row.term:g} in {row.format}: {row.total:.8g}{stalled}")


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else f"{share:.0e}"
