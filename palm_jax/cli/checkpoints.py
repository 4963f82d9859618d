"""`palm-jax checkpoints`: which a run has, whether they are sound, and which may go."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palm_jax.cli.terms import (
    DAMAGED,
    AsJson,
    Run,
    check_is_run,
    in_bytes,
    prepare_one_cpu,
    print_json,
)
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.upkeep import GoesOn, Place, Pruned, Shelf, Verified

app = typer.Typer(help="A run's checkpoints: list, verify, remove.", no_args_is_help=True)


@app.command("list", epilog="Example: palm-jax checkpoints list runs/quickstart")
def list_(run: Run, as_json: AsJson = False) -> None:
    """The checkpoints of RUN and its branches: size, held-out loss, digest, who needs them.

    Reads their records, not their arrays: `verify` does that. May be called while RUN trains;
    a checkpoint that is being written then looks like one that was never finished.
    """
    check_is_run(run)

    import shutil

    from palm_jax import upkeep
    from palm_jax.record import folder

    shelves = list(upkeep.shelves(folder.RunFolder(run.absolute())))
    in_checkpoints = sum(entry.bytes for shelf in shelves for entry in shelf.entries)
    in_leftovers = sum(size for shelf in shelves for size in shelf.leftovers.values())
    free = shutil.disk_usage(run).free
    if as_json:
        print_json(
            {
                "run": str(run),
                "segments": [_plain_shelf(shelf) for shelf in shelves],
                "bytes": in_checkpoints + in_leftovers,
                "checkpoint_bytes": in_checkpoints,
                "leftover_bytes": in_leftovers,
                "free_disk_bytes": free,
            }
        )
        return
    for shelf in shelves:
        _print_shelf(shelf)
    count = sum(len(shelf.entries) for shelf in shelves)
    print(
        f"{count} checkpoint{'s'[: count != 1]}, {in_bytes(in_checkpoints)}; leftovers, "
        f"{in_bytes(in_leftovers)}; {in_bytes(free)} free on the disk"
    )


def _plain_shelf(shelf: Shelf) -> dict[str, Any]:
    return {
        "branch": shelf.branch,
        "segment": shelf.segment,
        "start_step": shelf.start_step,
        "checkpoints": [
            {**dataclasses.asdict(entry), "needed": shelf.needed.get(entry.step, [])}
            for entry in shelf.entries
        ],
        "leftovers": [{"name": name, "bytes": size} for name, size in shelf.leftovers.items()],
    }


def _print_shelf(shelf: Shelf) -> None:
    print(f"{_where(shelf.branch, shelf.segment)}, from step {shelf.start_step}")
    if shelf.entries:
        print("      step        size   held-out loss   state digest")
    for entry in shelf.entries:
        loss = "-" if entry.held_out_loss is None else f"{entry.held_out_loss:.4f}"
        notes = [] if entry.problem is None else [f"DAMAGED: {entry.problem}"]
        notes += shelf.needed.get(entry.step, [])
        print(
            f"{entry.step:10d}  {in_bytes(entry.bytes):>10}   {loss:>13}   "
            f"{entry.digest or '-':<16}  {'; '.join(notes)}".rstrip()
        )
    for name, size in shelf.leftovers.items():
        print(f"  left behind: {name}, {in_bytes(size)}")
    if not (shelf.entries or shelf.leftovers):
        print("  no checkpoint")


def _where(branch: str | None, segment: int) -> str:
    return f"segment {segment}" if branch is None else f"branch {branch}, segment {segment}"


@app.command(epilog="Example: palm-jax checkpoints verify runs/quickstart --step 200")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Only checkpoints of this step.")] = None,
    segment: Annotated[
        int | None,
        typer.Option(min=0, help="Only of this segment of RUN; the default: all, and branches."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read checkpoints completely and compare every array with the digest of its record.

    And the digest of each whole state with the logbook's. One array at a time, on the CPU:
    neither the devices nor the mesh of RUN are needed.
    Exit code 0: all are sound; 1: one is damaged; 3: one cannot be read here.
    """
    check_is_run(run)
    _prepare(run)

    from palm_jax import console, upkeep
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    places = upkeep.places(there, segment, step)
    with console.VerificationProgress() as progress:
        verifier = upkeep.Verifier(_told_to(progress))
        found = [verifier(place) for place in places]
        # Training may have removed one while it was read.
        found = [x for x in found if not x.problems or x.place.path.exists()]
        damaged = [x for x in found if x.problems]
        of = dict.fromkeys((x.place.branch, x.place.run) for x in damaged)
        going_on = {
            branch: upkeep.goes_on(which, lambda place: not verifier(place).problems)
            for branch, which in of
        }
    if as_json:
        print_json(
            {
                "run": str(run),
                "checkpoints": [_plain_verified(x) for x in found],
                "damaged": len(damaged),
                "goes_on": [
                    {"branch": branch, **_plain_going_on(where)}
                    for branch, where in going_on.items()
                ],
            }
        )
    else:
        for x in found:
            _print_verified(x)
        if not found:
            print(f"{run} has no checkpoints")
        for branch, where in going_on.items():
            path = run if branch is None else pathlib.Path(dict(of)[branch].path)
            print(_told_going_on(path, branch, where))
    if damaged:
        raise typer.Exit(DAMAGED)


def _prepare(run: pathlib.Path) -> None:
    from palm_jax.record import folder

    prepare_one_cpu(folder.RunFolder(run).config())


def _told_to(progress: Any) -> Any:
    def tell(place: Place, done: int, total: int) -> None:
        where = _where(place.branch, place.segment)
        progress(f"checkpoint {place.step} of {where}", done, total)

    return tell


def _plain_verified(x: Verified) -> dict[str, Any]:
    return {
        "branch": x.place.branch,
        "segment": x.place.segment,
        "step": x.place.step,
        "bytes": x.bytes,
        "ok": not x.problems,
        "problems": x.problems,
        "in_logbook": x.in_logbook,
    }


def _print_verified(x: Verified) -> None:
    said = f"{_where(x.place.branch, x.place.segment)}, checkpoint {x.place.step}"
    if x.problems:
        more = f"; and {len(x.problems) - 5} more" if len(x.problems) > 5 else ""
        print(f"{said}: DAMAGED: {'; '.join(x.problems[:5])}{more}")
    else:
        print(f"{said}: ok" + ("" if x.in_logbook else " (the logbook does not tell of it)"))


def _plain_going_on(where: GoesOn) -> dict[str, Any]:
    return {
        "run": str(where.run.path),
        "segment": where.segment,
        "checkpoint": None if where.from_config else where.step,
        "damaged": where.damaged,
    }


def _told_going_on(run: pathlib.Path, branch: str | None, where: GoesOn) -> str:
    who = "the run" if branch is None else f"branch {branch}"
    source = (
        "step 0, which the config gives"
        if where.from_config
        else f"checkpoint {where.step} of segment {where.segment}"
    )
    if where.run.path != run.absolute() and not where.from_config:
        source += f" of {where.run.path}"
    if not where.damaged:
        return f"{who} goes on from {source}"
    newer = ", ".join(map(str, where.damaged))
    return (
        f"{who} would go on from {source}, but not before the damaged {newer} "
        f"{'are' if len(where.damaged) > 1 else 'is'} gone: "
        f"`palm-jax checkpoints prune {run} --damaged` removes them"
    )


@app.command(epilog="Example: palm-jax checkpoints prune runs/quickstart --keep-last 3 --dry-run")
def prune(
    run: Run,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Remove all but so many of each segment, the newest.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Multiples of step K stay, too.")
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Read them all, and remove those that are damaged.")
    ] = False,
    also_pinned: Annotated[
        bool, typer.Option("--also-pinned", help="Even those that incidents pin for a diagnosis.")
    ] = False,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Only of this segment; the default: of all.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints of RUN, and what saves that never ended have left behind.

    Always kept are those that the run goes on from, that a segment or a branch departs from,
    and that incidents pin. Refused while RUN trains. The branches' own checkpoints stay: name a
    branch's folder as RUN to remove those.
    """
    check_is_run(run)
    if keep_last is None and not damaged:
        option = "" if keep_every is None else f"--keep-every {keep_every} alone removes nothing: "
        raise WrongInput(f"{option}give --keep-last N, --damaged or both")
    if damaged:
        _prepare(run)

    from palm_jax import console, upkeep
    from palm_jax.record import folder

    with console.VerificationProgress() as progress:
        pruned = upkeep.prune(
            folder.RunFolder(run.absolute()),
            upkeep.Wish(keep_last, keep_every, damaged, also_pinned),
            segment=segment,
            dry_run=dry_run,
            verifier=upkeep.Verifier(_told_to(progress)),
        )
    freed = sum(x.bytes for x in pruned)
    if as_json:
        print_json(
            {
                "run": str(run),
                "dry_run": dry_run,
                "segments": [dataclasses.asdict(x) for x in pruned],
                "freed_bytes": freed,
            }
        )
        return
    for x in pruned:
        _print_pruned(x, dry_run)
    print(f"{'would free' if dry_run else 'freed'} {in_bytes(freed)}")


def _print_pruned(x: Pruned, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(map(str, x.steps)) or "no checkpoint"
    left = "none is left" if x.newest_left is None else f"the newest left is {x.newest_left}"
    print(f"segment {x.segment}: {verb} {steps}; {left}")
    for step, problems in x.damaged.items():
        print(f"  {step} is damaged: {'; '.join(problems[:5])}")
    for step, reasons in x.kept.items():
        print(f"  kept {step}: {'; '.join(reasons)}")
    for step in x.unreadable:
        print(f"  kept {step}: its record is damaged, and --damaged was not given")
    for name in x.leftovers:
        print(f"  {verb} what was left behind: {name}")
