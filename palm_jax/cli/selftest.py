"""`palm-jax selftest`."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
import textwrap
import time
from typing import Annotated

import typer

from palm_jax import config
from palm_jax.cli.terms import DIFFERENT, AsJson, Overrides, prepare_jax, print_json

app = typer.Typer(help="Try the promises of this package on this machine.", no_args_is_help=True)


@app.callback()
def selftest() -> None:
    """Try the promises of this package on this machine."""


@app.command(epilog="Example: palm-jax selftest bits precision.policy=bfloat16")
def bits(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the tiny run; mesh.* too."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Whether this machine gives equal bits, in about a minute.

    Trains a tiny model, and again, killed in the middle and resumed; replays its steps, also on
    another mesh; and compares every computed field and every state, bit for bit. Uses all
    devices of an accelerator, or emulates some on a CPU, unless mesh.* settings say otherwise.
    Leaves nothing behind.
    Exit code 0: identical; 1: different; 3: cannot tell here.
    """
    from palm_jax import selftest as trying

    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {text} ...", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="palm-jax-selftest-") as folder:
        report = trying.bits(pathlib.Path(folder), overrides or (), tell)
    if as_json:
        print_json(
            {
                "identical": report.identical,
                **dataclasses.asdict(report),
                "seconds": time.monotonic() - began,
                "proves": trying.PROVES if report.identical else None,
                "does_not_prove": trying.DOES_NOT_PROVE,
            }
        )
    else:
        axes = {axis: size for axis, size in report.mesh.items() if axis != "emulated_devices"}
        emulated = " emulated" if report.mesh["emulated_devices"] else ""
        print(
            f"on {report.devices}{emulated} x {report.device_kind}, mesh "
            + " x ".join(f"{axis} {size}" for axis, size in axes.items())
        )
        width = max(len(trial.what) for trial in report.trials)
        for trial in report.trials:
            print(f"{trial.verdict:9}  {trial.what:{width}}  {trial.compared}")
            if (d := trial.first_difference) is not None:
                print(
                    f"           first difference: step {d['step']}, {d['field']}: "
                    f"{d['straight']}, again {d['again']}"
                )
        print(f"identical: {'true' if report.identical else 'false'}")
        told = f"{trying.PROVES} {trying.DOES_NOT_PROVE}"
        print(textwrap.fill(told if report.identical else trying.DOES_NOT_PROVE, 100))
    if not report.identical:
        raise typer.Exit(DIFFERENT)


@app.command(epilog="Example: palm-jax selftest parity configs/palm_8b.yaml model.num_layers=4")
def parity(
    config_file: Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Whether this machine's devices compute the loss that a CPU computes.

    Makes the fresh model of CONFIG on its mesh and on one CPU device, and compares the losses
    of a few sequences of random tokens; a run that is not on a CPU does so before its first
    step. Needs no corpus. On a slice of several hosts, run it on all of them at the same time.
    Exit code 0: close enough; 1: not; 3: cannot tell here.
    """
    settings = config.load(config_file, overrides or ())
    prepare_jax(settings)

    from palm_jax import selftest as trying

    outcome, refusal = trying.parity(settings)
    if as_json:
        print_json({"close": outcome.passes, **dataclasses.asdict(outcome)})
    else:
        print(f"{outcome.platform:4} {outcome.loss:.9g} nats")
        print(f"cpu  {outcome.loss_on_cpu:.9g} nats, the same {outcome.sequences} sequences")
        print(f"a number of one differs by at most {outcome.difference:.2g} of itself")
        print(f"close enough: {'true' if outcome.passes else 'false'} (<= {outcome.tolerance:g})")
    if not outcome.passes:
        print(refusal, file=sys.stderr)
        raise typer.Exit(DIFFERENT)
