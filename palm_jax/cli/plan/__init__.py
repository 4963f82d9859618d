"""`palm-jax plan`: what a run costs, before it starts."""

from __future__ import annotations

import typer

from palm_jax.cli.plan import compute, laws, reliability, whole

app = typer.Typer(help="What a run costs, before it starts: arithmetic.", no_args_is_help=True)


@app.callback()
def plan() -> None:
    """What a run costs, before it starts: arithmetic, without devices.

    Every answer says what it assumes. With --json, each figure's unit is in its name.
    """


app.command(
    "flops",
    epilog="Example: palm-jax plan flops configs/palm_540b.yaml --tokens-per-second 238300 "
    "--chips 6144 --peak-tflops 275",
)(compute.flops_command)
app.command(epilog="Example: palm-jax plan memory configs/palm_8b.yaml")(compute.memory)
app.command(epilog="Example: palm-jax plan kv configs/palm_540b.yaml --tokens 131072")(compute.kv)
app.command(epilog="Example: palm-jax plan goodput --preset llama3")(reliability.goodput)
app.command(epilog="Example: palm-jax plan spikes configs/palm_540b.yaml --spikes 20")(
    reliability.spikes
)
app.command(epilog="Example: palm-jax plan batch configs/palm_540b.yaml --loss 2.0")(laws.batch)
app.command(epilog="Example: palm-jax plan chinchilla --flops 5.76e23")(laws.chinchilla)
app.command(epilog="Example: palm-jax plan carbon --chip-hours 8404992")(laws.carbon)
app.command(
    epilog="Example: palm-jax plan run configs/palm_540b.yaml --topology v4:12x16x16 --slices 2"
)(whole.run)
