"""The command line: parses, calls, prints.

Exit codes: 0 done, 1 the answer is no, 2 wrong input, 3 the environment cannot do it,
4 stopped by a signal after saving, 5 a defect of palm-jax. With --json, stdout holds one
JSON object and nothing else; whatever is said on the way goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import pathlib
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput

DIFFERENT, STOPPED_BY_SIGNAL, OUR_DEFECT = 1, 4, 5
# What any access to a file may meet, a print to stdout too; other errors would be ours.
_SYSTEM_REFUSES = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    errno.ENAMETOOLONG,
}

app = typer.Typer(
    name="palm-jax",
    help="Train a language model the PaLM way, and replay any step of it bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Prepare a corpus, and look at what a step trains on.")
app.add_typer(data_app, name="data", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Run the command line; a failure is one message and its exit code."""
    try:
        app()
    except (WrongInput, CannotDo) as error:
        _end(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _SYSTEM_REFUSES:
            _end(f"error: {error}; make room, or name another place", CannotDo.exit_code)
        message = f"{traceback.format_exc()}This is a defect of palm-jax, not of your input."
        _end(message, OUR_DEFECT)


def _end(message: str, exit_code: int) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it; the exit code still tells
        print(message, file=sys.stderr)
    sys.exit(exit_code)


@app.command(
    epilog="Example: palm-jax train configs/quickstart.yaml steps=200 --run runs/quickstart"
)
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
    allow_environment: Annotated[
        bool, typer.Option(help="Continue although the environment may give other bits.")
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
    _start(settings)

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
        _print_json(
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
        _print_json(
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
    print(f"{_bytes(state)} of train state, and as much for each checkpoint kept")
    kept = settings.checkpoint.keep_last + settings.checkpoint.keep_best
    enough = "" if free > (kept + 1) * state else f"; too little for {kept} of them and one more"
    print(f"{_bytes(free)} free on the disk{enough}")
    if corpus is None:
        print(f"data.corpus={settings.data.corpus} is not there yet: `palm-jax data prepare`")


@data_app.command(
    epilog="Example: palm-jax data prepare --source 'text:books/*.txt' --out corpora/books"
)
def prepare(
    source: Annotated[str, typer.Option(help="stdlib, or text:GLOB.")],
    out: Annotated[str, typer.Option(help="The corpus folder to write.")],
    sequence_length: Annotated[int, typer.Option(help="Targets per sequence.")] = 256,
    held_out: Annotated[float, typer.Option(help="Fraction of documents held out.")] = 0.005,
    document_separator: Annotated[
        str | None, typer.Option(help="Split each text file into documents at this string.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Orders the documents.")] = 0,
    workers: Annotated[int, typer.Option(help="Threads; the result does not depend on it.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Turn text into a corpus: tokenised, split, shuffled and cut into sequences."""
    from palm_jax import console
    from palm_jax.corpus import prepare as preparation

    with console.PreparationProgress() as progress:
        manifest = preparation.prepare(
            source=source,
            out=out,
            sequence_length=sequence_length,
            seed=seed,
            held_out=held_out,
            document_separator=document_separator,
            workers=workers,
            progress=progress,
        )
    if as_json:
        _print_json({"out": out, **manifest.model_dump(mode="json")})
        return
    print(f"{out}: corpus {manifest.digest[:16]}, {manifest.documents_read} documents")
    print(
        f"  empty and left out: {manifest.empty_documents}; not UTF-8, kept byte for byte: "
        f"{manifest.invalid_utf8_documents}; longest: {_bytes(manifest.longest_document_bytes)}"
    )
    for name, split in manifest.splits.items():
        print(
            f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, "
            f"{split.sequences:,} sequences of {manifest.sequence_length}; "
            f"{split.tail_tokens} tokens at the end left out"
        )
    if manifest.bigram_bits_per_byte is not None:
        print(f"  a bigram model: {manifest.bigram_bits_per_byte:.4f} bits per held-out byte")


@data_app.command(epilog="Example: palm-jax data show runs/quickstart --step 100 --rows 2")
def show(
    where: Annotated[pathlib.Path, typer.Argument(metavar="RUN|CONFIG")],
    step: Annotated[int, typer.Option(help="The step.", min=0)],
    rows: Annotated[int, typer.Option(help="How many sequences to print.", min=0)] = 4,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print what step STEP of a run, or of a config, trains on."""
    from palm_jax import data
    from palm_jax import train as training
    from palm_jax.corpus.reader import Corpus
    from palm_jax.record import folder

    is_run = folder.is_run(where)
    settings = config.load(where / folder.CONFIG if is_run else where, overrides or ())
    if is_run:
        changes = config.differences(folder.RunFolder(where).config(), settings)
        if other := [key for key in changes if not config.may_change(key)]:
            raise WrongInput(
                f"{where} is a run of another {', '.join(other)}; leave that out, or show the "
                "config file with it"
            )
    with Corpus.open(settings.data.corpus) as corpus:
        training.check_corpus(settings, corpus.manifest)
        if is_run and folder.RunFolder(where).manifest().digest != corpus.manifest.digest:
            raise WrongInput(
                f"data.corpus={settings.data.corpus} is not the corpus that {where} was "
                "trained on; name that one with data.corpus=..."
            )
        batch = data.batch(corpus, settings.seed, step, settings.data.ramp)
        if as_json:
            _print_json(
                {
                    "step": step,
                    "first_position": batch.first_position,
                    "batch_size": len(batch.sequence_ids),
                    "sequence_ids": batch.sequence_ids.tolist(),
                    "digest": batch.digest,
                }
            )
            return
        print(
            f"step {step}: {len(batch.sequence_ids)} sequences from position "
            f"{batch.first_position}, digest {batch.digest}"
        )
        for row, sequence_id in enumerate(batch.sequence_ids.tolist()[:rows]):
            spans = corpus.documents("train", sequence_id)
            print(
                f"\n--- row {row}: sequence {sequence_id}, from "
                + ", ".join(f"{span.name} [{span.start}:{span.stop}]" for span in spans)
            )
            print(corpus.decode(batch.tokens[row]))
        if rows < len(batch.sequence_ids):
            print(f"\n({len(batch.sequence_ids) - rows} more; --rows N shows them)")


@app.command(epilog="Example: palm-jax replay runs/quickstart --steps 100:140")
def replay(
    run: Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A up to, not with, B.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="mesh.* of another mesh, or data.corpus."),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Which history; the default is the last.", min=0)
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Which attempt of each step; the default is the last.", min=1)
    ] = None,
    allow_environment: Annotated[
        bool, typer.Option(help="Replay although the environment may give other bits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Execute steps again and compare every computed field with the logbook, bit for bit.

    Changes nothing in the run. Exit code 0: identical; 1: different; 3: cannot tell here.
    """
    from palm_jax.record import folder

    if not folder.is_run(run):
        raise WrongInput(f"{run} is not a run's folder: it has no {folder.CONFIG}")
    start, stop = _interval("--steps", steps)
    recorded = config.load(run / folder.CONFIG)
    settings = config.override(recorded, overrides or ())
    for key in config.differences(recorded, settings):
        if not key.startswith("mesh.") and key != "data.corpus":
            raise WrongInput(
                f"{key} would change what is replayed; a replay takes mesh.* and data.corpus"
            )
    _start(settings)

    from palm_jax import console
    from palm_jax.corpus.reader import Corpus
    from palm_jax.replay import replay as replaying

    with (
        Corpus.open(settings.data.corpus) as corpus,
        console.ReplayProgress(start, stop) as progress,
    ):
        comparison = replaying.replay(
            folder.RunFolder(run.absolute()),
            start,
            stop,
            corpus=corpus,
            segment=segment,
            attempt=attempt,
            mesh=settings.mesh,
            allow_environment=allow_environment,
            tell=progress,
        )
    if as_json:
        fields = dataclasses.asdict(comparison)
        del fields["rows"]
        _print_json({"run": str(run), **fields})
    else:
        _print_comparison(comparison)
    if not comparison.identical:
        raise typer.Exit(DIFFERENT)


def _print_comparison(comparison: Any) -> None:
    for problem in comparison.damaged_checkpoints:
        print(f"passed over: {problem}")
    came = (
        "the config, step 0"
        if comparison.from_checkpoint is None
        else f"checkpoint {comparison.from_checkpoint}"
    )
    print(f"replayed from {came}; {comparison.expectation}")
    for key, (old, new) in comparison.environment_differences.items():
        print(f"environment: {key} was {old}, is {new}")
    different = [row for row in comparison.rows if row[2]]
    for step, compared, names in different[:10]:
        print(f"  step {step}: {len(names)} of {compared} fields differ: {', '.join(names)}")
    if len(different) > 10:
        print(f"  and {len(different) - 10} more steps")
    first = comparison.first_difference
    if first is not None:
        print(
            f"first difference: step {first.step}, {first.field}: recorded {first.recorded}, "
            f"replayed {first.replayed}"
        )
    verdict = "identical" if comparison.identical else "DIFFERENT"
    digests = comparison.compared_digests
    states = f", and the state digest of checkpoints {', '.join(map(str, digests))}"
    print(
        f"{verdict}: {comparison.compared_steps} steps x {len(comparison.fields)} fields compared"
        + (states if digests else "")
    )


def _interval(option: str, text: str) -> tuple[int, int]:
    start, colon, stop = text.partition(":")
    if not colon or not (start.isdecimal() and stop.isdecimal()) or int(start) >= int(stop):
        raise WrongInput(f"{option} {text}: give A:B with whole numbers, 0 <= A < B")
    return int(start), int(stop)


def _start(settings: config.Config) -> None:
    from palm_jax import start

    # Orbax tells of every file it writes, and of a failure in pages; it reaches us as an exception.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A loss may be NaN; that is for the logbook and the curves to show.
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)
    start.start(settings)


def _print_json(fields: dict[str, Any]) -> None:
    def strict(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: strict(inner) for key, inner in value.items()}
        return [strict(v) for v in value] if isinstance(value, list | tuple) else value

    print(json.dumps(strict(fields), allow_nan=False))


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


if __name__ == "__main__":
    main()
