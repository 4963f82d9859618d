"""`palm-jax replay` and `palm-jax bundle`."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.terms import (
    DIFFERENT,
    AllowEnvironment,
    AsJson,
    Run,
    check_is_run,
    in_bytes,
    interval,
    moved,
    prepare_jax,
    print_json,
)
from palm_jax.record import folder
from palm_jax.replay import archives


def replay(
    run: Run,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A up to, not with, B.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Which history; the default is the last.", min=0)
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Which attempt of each step; the default is the last.", min=1)
    ] = None,
    allow_environment: AllowEnvironment = False,
    as_json: AsJson = False,
) -> None:
    """Execute steps again and compare every computed field with the logbook, bit for bit.

    RUN is a run's folder, a branch's, or a bundle; nothing in it changes.
    Exit code 0: identical; 1: different; 3: cannot tell here.
    """
    start, stop = interval("--steps", steps)
    with tempfile.TemporaryDirectory() as scratch:
        where = archives.unpacked(run, pathlib.Path(scratch))
        check_is_run(where)
        settings = moved(config.load(where / folder.CONFIG), overrides or (), "replayed")
        prepare_jax(settings)

        from palm_jax import console
        from palm_jax.replay import bundles
        from palm_jax.replay import replay as replaying

        there = folder.RunFolder(where.absolute())
        with (
            bundles.open_rows(there, settings) as corpus,
            console.ReplayProgress(start, stop) as progress,
        ):
            comparison = replaying.replay(
                there,
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
        print_json({"run": str(run), **fields})
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
            f"first difference: step {first.step}, {first.field}: recorded "
            f"{_short(first.recorded)}, replayed {_short(first.replayed)}"
        )
        for part in first.microbatches[:10]:
            print(
                f"  microbatch {part.number} (lane {part.lane}) has another gradient; the run "
                f"computed it on data-parallel device {part.device}, in process {part.process}"
            )
        if len(first.microbatches) > 10:
            print(f"  and {len(first.microbatches) - 10} more")
    verdict = "identical" if comparison.identical else "DIFFERENT"
    digests = comparison.compared_digests
    states = f", and the state digest of checkpoints {', '.join(map(str, digests))}"
    print(
        f"{verdict}: {comparison.compared_steps} steps x {len(comparison.fields)} fields compared"
        + (states if digests else "")
    )


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else str(value)


def bundle(
    run: Run,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A up to, not with, B.")],
    out: Annotated[str, typer.Option(help="A new folder, or a new archive NAME.tar.gz.")],
    segment: Annotated[
        int | None, typer.Option(help="Which history; the default is the last.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pack steps A:B of RUN with all that a replay needs, the corpus' rows among it.

    `palm-jax replay OUT --steps A:B` then works on another machine, without the corpus.
    """
    check_is_run(run)
    start, stop = interval("--steps", steps)
    settings = config.load(run / folder.CONFIG)
    prepare_jax(settings)

    from palm_jax.corpus.corpora import open_corpus
    from palm_jax.replay import bundles

    with open_corpus(settings.data) as corpus:
        made = bundles.create(
            folder.RunFolder(run.absolute()), start, stop, out, corpus=corpus, segment=segment
        )
    files = [made] if made.is_file() else [p for p in made.rglob("*") if p.is_file()]
    size = sum(path.stat().st_size for path in files)
    if as_json:
        print_json({"run": str(run), "steps": [start, stop], "out": out, "bytes": size})
    else:
        print(f"{out}: steps {start}:{stop} of {run}, {in_bytes(size)}")
        print(f"`palm-jax replay {out} --steps {start}:{stop}` replays it anywhere")
