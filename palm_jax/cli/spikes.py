"""`palm-jax spikes`: the incidents of a run, from its logbook, and their causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from palm_jax import config
from palm_jax.cli import diagnose
from palm_jax.cli.terms import AsJson, Overrides, Run, check_is_run, print_json
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.spikes.incidents import Incident

app = typer.Typer(help="Incidents: losses that left their course.", no_args_is_help=True)
app.command(epilog="Example: palm-jax spikes diagnose runs/quickstart --at 120")(diagnose.diagnose)


@app.command("list", epilog="Example: palm-jax spikes list runs/quickstart spikes.sigmas=5")
def list_(
    run: Run,
    overrides: Overrides = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The incidents and alarms of RUN: found again in its logbook, which stays as it is.

    Works on any logbook, also one that was written without detection. spikes.* settings show
    what others would have found.
    """
    check_is_run(run)
    for text in overrides or ():
        if not text.startswith("spikes."):
            raise WrongInput(f"{text!r}: spikes list takes settings spikes.KEY=VALUE alone")

    from palm_jax.record import folder
    from palm_jax.spikes import history
    from palm_jax.spikes.incidents import Alarm, Incident, plain

    there = folder.RunFolder(run.absolute())
    settings = config.override(there.config(), overrides or ()).spikes
    fold, found = history.detector(there, settings, segment)
    closed = [x for x in found if isinstance(x, Incident) and x.outcome is not None]
    still_open = [x for x in (fold.open, fold.stall) if x is not None]
    incidents = sorted([*closed, *still_open], key=lambda x: (x.onset, x.detected))
    alarms = [x for x in found if isinstance(x, Alarm)]
    if as_json:
        print_json(
            {
                "run": str(run),
                "last_step": fold.last,
                "incidents": [plain(x) for x in incidents],
                "alarms": [plain(x) for x in alarms],
            }
        )
        return
    for x in incidents:
        print(_told(x))
    for alarm in alarms:
        print(
            f"alarm at step {alarm.step}: {alarm.vital} {alarm.value:.4g}, limit "
            f"{alarm.limit:.4g} ({alarm.why})"
        )
    if not found:
        steps = "no step" if fold.last is None else f"steps up to {fold.last}"
        print(f"{run}: no incident and no alarm in {steps}")


def _told(x: Incident) -> str:
    parts = [f"{x.kind} at step {x.onset}"]
    if x.detected != x.onset:
        parts.append(f"detected at {x.detected}")
    if x.value is not None:
        of = f"{x.vital} {x.value:.4g}"
        parts.append(of if x.level is None else f"{of}, level {x.level:.4g}")
    if x.peak is not None:
        parts.append(f"peak {x.peak:.4g} at {x.peak_step}, area {x.area:.4g}")
    if x.num_nonfinite:
        parts.append(f"{x.num_nonfinite} step{'s'[: x.num_nonfinite > 1]} not finite")
    outcome: str = x.outcome or "open"
    if x.recovery is not None:
        outcome += f" at {x.recovery}"
    elif x.closed is not None:
        outcome += f", judged at {x.closed}"
    return "; ".join([*parts, outcome])
