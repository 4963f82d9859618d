"""`palm-jax compile`."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import queue
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from palm_jax import config, start
from palm_jax.cli.terms import AsJson, Overrides, in_bytes, print_json
from palm_jax.errors import CannotDo
from palm_jax.tpu import topologies

if TYPE_CHECKING:
    from palm_jax.tpu.compile import Answer, Candidate

DOES_NOT_FIT, INTERRUPTED = 1, 130


def compile(
    config_file: Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    topology: Annotated[
        str, typer.Option(metavar="KIND:AxB", help="One slice: v4:12x16x16, v5e:4x4, ...")
    ],
    overrides: Overrides = None,
    slices: Annotated[int, typer.Option(help="Slices of that topology.")] = 1,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try remat x microbatch x mesh, for the largest batch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the train step of CONFIG for TPUs that are not there: does it fit, and how fast?

    Needs libtpu, and neither a TPU nor a corpus. Every stage of the batch ramp is compiled for
    all chips of the topology; mesh.emulated_devices plays no part. Times are the compiler's
    estimates. Exit code 0: all stages fit (of a sweep: one does); 1: not.
    """
    described = topologies.parse(topology, slices)
    settings = config.load(config_file, [*(overrides or ()), "mesh.emulated_devices=null"])
    _prepare(settings)

    from palm_jax.tpu import compile as compiling

    topologies.libtpu_version()
    compiling.check_mesh(settings, described)
    if sweep:
        _sweep(settings, described, as_json)
    else:
        _stages(settings, described, as_json)


def _prepare(settings: config.Config) -> None:
    """Set what must be set before JAX is imported, in a process that only compiles."""
    os.environ.update(topologies.environment())
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    import jax

    # Programs for devices that are not there can be written to the cache, but not read again.
    jax.config.update("jax_enable_compilation_cache", False)
    precision = start.matmul_precision(settings.precision, "tpu")
    if precision is not None:
        jax.config.update("jax_default_matmul_precision", precision)


# --- running ------------------------------------------------------------------------------


def _aside(call: collections.abc.Callable[[], Answer]) -> Answer:
    """The result of a call in a thread of its own.

    The compiler does not hear signals, but the thread that waits for it does.
    """
    results: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # raised again where it is waited for
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    answer, error = results.get()
    if error is not None:
        raise error
    assert answer is not None
    return answer


def _end_interrupted() -> NoReturn:
    """End while the compiler is at work in another thread, which an ordinary exit may not survive.

    What is known has been printed.
    """
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stages(settings: config.Config, topology: topologies.Topology, as_json: bool) -> None:
    from palm_jax.tpu import compile as compiling

    stages: list[Answer] = []
    beside: list[Answer] = []  # `fast`, where `canonical` does not fit
    fast = config.override(settings, ["numerics.reduction=fast"])
    interrupted = False
    sizes = compiling.batch_sizes(settings)
    try:
        for size in sizes:
            _say(f"compiling for {size} sequences on {topology.num_chips} chips")
            stages.append(_aside(functools.partial(compiling.answer, settings, topology, size)))
            _say(f"  {_verdict(stages[-1])}")
            if stages[-1].out_of_memory and settings.numerics.reduction == "canonical":
                _say("  the same with numerics.reduction=fast")
                beside.append(_aside(functools.partial(compiling.answer, fast, topology, size)))
                _say(f"  {_verdict(beside[-1])}")
    except KeyboardInterrupt:
        if not stages:
            _end_interrupted()
        interrupted = True
    fits = len(stages) == len(sizes) and all(stage.fits for stage in stages)
    helps = (
        compiling.advice(settings, topology.num_slices)
        if any(stage.out_of_memory for stage in stages)
        else []
    )
    if as_json:
        largest = max(stages, key=lambda stage: stage.batch_size)
        print_json(
            {
                **dataclasses.asdict(largest),
                "fits": fits,
                "topology": topology.name,
                "slices": topology.num_slices,
                "stages": [dataclasses.asdict(stage) for stage in stages],
                "with_fast_reduction": [dataclasses.asdict(stage) for stage in beside],
                "would_help": helps,
                "interrupted": interrupted,
            }
        )
    else:
        _print_stages(settings, topology, stages, beside, helps)
    if interrupted:
        _end_interrupted()
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


def _sweep(settings: config.Config, topology: topologies.Topology, as_json: bool) -> None:
    from palm_jax.tpu import compile as compiling

    tries, num_more = compiling.candidates(settings, topology)
    size = max(settings.data.ramp.sizes)
    more = f"; the grid has {num_more} more, farther from the config" if num_more else ""
    _say(f"{len(tries)} programs for {size} sequences on {topology.num_chips} chips{more}")
    topology.devices()  # one that libtpu does not know is refused for all of them
    done: list[tuple[Candidate, Answer]] = []
    interrupted = False
    try:
        for number, this in enumerate(tries, 1):
            _say(f"{number}/{len(tries)}: {_changes(this)}")
            call = functools.partial(compiling.answer, this.settings, topology, size)
            try:
                answer = _aside(call)
            except CannotDo as error:  # JAX finds no such mesh in the network
                _say(f"  left out: {error}")
                continue
            done.append((this, answer))
            _say(f"  {_verdict(answer)}")
    except KeyboardInterrupt:
        if not done:
            _end_interrupted()
        interrupted = True
    ranked = compiling.by_merit(done)
    fits = any(answer.fits for _, answer in ranked)
    if as_json:
        print_json(
            {
                "fits": fits,
                "topology": topology.name,
                "slices": topology.num_slices,
                "chips": topology.num_chips,
                "libtpu": topologies.libtpu_version(),
                "batch_size": size,
                "results": [
                    {
                        "overrides": list(this.overrides),
                        "remat": this.settings.model.remat,
                        "microbatch": this.settings.numerics.microbatch,
                        **dataclasses.asdict(answer),
                    }
                    for this, answer in ranked
                ],
                "left_out": num_more,
                "interrupted": interrupted,
            }
        )
    else:
        _print_sweep(topology, size, ranked)
    if interrupted:
        _end_interrupted()
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


# --- printing -----------------------------------------------------------------------------


def _verdict(answer: Answer) -> str:
    said = f"after {answer.compile_s:.0f} s"
    if answer.fits:
        return f"fits, {_of_limit(answer)} ({said})"
    if answer.out_of_memory:
        return f"does not fit, {_of_limit(answer)} ({said})"
    return f"refused {said}: {answer.reason}"


def _of_limit(answer: Answer) -> str:
    if answer.hbm_peak_bytes is None:
        return "-"
    return f"{in_bytes(answer.hbm_peak_bytes)} of {in_bytes(answer.hbm_limit_bytes)}"


def _number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _size(value: int | None) -> str:
    return "-" if value is None else in_bytes(value)


def _large(count: float | None, unit: str) -> str:
    """1.3e12 as 1.30 T."""
    if count is None:
        return "-"
    steps = min(6, max(0, int(math.log10(count)) // 3)) if count >= 1 else 0
    return f"{count / 1000**steps:.3g} {' kMGTPE'[steps].strip()}{unit}"


_BETWEEN_SLICES = "sent between slices"
_ROWS: tuple[tuple[str, collections.abc.Callable[[Any], str]], ...] = (
    ("sequences a step", lambda a: str(a.batch_size)),
    ("numerics.reduction", lambda a: a.reduction),
    ("fits", lambda a: "yes" if a.fits else "no"),
    ("arguments", lambda a: _size(a.hbm_argument_bytes)),
    ("  of which results reuse", lambda a: _size(a.hbm_alias_bytes)),
    ("temporaries", lambda a: _size(a.hbm_temp_bytes)),
    ("peak", lambda a: _size(a.hbm_peak_bytes)),
    ("  where a program may take", lambda a: _size(a.hbm_limit_bytes)),
    ("model FLOPs a step", lambda a: _large(a.flops_per_step, "FLOP")),
    ("  per chip", lambda a: _large(a.flops_per_chip, "FLOP")),
    ("estimated cycles", lambda a: _large(a.estimated_cycles, "cycles")),
    ("splash kernels at peak", lambda a: _large(a.attention_kernel_cycles or None, "cycles")),
    ("estimated step", lambda a: _number(a.estimated_step_s, unit=" s")),
    ("  utilisation that would be", lambda a: _number(a.estimated_mfu, ".1%")),
    (_BETWEEN_SLICES, lambda a: _size(a.crosses_slices_bytes)),
    ("compile time", lambda a: _number(a.compile_s, ".1f", " s")),
)


def _print_stages(
    settings: config.Config,
    topology: topologies.Topology,
    stages: list[Answer],
    beside: list[Answer],
    helps: list[str],
) -> None:
    import rich.box
    import rich.table

    console = _console()
    mesh = " x ".join(f"{name} {size}" for name, size in stages[0].mesh.items())
    print(f"{_where(topology)}: {topology.num_chips} chips, {mesh}; libtpu {stages[0].libtpu}")
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    columns = [a for stage in stages for a in (stage, *_of_size(beside, stage.batch_size))]
    for _ in columns:
        table.add_column(justify="right", no_wrap=True)
    for title, cell in _ROWS:
        cells = [cell(answer) for answer in columns]
        if title == _BETWEEN_SLICES and topology.num_slices == 1:
            continue
        if any(text != "-" for text in cells):
            table.add_row(title, *cells)
    console.print(table)
    for answer in columns:
        if answer.reason is not None:
            print(f"{answer.batch_size} sequences, {answer.reduction}: {answer.reason}")
    compiled = [answer for answer in columns if answer.fits]
    if compiled:
        _print_collectives(console, compiled[-1])
        print("Cycles, seconds and utilisation are the compiler's estimate, not a measurement;")
        print("it leaves out communication.")
        if settings.model.attention == "splash":
            print(
                "It leaves out the splash kernels too: their products of matrices, at the peak of"
            )
            print("the matrix units, are added to the seconds.")
        if topology.num_slices > 1:
            print(
                "A collective that spans slices is counted in two parts, within and between them."
            )
    if helps:
        print("What would help, whether enough or not:")
        for line in helps:
            print(f"  {line}")


def _console() -> Any:
    import rich.console

    # In a file no line is too long; rich would cut them at 80.
    return rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def _where(topology: topologies.Topology) -> str:
    return f"{topology.num_slices} x {topology.name}" if topology.num_slices > 1 else topology.name


def _of_size(answers: list[Answer], batch_size: int) -> list[Answer]:
    return [answer for answer in answers if answer.batch_size == batch_size]


def _print_collectives(console: Any, answer: Answer) -> None:
    import rich.box
    import rich.table

    table = rich.table.Table(
        box=rich.box.SIMPLE,
        pad_edge=False,
        title=f"Collectives of one chip in a step of {answer.batch_size} sequences",
        title_justify="left",
    )
    for name in ("kind", "over"):
        table.add_column(name, no_wrap=True)
    for name in ("number", "operands", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for t in answer.collectives:
        table.add_row(
            t.kind,
            " x ".join(t.axes) or "-",
            f"{t.count:,}",
            in_bytes(t.operand_bytes),
            in_bytes(t.sent_bytes),
            "between slices" if t.crosses_slices else "",
        )
    if answer.collectives:
        console.print(table)


def _changes(candidate: Candidate) -> str:
    """What a candidate changes in the config, but for the ramp, of which all take one stage."""
    changes = [text for text in candidate.overrides if not text.startswith("data.ramp.")]
    return " ".join(changes) or "as configured"


def _print_sweep(
    topology: topologies.Topology, size: int, ranked: list[tuple[Candidate, Answer]]
) -> None:
    import rich.box
    import rich.table

    console = _console()
    print(
        f"{_where(topology)}: {topology.num_chips} chips, {size} sequences a step; "
        f"libtpu {topologies.libtpu_version()}"
    )
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for name in ("remat", "microbatch", "fsdp x tensor", "fits", "peak", "step", "utilisation"):
        table.add_column(name, justify="right", no_wrap=True)
    for this, a in ranked:
        table.add_row(
            this.settings.model.remat,
            str(this.settings.numerics.microbatch),
            f"{a.mesh['fsdp']} x {a.mesh['tensor']}",
            "yes" if a.fits else "no" if a.out_of_memory else "refused",
            _size(a.hbm_peak_bytes),
            _number(a.estimated_step_s, unit=" s"),
            _number(a.estimated_mfu, ".1%"),
        )
    console.print(table)
    for this, a in ranked:
        if not a.fits and not a.out_of_memory:
            print(f"{_changes(this)}: {a.reason}")
    if ranked and ranked[0][1].fits:
        print(f"best: {_changes(ranked[0][0])}")
    print("Seconds and utilisation are the compiler's estimate, without communication.")
