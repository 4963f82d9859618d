"""`palm-jax plan goodput|spikes`."""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.plan.showing import needed, positive, show
from palm_jax.cli.terms import AsJson, check_is_run
from palm_jax.errors import WrongInput
from palm_jax.plan import mitigation, outages, pictures
from palm_jax.plan import reliability as failing
from palm_jax.plan.answer import Answer, Table, hours, number, pairs, percent

POISSON = "failures come at any moment with equal chance, whatever happened before"
NEEDED = "give --mtbf-hours, --save-hours and --recovery-hours, or a --preset"
CLUSTERS = (1_000, 3_000, 10_000, 30_000, 100_000)


def goodput(
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Between failures of the whole cluster.")
    ] = None,
    save_hours: Annotated[
        float | None, typer.Option(help="That a save holds up the training.")
    ] = None,
    recovery_hours: Annotated[
        float | None, typer.Option(help="From a failure until training goes on.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(failing.PRESETS)}.")
    ] = None,
    chip_mtbf_years: Annotated[
        float | None, typer.Option(help="Instead of --mtbf-hours, with --chips.")
    ] = None,
    chips: Annotated[int | None, typer.Option(help="In the cluster.")] = None,
    log: Annotated[
        pathlib.Path | None,
        typer.Option(help="Instead: a CSV with a column `hours`, one row an interruption."),
    ] = None,
    log_hours: Annotated[
        float | None, typer.Option(help="How long that log was kept; default: its last row.")
    ] = None,
    write_hours: Annotated[
        float, typer.Option(help="Asynchronous saving: hours of writing behind the training.")
    ] = 0.0,
    durable_save_hours: Annotated[
        float | None, typer.Option(help="A second, slower place: that a save there holds up.")
    ] = None,
    durable_recovery_hours: Annotated[
        float | None, typer.Option(help="Recovery from the second place.")
    ] = None,
    lost_share: Annotated[
        float, typer.Option(help="Failures that take the first place with them.")
    ] = 0.2,
    interval_hours: Annotated[
        float | None, typer.Option(help="Of training between saves; default: Young's.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Of the run that is played through.")] = None,
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="That are played through.")] = 100,
    seed: Annotated[int, typer.Option(help="Of what is played through.")] = 0,
    run: Annotated[
        pathlib.Path | None,
        typer.Option(help="Instead of all that: a run's folder, whose time is accounted for."),
    ] = None,
    picture: Annotated[
        pathlib.Path | None, typer.Option(help="SVG: goodput by saving and recovery time.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How often to save, and what share of the time is training that is kept."""
    if run is not None:
        _measured(run, as_json)
        return
    assumed = [POISSON]
    saving = None
    if preset is not None:
        if preset not in failing.PRESETS:
            raise WrongInput(f"--preset {preset}: one of {', '.join(failing.PRESETS)}")
        chosen = failing.PRESETS[preset]
        saving, days = chosen.saving, days or chosen.days
        assumed.insert(0, f"{chosen.name}: {chosen.source}")
    mtbf, lines = _mtbf(mtbf_hours, chip_mtbf_years, chips, log, log_hours)
    assumed += lines
    if mtbf is not None and saving is not None:
        saving = dataclasses.replace(saving, mtbf_hours=mtbf)
    why = NEEDED
    saving = failing.Saving(
        mtbf_hours=needed("--mtbf-hours", mtbf if saving is None else saving.mtbf_hours, why),
        save_hours=needed(
            "--save-hours", saving.save_hours if saving and save_hours is None else save_hours, why
        ),
        recovery_hours=_given(recovery_hours, None if saving is None else saving.recovery_hours),
        write_hours=write_hours,
    )
    young, daly, best = failing.young(saving), failing.daly(saving), failing.best_interval(saving)
    interval = positive("--interval-hours", interval_hours) or max(young, write_hours)
    if interval + saving.save_hours < write_hours:
        raise WrongInput(
            f"--interval-hours {interval:g}: a save is written for {write_hours:g} h, and the next "
            "would begin before that; make the interval longer"
        )
    length = 24 * (positive("--days", days) or 54)
    durable = None
    if durable_save_hours is not None or durable_recovery_hours is not None:
        why = "--durable-save-hours and --durable-recovery-hours go together"
        slow = failing.Saving(
            mtbf_hours=saving.mtbf_hours / max(lost_share, 1e-9),
            save_hours=needed("--durable-save-hours", durable_save_hours, why),
            recovery_hours=needed("--durable-recovery-hours", durable_recovery_hours, why),
        )
        times = max(1, round(failing.young(slow) / interval))
        durable = outages.Durable(times * interval, slow, lost_share)
        assumed.append(
            f"{lost_share:.0%} of the failures take the first place with them; the second is "
            f"written every {hours(durable.interval_hours)}, {times} times as rarely"
        )
    played = outages.play(saving, interval, hours=length, durable=durable, runs=runs, seed=seed)
    first = failing.first_order(saving, interval)
    valid = first > 0 and durable is None and not write_hours
    if first <= 0:
        assumed.append(
            "the first-order form is below 0 here, where a cycle is not short against the time "
            "between failures: it is left out"
        )
    figures: dict[str, Any] = {
        "mtbf_hours": saving.mtbf_hours,
        "save_hours": saving.save_hours,
        "recovery_hours": saving.recovery_hours,
        "write_hours": saving.write_hours,
        "interval_hours": interval,
        "young_hours": young,
        "daly_hours": daly,
        "best_interval_hours": best,
        "goodput": first if valid else None,
        "goodput_renewal": None if durable else failing.renewal(saving, interval),
        "goodput_renewal_failing": None if durable else failing.renewal_failing(saving, interval),
        "goodput_simulated": played.goodput,
        "goodput_simulated_5_percent": played.low,
        "goodput_simulated_95_percent": played.high,
        "failures": played.failures,
        "days": length / 24,
        "durable_interval_hours": None if durable is None else durable.interval_hours,
    }
    rows = pairs(
        "",
        ("between failures", hours(saving.mtbf_hours)),
        ("a save holds up", hours(saving.save_hours)),
        ("  and is written for", hours(write_hours)) if write_hours else None,
        ("recovery", hours(saving.recovery_hours)),
        ("interval: Young", hours(young)),
        ("  Daly", hours(daly)),
        ("  best by the renewal form", hours(best)),
        ("  taken here", hours(interval)),
        ("goodput: first order", percent(figures["goodput"])),
        ("  renewal", percent(figures["goodput_renewal"])),
        ("  renewal, recovery fails too", percent(figures["goodput_renewal_failing"])),
        (
            f"  played through, {runs} runs of {length / 24:.3g} days",
            f"{played.goodput:.1%} ({played.low:.1%} to {played.high:.1%})",
        ),
        ("failures a run", number(played.failures)),
    )
    tables = [rows]
    if durable is None:
        tables.append(_by_size(saving, chips))
    if picture is not None:
        picture.write_text(pictures.sensitivity(saving), encoding="utf-8")
        figures["picture"] = str(picture)
        assumed.append(f"picture: {picture}")
    show(Answer("Goodput", figures, tuple(tables), tuple(assumed)), as_json)


def _given(recovery_hours: float | None, otherwise: float | None) -> float:
    """Unlike the others, recovery may take no time."""
    found = otherwise if recovery_hours is None else recovery_hours
    if found is None:
        raise WrongInput(f"--recovery-hours is missing: {NEEDED}")
    return found


def _mtbf(
    mtbf_hours: float | None,
    chip_mtbf_years: float | None,
    chips: int | None,
    log: pathlib.Path | None,
    log_hours: float | None,
) -> tuple[float | None, list[str]]:
    """Hours between failures, from whichever of the options is given."""
    ways = [way for way in (mtbf_hours, chip_mtbf_years, log) if way is not None]
    if len(ways) > 1:
        raise WrongInput("--mtbf-hours, --chip-mtbf-years and --log: give one of them")
    if log is not None:
        count, last = _interruptions(log)
        observed = positive("--log-hours", log_hours) or last
        if observed < last:
            raise WrongInput(f"--log-hours {observed:g}: {log} goes on to {last:g} h")
        low, high = failing.mtbf_interval(count, observed)
        said = f"{count} interruptions in {observed:g} h: between {low:.3g} and {high:.3g} h (90%)"
        return observed / count, [f"{log}: {said}"]
    if chip_mtbf_years is not None:
        years = needed("--chip-mtbf-years", chip_mtbf_years, "")
        count_ = int(needed("--chips", chips, "--chip-mtbf-years is of one of them"))
        return failing.cluster_mtbf(years, count_), [
            f"each of {count_:,} chips fails every {years:g} years, and stops all"
        ]
    return positive("--mtbf-hours", mtbf_hours), []


def _interruptions(path: pathlib.Path) -> tuple[int, float]:
    """How many, and the hour of the last."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            times = [float(row["hours"]) for row in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError) as error:
        raise WrongInput(
            f"--log {path}: it must be a CSV with a header and a number in column `hours`, "
            f"since the start, in each row ({error})"
        ) from error
    except OSError as error:
        raise WrongInput(f"--log {path}: {error.strerror}") from error
    if not times or not all(math.isfinite(time) and time > 0 for time in times):
        raise WrongInput(f"--log {path}: it must have rows, with `hours` finite and above 0")
    return len(times), max(times)


def _by_size(saving: failing.Saving, chips: int | None) -> Table:
    """The same chips, saving and recovery in clusters of other sizes."""
    base = chips or 10_000
    rows = []
    for size in sorted({*CLUSTERS, base}):
        there = failing.Saving(
            saving.mtbf_hours * base / size,
            saving.save_hours,
            saving.recovery_hours,
            saving.write_hours,
        )
        best = failing.best_interval(there)
        rows.append(
            (
                f"{size:,}" if chips else f"x {size / base:g}",
                hours(there.mtbf_hours),
                hours(best),
                percent(failing.renewal_failing(there, best)),
            )
        )
    title = "By the number of chips" if chips else "By the size of the cluster, against this one"
    headings = ("chips" if chips else "size", "between failures", "best interval", "goodput")
    return Table(title, headings, tuple(rows))


def _measured(run: pathlib.Path, as_json: bool) -> None:
    check_is_run(run)
    from palm_jax.record import time_spent

    spent = time_spent.of(run)
    figures = spent.figures()
    rows = [
        (name.removesuffix("_seconds").replace("_", " "), hours(value / 3600), percent(share))
        for name, value, share in spent.rows()
    ]
    table = Table("", ("", "time", "share"), tuple(rows))
    show(Answer(f"{run}: where the time went", figures, (table,), time_spent.ASSUMED), as_json)


def spikes(
    config_file: Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    count: Annotated[int, typer.Option("--spikes", min=0, help="In the whole run.")] = 20,
    rewind_steps: Annotated[
        int | None, typer.Option(min=1, help="Behind the onset; default: spikes.rewind_steps.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps; default: checkpoint.every.")
    ] = None,
    noticed_after_steps: Annotated[int, typer.Option(min=0, help="From onset to action.")] = 20,
    excluded_batches: Annotated[
        int | None, typer.Option(min=0, help="For each; default: spikes.exclude_batches.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="To have it in hours.")] = None,
    as_json: AsJson = False,
) -> None:
    """What going back behind spikes costs: steps computed again, and data never seen."""
    settings = config.load(config_file)
    every = checkpoint_every or settings.checkpoint.every
    rewind = rewind_steps or settings.spikes.rewind_steps
    excluded = settings.spikes.exclude_batches if excluded_batches is None else excluded_batches
    rows, found = [], None
    for spacing in sorted({every, 100, 500, 1000}):
        one = mitigation.mitigation(
            count,
            settings.steps,
            rewind_steps=rewind,
            checkpoint_every=spacing,
            noticed_after_steps=noticed_after_steps,
            excluded_batches=excluded,
            step_seconds=positive("--step-seconds", step_seconds),
        )
        found = one if spacing == every else found
        rows.append(
            (
                f"{spacing:,}" + (" (this config)" if spacing == every else ""),
                f"{one.steps_redone:,.0f}",
                f"{one.share_of_run:.2%}",
                "-" if one.hours is None else hours(one.hours),
            )
        )
    assert found is not None
    sequences = found.batches_left_out * max(settings.data.ramp.sizes)
    left_out = sequences * settings.model.sequence_length
    figures = {
        "spikes": count,
        "steps_redone": found.steps_redone,
        "share_of_run": found.share_of_run,
        "hours": found.hours,
        "batches_left_out": found.batches_left_out,
        "tokens_left_out_at_most": left_out,
        "checkpoint_every_steps": every,
    }
    headings = ("checkpoint every", "steps computed again", "of the run", "time")
    table = Table(f"{count} spikes", headings, tuple(rows))
    assumed = (
        f"each is noticed {noticed_after_steps} steps after its onset; the run goes back to the "
        f"newest checkpoint at least {rewind} steps before it and leaves out {excluded} batches "
        "(PaLM, section 5.1: about 100 steps, 200 to 500 batches)",
        f"at most {number(left_out)} tokens are never seen, if all happens at the largest batch; "
        "they cost no time",
    )
    show(Answer(str(config_file), figures, (table,), assumed), as_json)
