"""`palm-jax spikes diagnose`: control experiments on a spike, and what they say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.terms import (
    STOPPED_BY_SIGNAL,
    AllowEnvironment,
    AsJson,
    Run,
    check_is_run,
    moved,
    prepare_jax,
    print_json,
)
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.diagnosis.arms import Plan
    from palm_jax.diagnosis.diagnose import Diagnosis


def diagnose(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=0, help="A step of the spike; default: the newest incident.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; default: the newest with a spike.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="Of all arms together; 4,000.")
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, help="Steps of an arm before the onset; 20.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(min=1, help="Steps of an arm after the onset, at most; 80.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only tell what would be executed.")] = False,
    arm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Execute one arm of the plan.")
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Execute nothing; a verdict from what is there.")
    ] = False,
    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="OUT",
            help="Only write a folder, or an archive to unpack, where any arm can be executed.",
        ),
    ] = None,
    own_clocks: Annotated[
        bool,
        typer.Option(
            "--own-clocks", help="B's earlier states keep their rate and beta2, not the spike's."
        ),
    ] = False,
    other_rate: Annotated[
        bool, typer.Option("--other-rate", help="With --own-clocks: though the rate was another.")
    ] = False,
    allow_environment: AllowEnvironment = False,
    as_json: AsJson = False,
) -> None:
    """Why did RUN spike? Short replays with one thing changed at a time, and a verdict.

    Writes RUN/diagnoses only; called again it goes on where it was. docs/spikes.md says what the
    arms are and what the verdicts mean. Exit code 0: a verdict, `inconclusive` among them.
    """
    if sum([plan, arm is not None, collect, bundle is not None]) > 1:
        raise WrongInput("--plan, --arm, --collect and --bundle exclude each other; give one")
    check_is_run(run)
    settings = moved(config.load(run / "config.yaml"), overrides or (), "diagnosed")
    prepare_jax(settings)

    from palm_jax import console, signals
    from palm_jax import report as reports
    from palm_jax.diagnosis import diagnose as diagnosing
    from palm_jax.record import folder
    from palm_jax.replay import bundles

    there = folder.RunFolder(run.absolute())
    located = diagnosing.locate(there, settings.spikes, at, segment)
    if located is None:
        told = f"{run}: no incident; name a step with --at to diagnose one all the same"
        if as_json:
            print_json({"run": str(run), "verdict": "no incident", "votes": {}, "arms": {}})
        else:
            print(told)
        return
    with bundles.open_rows(there, settings) as corpus:
        made = diagnosing.make_plan(
            there,
            settings,
            corpus,
            located,
            before=before or diagnosing.BEFORE,
            after=after or diagnosing.AFTER,
            budget=budget or diagnosing.BUDGET,
            pinned=not own_clocks,
            other_rate=other_rate,
        )
        if plan:
            _tell_plan(str(run), made, as_json)
            return
        case = diagnosing.Diagnosis(there, settings, corpus, located, made, allow_environment)
        if bundle is not None:
            from palm_jax.diagnosis import bundles as bundling

            out = bundling.create(case, bundle)
            if as_json:
                print_json({"run": str(run), "bundle": str(out)})
            else:
                print(f"{out}: `palm-jax spikes diagnose {out} --at {made.onset} --arm NAME`")
            return
        stopped = None
        if not collect:
            with (
                console.DiagnosisProgress(made.seconds_per_step) as progress,
                signals.stop_request(progress.signal) as stop_requested,
            ):
                if arm is None:
                    stopped = case.conduct(progress, stop_requested, progress.decided)
                else:
                    chosen = case.plan.arm(arm)
                    if chosen is None:
                        names = ", ".join(repr(a.name) for a in case.plan.arms)
                        raise WrongInput(f"--arm {arm}: there is none; there are {names}")
                    if not case.execute(chosen, progress, stop_requested):
                        stopped = stop_requested()
        report = {
            "run": str(run),
            **case.report(str(run)),
            "folder": str(case.case.path),
            "report": str(reports.write(run, segment=made.segment)[0]),
        }
    if as_json:
        print_json(report)
    else:
        _tell(report, case)
    if stopped is not None:
        raise typer.Exit(STOPPED_BY_SIGNAL)


def _tell_plan(run: str, plan: Plan, as_json: bool) -> None:
    from palm_jax.diagnosis import arms

    seconds = plan.seconds_per_step
    if as_json:
        print_json({"run": run, **plan.model_dump(mode="json")})
        return
    print(
        f"spike at step {plan.onset}: fork before step {plan.fork}, arms of {plan.horizon} steps, "
        f"suspect data of steps {plan.fork} to {plan.window_stop - 1}"
    )
    print(f"earlier states: steps {', '.join(map(str, plan.earlier[:5]))}; E from {plan.healthy}")
    print("  arm        steps   estimated  what")
    shown: dict[str, int] = {}
    for arm in plan.arms:
        title = arms.TITLES[arm.kind]
        key = arm.name.rsplit(" ", 1)[0] if arm.kind == "D" else arm.kind
        shown[key] = shown.get(key, 0) + 1
        if shown[key] > 1:
            continue
        name = key.removeprefix("D ") if arm.kind == "D" else arm.name
        cost = "" if seconds is None else f"{_minutes(arm.num_steps * seconds):>9}"
        print(f"  {name:22.22} {arm.num_steps:5d} {cost:>11}  {title}")
    print(
        f"up to {arms.NUM_REPLICATES} of each letter are executed, in this order as far as the "
        f"verdict needs them; at most {plan.budget} steps"
        + (
            ""
            if seconds is None
            else f", {_minutes(plan.budget * seconds)} as the run's steps took"
        )
    )


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _tell(report: dict[str, Any], case: Diagnosis) -> None:
    from palm_jax.diagnosis import arms
    from palm_jax.diagnosis.votes import Votes

    print(f"spike at step {report['onset']} of segment {report['segment']}")
    for problem in report["damaged_checkpoints"]:
        print(f"passed over: {problem}")
    if report["threshold"] is not None:
        print(
            f"clean steps rise by less than {report['noise']:.4f} nats of held-out loss; what "
            f"rises by {report['threshold']:.4f} has this spike"
        )
    print("  arm                        spiked    peak rise (median)")
    for kind, title in arms.TITLES.items():
        named: dict[str, list[Any]] = {}
        for arm in case.plan.of_kind(kind):
            if arm.name in report["arms"]:
                key = arm.name.removeprefix("D ").rsplit(" ", 1)[0] if kind == "D" else kind
                named.setdefault(key, []).append(report["arms"][arm.name])
        for key, scores in named.items():
            spiked = sum(s["spiked"] for s in scores)
            peaks = sorted(s["peak"] for s in scores)
            peak = peaks[len(peaks) // 2]
            votes = str(Votes(spiked, len(scores)))
            shown = f"{peak:.4f}" if math.isfinite(peak) else "not finite"
            print(f"  {key:10.22} {votes:>26}  {shown:>10}  {title}")
    for vital in report["first_vitals"][:3]:
        print(
            f"{vital['vital']} left its range at step {vital['step']}, {vital['before_loss']} "
            f"steps before the loss: {vital['value']:.4g}, usually {vital['level']:.4g}"
        )
    for step, share in report["shared_second_moments"].items():
        print(f"of the second moments at the fork, {share:.0%} are those of step {step}'s state")
    if (found := report["forensics"]) is not None:
        _tell_suspects(found)
    print(f"\nverdict: {report['verdict']} ({report['because']})")
    if report["next_arms"]:
        print(f"to decide, execute more of: {', '.join(report['next_arms'])}; raise --budget")
    advice = report["recommendation"]
    print(f"recommended: {advice['treatment']} ({advice['why']})")
    for command in advice["commands"]:
        print(f"  {command}")
    print(
        f"{report['steps_executed']} steps executed; all numbers are in {report['folder']}; "
        f"curves and text in {report['report']}"
    )


def _tell_suspects(found: dict[str, Any]) -> None:
    norms = found["window_gradient_norm"], found["reference_gradient_norm"]
    beside = "" if None in norms else f"; gradient norm {norms[0]:.3g}, others {norms[1]:.3g}"
    print(
        f"suspect sequences at the fork: loss {found['window_loss']:.3f}, others "
        f"{found['reference_loss']:.3f} nats{beside}; {found['num_unusual']} are unusual"
    )
    if found["gradients"]:
        print("  batches at the fork: step, gradient norm, cosine with the one before, kurtosis")
    for g in found["gradients"]:
        cosine = "" if g["cosine"] is None else f"{float(g['cosine']):+.3f}"
        print(
            f"    {g['step']:7d} {float(g['norm']):10.4g} {cosine:>8} {float(g['kurtosis']):9.3g}"
        )
    for suspect in found["suspects"][:3]:
        why = ", ".join(f"{name} {float(s):+.0f} sigma" for name, s in suspect["unusual"].items())
        print(f"  step {suspect['step']}, row {suspect['row']}: {why}")
        print(f"    {'; '.join(suspect['sources']) or 'source unknown'}")
        print(f"    {suspect['excerpt']!r}")
