"""`palm-jax train`."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import sys
from typing import Annotated, Any

import typer

from palm_jax import config, meeting
from palm_jax.cli.terms import (
    GAVE_UP,
    STOPPED_BY_SIGNAL,
    AllowEnvironment,
    AsJson,
    Overrides,
    in_bytes,
    prepare_jax,
    print_json,
)
from palm_jax.errors import WrongInput
from palm_jax.plan import memory, parameters
from palm_jax.supervise import worker

MESH_AXES = ("data", "fsdp", "tensor")


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
    supervise: Annotated[
        bool, typer.Option(help="Start again after a crash, a hang or a preemption.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train CONFIG in the folder RUN, from its newest checkpoint if there is one."""
    settings = config.load(config_file, overrides or ())
    if dry_run:
        _dry_run(settings, run, as_json)
        return
    if run is None:
        raise WrongInput("--run is missing: name the folder that the run is to be written to")
    is_kept = worker.is_kept()
    if not is_kept and (supervise or _has_peers()):
        raise typer.Exit(_keep(settings, run, supervise))
    meeting.check_host(settings.distributed)
    news = worker.News(settings.supervise)
    prepare_jax(settings)

    from palm_jax import console, processes, signals
    from palm_jax import train as training

    def tell(event: str, fields: dict[str, Any]) -> None:
        progress(event, fields)
        news(event, fields)

    with (
        contextlib.closing(news),
        console.TrainingProgress(settings.steps) as progress,
        signals.stop_request(progress.signal, echo_s=1.0 if is_kept else 0.0) as stop_requested,
        processes.shared_fate(),
    ):
        outcome = training.train(
            settings,
            run,
            tell=tell,
            stop_requested=stop_requested,
            allow_environment=allow_environment,
        )
    if as_json:
        evaluation = outcome.evaluation and outcome.evaluation.fields()
        print_json(
            {
                "run": run,
                "step": outcome.step,
                "loss": outcome.loss,
                "eval": evaluation,
                "tokens": outcome.tokens,
                "state_digest": outcome.state_digest,
                "gave_up": outcome.gave_up,
            }
        )
    elif outcome.evaluation is not None:
        _print_result(settings, outcome)
    if outcome.gave_up is not None:
        print(f"the run gave up at step {outcome.step}: {outcome.gave_up}", file=sys.stderr)
        raise typer.Exit(GAVE_UP)
    if outcome.stopped_by is not None:
        raise typer.Exit(STOPPED_BY_SIGNAL)


def _has_peers() -> bool:
    """Whether XLA would abort this process when another one of the run is lost."""
    announced = meeting.announced()
    if announced is not None:
        return announced[1] > 1
    return any(pathlib.Path("/dev").glob("accel[0-9]*")) or pathlib.Path("/dev/vfio/0").exists()


def _keep(settings: config.Config, run: str, supervise: bool) -> int:
    from palm_jax.supervise.keeper import Keeper

    arguments = [given for given in sys.argv[1:] if given != "--supervise"]
    command = [sys.executable, "-m", "palm_jax.cli", *arguments]
    return Keeper(command, settings, run, restarts=supervise).keep()


def _print_result(settings: config.Config, outcome: Any) -> None:
    from palm_jax.corpus import corpora

    print(f"{outcome.tokens:,} tokens in {outcome.step} steps; last loss {outcome.loss:.4f} nats")
    model = outcome.evaluation.bits_per_byte
    bigram = corpora.contents(settings.data).bigram_bits_per_byte
    line = f"held-out text: {model:.4f} bits per byte"
    if bigram:
        line += f"; a bigram model has {bigram:.4f} (ratio {model / bigram:.3f})"
    print(line)
    for name, found in (outcome.evaluation.corpora or {}).items():
        print(f"  {name}: {found:.4f}")
    print(f"state digest {outcome.state_digest}")


def _dry_run(settings: config.Config, run: str | None, as_json: bool) -> None:
    from palm_jax import sharding
    from palm_jax.corpus import corpora
    from palm_jax.plan import flops
    from palm_jax.record import checkpoints

    num_processes = _num_processes(settings.mesh)
    corpus = None
    if corpora.are_there(settings.data):
        from palm_jax import train as training

        corpus = corpora.contents(settings.data)
        training.check_corpus(settings, corpus)
    tokens = flops.tokens_by_stage(settings)
    state = memory.state_bytes(settings)
    per_parameter = memory.optimizer_bytes_per_parameter(settings)
    free = checkpoints.free_bytes(run or ".")
    ramp = settings.data.ramp
    stages = [
        {"start_step": start, "batch_size": size, "tokens": count}
        for start, size, count in zip(ramp.starts, ramp.sizes, tokens, strict=True)
    ]
    num_parameters = parameters.number(settings.model)
    on_device = memory.on_each_device(settings, sharding.RULES)
    mesh = settings.mesh
    if as_json:
        print_json(
            {
                "parameters": num_parameters,
                "tokens": sum(tokens),
                "stages": stages,
                "mesh": {
                    **{axis: getattr(mesh, axis) for axis in MESH_AXES},
                    "devices": _num_devices(mesh),
                    "processes": num_processes,
                },
                "device_bytes": {
                    **on_device.arrays,
                    "counters": on_device.counters,
                    "batch": on_device.batch,
                    "controls": on_device.controls,
                    "state": on_device.state,
                    "total": on_device.total,
                },
                "state_bytes": state,
                "checkpoint_bytes": state,
                "optimizer_bytes_per_parameter": per_parameter,
                "free_disk_bytes": free,
                "corpus": corpus and corpus.digest,
                "config": settings.model_dump(mode="json"),
            }
        )
        return
    print(config.to_yaml(settings))
    print(f"{num_parameters:,} parameters")
    for stage in stages:
        print(
            f"from step {stage['start_step']}: {stage['batch_size']} sequences a step, "
            f"{stage['tokens']:,} tokens"
        )
    print(f"{sum(tokens):,} tokens in all")
    print(f"\n{_mesh_table(settings, sharding.RULES, num_processes)}\n")
    print(f"{_memory_table(on_device)}\n")
    print(
        f"{settings.optimizer.name} keeps {per_parameter:.2f} bytes for each parameter, beside the "
        f"parameter's own {memory.stored_bytes(settings.precision)}"
    )
    print(f"{in_bytes(state)} of state in all, and as much for each checkpoint kept")
    kept = settings.checkpoint.keep_last + settings.checkpoint.keep_best
    enough = "" if free > (kept + 1) * state else f"; too little for {kept} of them and one more"
    print(f"{in_bytes(free)} free on the disk{enough}")
    if corpus is None:
        print(f"{settings.data.told} is not there yet: `palm-jax data prepare`")


def _num_processes(mesh: config.Mesh) -> int | None:
    """Of the run, where the environment tells.

    Raises:
      WrongInput: they cannot share the devices.
    """
    text = os.environ.get(meeting.NUM_PROCESSES)
    if text is None:
        return None
    devices = _num_devices(mesh)
    if not re.fullmatch("[1-9][0-9]{0,8}", text) or devices % int(text):
        raise WrongInput(
            f"{meeting.NUM_PROCESSES}={text}, but mesh.data x mesh.fsdp x mesh.tensor = {devices} "
            "devices; give a number that divides them"
        )
    return int(text)


def _num_devices(mesh: config.Mesh) -> int:
    return math.prod(getattr(mesh, axis) for axis in MESH_AXES)


def _mesh_table(
    settings: config.Config, rules: dict[str, str | None], num_processes: int | None
) -> str:
    """The mesh, and what each of its axes cuts."""
    mesh, batch = settings.mesh, max(settings.data.ramp.sizes)
    product = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in MESH_AXES)
    title = f"mesh: {product} = {_num_devices(mesh):,} device{'s' * (_num_devices(mesh) > 1)}"
    if num_processes is not None:
        title += f", {_num_devices(mesh) // num_processes:,} in each of {num_processes:,} processes"
    names = {"D": "width", "H": "heads", "G": "keys and values"}
    names |= {"F": "feed-forward", "V": "vocabulary"}
    whole, here = parameters.sizes(settings.model), memory.sizes_on_device(settings, rules)
    rows = [
        ("axis", "size", "cuts", "whole", "on each device"),
        ("data x fsdp", mesh.data_parallel, "batch", batch, batch // mesh.data_parallel),
        *(
            (axis, getattr(mesh, axis), names.get(letter, letter), whole[letter], here[letter])
            for letter, axis in rules.items()
            if axis is not None and letter in whole
        ),
    ]
    return f"{title}\n{_aligned(rows, text_columns=(0, 2))}"


def _memory_table(on_device: memory.DeviceBytes) -> str:
    """Bytes of a device by kind of array and group of parameters."""
    kinds = on_device.arrays
    groups = kinds["parameters"]
    rows = [
        ("on each device", *(kind.replace("_", " ") for kind in kinds)),
        *(
            (group.replace("_", "-"), *(in_bytes(kinds[kind][group]) for kind in kinds))
            for group in groups
        ),
        ("sum", *(in_bytes(sum(kinds[kind].values())) for kind in kinds)),
    ]
    return (
        f"{_aligned(rows, text_columns=(0,))}\n"
        f"{in_bytes(on_device.state)} of state on each device; {in_bytes(on_device.total)} with "
        "the gradient and the largest batch, activations not counted"
    )


def _aligned(rows: list[tuple[Any, ...]], text_columns: tuple[int, ...]) -> str:
    """Lines of a table: text to the left, numbers to the right."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if place in text_columns else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
