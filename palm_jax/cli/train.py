"""`palm-jax train`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.terms import (
    STOPPED_BY_SIGNAL,
    AllowEnvironment,
    AsJson,
    Overrides,
    in_bytes,
    prepare_jax,
    print_json,
)
from palm_jax.errors import WrongInput


def train(
    config_file: Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    overrides: Overrides = None,
    # Text: as a path, gs://bucket would lose a slash.
    run: Annotated[
        str | None, typer.Option(help="The run's folder; continued if it has a run.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Say what would be trained and what it needs, and stop.")
    ] = False,
    allow_environment: AllowEnvironment = False,
    as_json: AsJson = False,
) -> None:
    """Train CONFIG in the folder RUN, from its newest checkpoint if there is one."""
    settings = config.load(config_file, overrides or ())
    if dry_run:
        _dry_run(settings, run, as_json)
        return
    if run is None:
        raise WrongInput("--run is missing: name the folder that the run is to be written to")
    prepare_jax(settings)

    from palm_jax import console, signals
    from palm_jax import train as training

    with (
        console.TrainingProgress(settings.steps) as progress,
        signals.stop_request(progress.signal) as stop_requested,
    ):
        outcome = training.train(
            settings,
            run,
            tell=progress,
            stop_requested=stop_requested,
            allow_environment=allow_environment,
        )
    if as_json:
        evaluation = outcome.evaluation and dataclasses.asdict(outcome.evaluation)
        print_json(
            {
                "run": run,
                "step": outcome.step,
                "loss": outcome.loss,
                "eval": evaluation,
                "tokens": outcome.tokens,
                "state_digest": outcome.state_digest,
            }
        )
    elif outcome.evaluation is not None:
        _print_result(settings, outcome)
    if outcome.stopped_by is not None:
        raise typer.Exit(STOPPED_BY_SIGNAL)


def _print_result(settings: config.Config, outcome: Any) -> None:
    from palm_jax.corpus import manifest

    print(f"{outcome.tokens:,} tokens in {outcome.step} steps; last loss {outcome.loss:.4f} nats")
    model = outcome.evaluation.bits_per_byte
    bigram = manifest.read(pathlib.Path(settings.data.corpus)).bigram_bits_per_byte
    line = f"held-out text: {model:.4f} bits per byte"
    if bigram is not None:
        line += f"; a bigram model has {bigram:.4f} (ratio {model / bigram:.3f})"
    print(line)
    print(f"state digest {outcome.state_digest}")


def _dry_run(settings: config.Config, run: str | None, as_json: bool) -> None:
    from palm_jax.corpus import manifest
    from palm_jax.plan import flops
    from palm_jax.record import checkpoints

    corpus = None
    if pathlib.Path(settings.data.corpus).exists():
        from palm_jax import train as training

        corpus = manifest.read(pathlib.Path(settings.data.corpus))
        training.check_corpus(settings, corpus)
    tokens = flops.tokens_by_stage(settings)
    state = flops.state_bytes(settings.model, settings.optimizer)
    free = checkpoints.free_bytes(run or ".")
    ramp = settings.data.ramp
    stages = [
        {"start_step": start, "batch_size": size, "tokens": count}
        for start, size, count in zip(ramp.starts, ramp.sizes, tokens, strict=True)
    ]
    parameters = flops.num_parameters(settings.model)
    if as_json:
        print_json(
            {
                "parameters": parameters,
                "tokens": sum(tokens),
                "stages": stages,
                "state_bytes": state,
                "checkpoint_bytes": state,
                "free_disk_bytes": free,
                "corpus": corpus and corpus.digest,
                "config": settings.model_dump(mode="json"),
            }
        )
        return
    print(config.to_yaml(settings))
    print(f"{parameters:,} parameters")
    for stage in stages:
        print(
            f"from step {stage['start_step']}: {stage['batch_size']} sequences a step, "
            f"{stage['tokens']:,} tokens"
        )
    print(f"{sum(tokens):,} tokens in all")
    print(f"{in_bytes(state)} of train state, and as much for each checkpoint kept")
    kept = settings.checkpoint.keep_last + settings.checkpoint.keep_best
    enough = "" if free > (kept + 1) * state else f"; too little for {kept} of them and one more"
    print(f"{in_bytes(free)} free on the disk{enough}")
    if corpus is None:
        print(f"data.corpus={settings.data.corpus} is not there yet: `palm-jax data prepare`")
