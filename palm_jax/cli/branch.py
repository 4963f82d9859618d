"""`palm-jax branch` and `palm-jax intervene`: change one thing, beside the run or in it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from palm_jax import config, stream
from palm_jax.cli.terms import (
    STOPPED_BY_SIGNAL,
    AllowEnvironment,
    AsJson,
    Overrides,
    Run,
    check_is_run,
    interval,
    prepare_jax,
    print_json,
)
from palm_jax.errors import WrongInput

app = typer.Typer(help="Depart from a step of a run and change one thing.", no_args_is_help=True)

Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="A:B", help="Leave out the data of steps A:B; may be repeated."),
]
Reason = Annotated[str, typer.Option(help="Why, for whoever reads the logbook.")]


@app.command(
    epilog="Example: palm-jax branch run runs/quickstart --from 120 --until 160 "
    "schedule.peak=0.01 --reason 'is it the rate?'"
)
def run(
    run: Run,
    from_step: Annotated[int, typer.Option("--from", min=0, help="Depart before this step.")],
    overrides: Overrides = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="Run up to this step; the default is the run's end.")
    ] = None,
    data_from: Annotated[
        int | None, typer.Option(min=0, help="Feed the data of this step, and on from there.")
    ] = None,
    exclude: Exclude = None,
    schedule_step: Annotated[
        int | None, typer.Option(min=0, help="What the rate counts from, at the departure.")
    ] = None,
    update_count: Annotated[
        int | None, typer.Option(min=0, help="What beta2 counts from, at the departure.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The branch's name; default: a number.")] = None,
    reason: Reason = "",
    checkpoints: Annotated[
        bool, typer.Option(help="Save checkpoints, and evaluate at the end.")
    ] = False,
    allow_environment: AllowEnvironment = False,
    as_json: AsJson = False,
) -> None:
    """Depart from RUN before step FROM with something changed, and train on.

    The branch is a run of its own in RUN/branches/NAME; RUN itself is only read. Calling this
    again with the name of a branch that was interrupted is refused: `palm-jax train` its
    config.yaml to go on. mesh.* settings give the branch another mesh.
    """
    check_is_run(run)
    recorded = config.load(run / "config.yaml")
    on_mesh = [text for text in overrides or () if text.startswith("mesh.")]
    settings = config.override(recorded, on_mesh)
    stop = settings.steps if until is None else until
    if stop <= from_step:
        raise WrongInput(f"--until {stop} is not after --from {from_step}")
    prepare_jax(settings)

    from palm_jax import console, signals
    from palm_jax import train as training
    from palm_jax.record import folder
    from palm_jax.replay import branches

    made, changed = branches.create_branch(
        folder.RunFolder(run.absolute()),
        from_step,
        branches.Changes(
            overrides=tuple(text for text in overrides or () if text not in on_mesh),
            exclude=tuple(interval("--exclude", text) for text in exclude or ()),
            data_from=data_from,
            schedule_step=schedule_step,
            update_count=update_count,
        ),
        segment=segment,
        name=name,
        reason=reason,
        mesh=settings.mesh,
    )
    with (
        console.TrainingProgress(stop) as progress,
        signals.stop_request(progress.signal) as stop_requested,
    ):
        progress.say(f"branch {made.path.name}: {_clocks(branches.describe(made))}")
        for key, (old, new) in changed.items():
            progress.say(f"  {key}: {old} -> {new}")
        outcome = training.train(
            made.config().model_copy(update={"steps": stop}),
            made.path,
            tell=progress,
            stop_requested=stop_requested,
            allow_environment=allow_environment,
            keep=checkpoints,
        )
    described = branches.describe(made)
    if as_json:
        print_json(
            {
                "run": str(run),
                **{key: value for key, value in described.items() if key != "losses"},
                "step": outcome.step,
                "state_digest": outcome.state_digest,
            }
        )
    else:
        _print_beside(branches.losses_beside(folder.RunFolder(run.absolute()), made))
        print(f"branch {made.path.name}: state digest {outcome.state_digest} at {outcome.step}")
    if outcome.stopped_by is not None:
        raise typer.Exit(STOPPED_BY_SIGNAL)


def _clocks(described: dict[str, Any]) -> str:
    step = described["from_step"]

    def clock(value: int | None) -> str:
        return "the state's own" if value is None else str(value)

    return (
        f"the state before step {step} of segment {described['segment']}; clocks: data of step "
        f"{described['data_from_step']}, schedule step {clock(described['schedule_step'])}, "
        f"update count {clock(described['update_count'])}, moments the state's own"
    )


def _print_beside(rows: list[tuple[int, Any, Any]]) -> None:
    print("   step   loss in the run   in the branch")
    shown = rows if len(rows) <= 20 else [*rows[:10], *rows[-10:]]
    for step, theirs, ours in shown:
        values = [f"{x:.6f}" if isinstance(x, float) else str(x or "-") for x in (theirs, ours)]
        print(f"{step:7d}   {values[0]:>15}   {values[1]:>13}")
    if len(rows) > len(shown):
        print(f"({len(rows) - len(shown)} steps between them are not shown)")


@app.command("list", epilog="Example: palm-jax branch list runs/quickstart")
def list_(run: Run, as_json: AsJson = False) -> None:
    """The branches of RUN."""
    from palm_jax.record import folder
    from palm_jax.replay import branches

    check_is_run(run)
    there = folder.RunFolder(run.absolute())
    found = [branches.describe(branches.branch_of(there, name)) for name in branches.names(there)]
    for described in found:
        del described["losses"]
    if as_json:
        print_json({"run": str(run), "branches": found})
        return
    for b in found:
        changes = ", ".join(f"{key}={value}" for key, value in b["changes"].items())
        print(
            f"{b['branch']}: from step {b['from_step']}, {b['steps_made']} steps, last loss "
            f"{b['last_loss']}; {changes or 'no setting changed'}; {b['reason'] or 'no reason'}"
        )
    if not found:
        print(f"{run} has no branches")


@app.command(epilog="Example: palm-jax branch show runs/quickstart 000")
def show(
    run: Run,
    name: Annotated[str, typer.Argument(help="The branch's name.")],
    as_json: AsJson = False,
) -> None:
    """What a branch changed, and its losses beside those of the run."""
    from palm_jax.record import folder
    from palm_jax.replay import branches

    check_is_run(run)
    there = folder.RunFolder(run.absolute())
    branch = branches.branch_of(there, name)
    described, beside = branches.describe(branch), branches.losses_beside(there, branch)
    del described["losses"]
    if as_json:
        rows = [{"step": s, "loss_in_run": a, "loss_in_branch": b} for s, a, b in beside]
        print_json({"run": str(run), **described, "losses": rows})
        return
    print(f"branch {name}: {_clocks(described)}")
    for key, value in described["changes"].items():
        print(f"  {key} = {value}")
    for exclusion in described["exclusions"]:
        print(f"  sequence {stream.told(exclusion)} are left out")
    print(f"  reason: {described['reason'] or 'none given'}")
    _print_beside(beside)


@app.command(epilog="Example: palm-jax branch promote runs/quickstart 000 --reason 'it heals'")
def promote(
    run: Run,
    name: Annotated[str, typer.Argument(help="The branch's name.")],
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Make a branch the run's future: the next `train` goes on from it.

    Opens a segment of the run. What the run did after the departure stays readable with
    --segment.
    """
    from palm_jax.record import folder
    from palm_jax.replay import branches

    check_is_run(run)
    segment = branches.promote(folder.RunFolder(run.absolute()), name, reason)
    if as_json:
        print_json({"run": str(run), "branch": name, "segment": segment.segment})
        return
    print(
        f"segment {segment.segment} of {run} departs before step {segment.start_step} as branch "
        f"{name} did; `palm-jax train {run}/config.yaml --run {run}` goes on"
    )


def intervene(
    run: Run,
    at: Annotated[int, typer.Option(min=0, help="In force from this step on.")],
    reason: Reason,
    overrides: Overrides = None,
    exclude: Exclude = None,
    as_json: AsJson = False,
) -> None:
    """Change optimizer.*, schedule.* or model.z_loss of RUN in mid-run, or leave out data.

    Opens a segment of the run, from its newest checkpoint at or before AT. The next `train`
    goes on from there; if AT lies behind, that rolls the run back.
    """
    from palm_jax import data
    from palm_jax.corpus.corpora import open_corpus
    from palm_jax.record import folder
    from palm_jax.replay import branches

    check_is_run(run)
    there = folder.RunFolder(run.absolute())
    changes = branches.Changes(
        overrides=tuple(overrides or ()),
        exclude=tuple(interval("--exclude", text) for text in exclude or ()),
    )
    segment, changed = branches.intervene(there, at, changes, reason)
    settings = there.config()
    recurring = None
    if changes.exclude:
        with open_corpus(settings.data) as corpus:
            id_ranges = data.id_ranges(corpus, mixture=settings.data.mixture)
            recurring = branches.recurrences(settings, segment, id_ranges)
    if as_json:
        print_json(
            {
                "run": str(run),
                "segment": segment.segment,
                "from_step": segment.start_step,
                "at": at,
                "changes": {key: list(both) for key, both in changed.items()},
                "exclusions": [list(e) for e in segment.exclusions],
                "recurring": recurring,
            }
        )
        return
    print(f"segment {segment.segment} of {run} goes on from step {segment.start_step}")
    for key, (old, new) in changed.items():
        print(f"  from step {at}: {key}: {old} -> {new}")
    for exclusion in segment.exclusions:
        print(f"  sequence {stream.told(exclusion)} are left out")
    if recurring is not None:
        again = recurring["epochs"]
        of_corpora = again if isinstance(again, dict) else {"": again}
        epochs = "; ".join(
            f"{name and f'{name} '}{', '.join(map(str, found)) or 'none'}"
            for name, found in of_corpora.items()
        )
        print(
            f"  {len(recurring['sequence_ids'])} sequences; they come again in these later "
            f"epochs of the planned run: {epochs}"
        )
    print(f"`palm-jax train {run}/config.yaml --run {run}` goes on")
