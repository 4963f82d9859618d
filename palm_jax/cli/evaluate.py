"""`palm-jax eval`."""

from __future__ import annotations

import collections.abc
import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palm_jax.cli.terms import AsJson, Run, check_is_run, moved, prepare_jax, print_json
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.use.breakdown import Breakdown
    from palm_jax.use.scoring import Scorer
    from palm_jax.use.trained import Trained, TrainedRun

SHOWN = 5  # documents at each end of the table


def evaluate(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Before which step; again for more. The default: newest checkpoint."
        ),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of the corpus.")] = "held_out",
    corpus: Annotated[
        pathlib.Path | None,
        typer.Option(help="Evaluate on another corpus, of the same tokenizer and length."),
    ] = None,
    text: Annotated[
        list[pathlib.Path] | None,
        typer.Option(help="Evaluate on a file as it is; again for more."),
    ] = None,
    choices: Annotated[
        pathlib.Path | None,
        typer.Option(help='Answer lines {"context": ..., "choices": [...], "answer": 0}.'),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Of lm-eval (the extra `eval`), by name; again for more."),
    ] = None,
    tasks_folder: Annotated[
        pathlib.Path | None, typer.Option(help="With tasks of your own for lm-eval.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents of each task; the default is all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Loss, perplexity, bits per byte and accuracy of RUN's model; nothing in the run changes.

    Every sequence counts once. As a whole, by document, and by position in the sequence; several
    steps give the curve. On the run's own corpus the loss is the one that the logbook has of the
    step, in the same bits where the environment is the same.
    """
    if sum(given is not None for given in (corpus, text or None, choices, tasks or None)) > 1:
        raise WrongInput("--corpus, --text, --choices and --tasks are different things; give one")
    if (tasks_folder or limit) and not tasks:
        raise WrongInput("--tasks-folder and --limit are about tasks; name some with --tasks")
    check_is_run(run)
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "evaluated")
    prepare_jax(settings)

    from palm_jax.use import trained

    with trained.opened(there, settings, segment) as found:
        steps = sorted(set(step or [found.newest_step()]))
        if choices is not None:
            _choose(run, found, steps, choices, as_json)
        elif tasks:
            _do_tasks(run, found, steps, tasks, tasks_folder, limit, as_json)
        else:
            _evaluate(run, found, steps, split, corpus, text or [], as_json)


def _moments(
    found: TrainedRun, steps: list[int]
) -> collections.abc.Iterator[tuple[Trained, Scorer]]:
    """The parameters before each of some steps, one after the other, and what scores with them."""
    from palm_jax.use import scoring

    scorers: dict[int, Scorer] = {}  # by program; the course keeps these
    for step in steps:
        moment = found.at(step)
        for problem in moment.damaged:
            print(f"passed over: {problem}", file=sys.stderr)
        start = moment.from_checkpoint or 0
        if start != step:
            print(
                f"step {step} has no checkpoint: steps {start}:{step} were executed again",
                file=sys.stderr,
            )
        if id(moment.program) not in scorers:
            made = scoring.make_scorer(moment.program, found.end_of_document)
            scorers[id(moment.program)] = made
        yield moment, scorers[id(moment.program)]


def _evaluate(
    run: pathlib.Path,
    found: TrainedRun,
    steps: list[int],
    split: str,
    other: pathlib.Path | None,
    texts: list[pathlib.Path],
    as_json: bool,
) -> None:
    import contextlib

    from palm_jax.use import breakdown, material, trained

    with contextlib.ExitStack() as stack:
        if texts:
            length = found.course.base.model.sequence_length
            corpus, what = None, material.of_texts(texts, found.tokenizer(), length)
        else:
            corpus = trained.corpus_to_evaluate(found, other, stack)
            what = material.of_split(corpus, split)
        about: dict[str, Any] = {
            "run": str(run),
            "segment": found.segment,
            "split": what.split,
            "corpus_digest": None if corpus is None else corpus.manifest.digest,
            "texts": [str(path) for path in texts],
            "also_trained_on": None
            if corpus is None or found.corpus is None
            else material.also_trained_on(corpus, split, found.corpus),
        }
        recorded = trained.recorded_losses(found, corpus, what.split)
        evaluations = [
            (moment.step, breakdown.break_down(scorer, moment.params, what, corpus))
            for moment, scorer in _moments(found, steps)
        ]
        if as_json:
            about["evaluations"] = [
                _plain(at, parts, recorded.get(at)) for at, parts in evaluations
            ]
            print_json(about)
        else:
            _show(about, evaluations, recorded)


def _plain(step: int, parts: Breakdown, recorded: float | None) -> dict[str, Any]:
    return {
        "step": step,
        **parts.evaluation.fields(),
        "accuracy": parts.accuracy,
        "bytes": parts.bytes,
        "recorded_loss": recorded,
        "loss_by_position": parts.positions.losses().tolist(),
        "accuracy_by_position": parts.positions.accuracies().tolist(),
        "documents": [dataclasses.asdict(parts.document(n)) for n in parts.by_loss()],
    }


def _show(
    about: dict[str, Any], evaluations: list[tuple[int, Breakdown]], recorded: dict[int, float]
) -> None:
    import rich.console
    import rich.markup
    import rich.table

    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    step, last = evaluations[-1]
    whole = last.evaluation
    where = (
        ", ".join(about["texts"])
        if about["texts"]
        else f"{whole.split} of corpus {about['corpus_digest'][:16]}"
    )
    print(
        f"{about['run']}, segment {about['segment']}, on {where}: {whole.sequences:,} sequences, "
        f"{whole.targets:,} targets, {last.bytes:,} bytes"
    )
    if about["also_trained_on"] is not None:
        count = last.material.num_documents
        print(f"of its {count:,} documents {about['also_trained_on']:,} were trained on as well")
    curve = rich.table.Table()
    for heading in ("step", "loss", "perplexity", "bits per byte", "accuracy", "in the logbook"):
        curve.add_column(heading, justify="right")
    for at, parts in evaluations:
        found, then = parts.evaluation, recorded.get(at)
        noted = ""
        if then is not None:
            noted = "the same" if then == found.loss else f"{then:.9g}"
        curve.add_row(
            str(at),
            f"{found.loss:.4f}",
            f"{found.perplexity:.3f}",
            f"{found.bits_per_byte:.4f}",
            f"{parts.accuracy:.2%}",
            noted,
        )
    console.print(curve)
    for name, bits in (whole.corpora or {}).items():
        print(f"{name}: {bits:.4f} bits per byte")
    print(f"by position in the sequence, step {step}")
    by_position = rich.table.Table()
    for heading in ("position", "loss", "accuracy"):
        by_position.add_column(heading, justify="right")
    for own, loss, accuracy in last.position_buckets():
        these = str(own.start) if len(own) == 1 else f"{own.start} to {own.stop - 1}"
        by_position.add_row(these, f"{loss:.4f}", f"{accuracy:.2%}")
    console.print(by_position)
    order = last.by_loss()
    few = order if len(order) <= 2 * SHOWN else [*order[:SHOWN], *order[-SHOWN:]]
    which = "" if few is order else f": the {SHOWN} worst and the {SHOWN} best of {len(order):,}"
    print(f"by document, step {step}{which}")
    by_document = rich.table.Table()
    by_document.add_column("document", overflow="fold")
    for heading in ("targets", "loss", "bits per byte", "accuracy"):
        by_document.add_column(heading, justify="right")
    for place, number in enumerate(few):
        document = last.document(number)
        per_byte = "" if document.bits_per_byte is None else f"{document.bits_per_byte:.4f}"
        by_document.add_row(
            rich.markup.escape(document.name),
            f"{document.targets:,}",
            f"{document.loss:.4f}",
            per_byte,
            f"{document.accuracy:.2%}",
            end_section=few is not order and place == SHOWN - 1,
        )
    console.print(by_document)


def _choose(
    run: pathlib.Path, found: TrainedRun, steps: list[int], path: pathlib.Path, as_json: bool
) -> None:
    from palm_jax.use import choices

    items, tokenizer = choices.read(path), found.tokenizer()
    rows = [
        (moment.step, choices.answer(scorer, moment.params, items, tokenizer))
        for moment, scorer in _moments(found, steps)
    ]
    evaluations = [
        {
            "step": step,
            "accuracy": choices.share(answered, "chosen"),
            "accuracy_per_byte": choices.share(answered, "chosen_per_byte"),
            "spans": sum(one.spans for one in answered),
            "truncated": sum(one.truncated for one in answered),
            "items": [dataclasses.asdict(one) for one in answered],
        }
        for step, answered in rows
    ]
    if as_json:
        print_json(
            {
                "run": str(run),
                "segment": found.segment,
                "choices": str(path),
                "evaluations": evaluations,
            }
        )
        return
    print(f"{run}, segment {found.segment}: {len(items):,} items of {path}")
    for row in evaluations:
        print(
            f"step {row['step']}: accuracy {row['accuracy']:.2%}, {row['accuracy_per_byte']:.2%} "
            "normalised by bytes"
        )
    last = evaluations[-1]
    if last["spans"]:
        print(f"of {last['spans']:,} a token spanned the end of the context")
    if last["truncated"]:
        print(f"of {last['truncated']:,} the context was too long, and lost its beginning")


def _do_tasks(
    run: pathlib.Path,
    found: TrainedRun,
    steps: list[int],
    tasks: list[str],
    folder: pathlib.Path | None,
    limit: int | None,
    as_json: bool,
) -> None:
    import contextlib

    from palm_jax.record import logbook

    # Its progress and that of its companions would go to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        from palm_jax.use import harness

        tokenizer, evaluations = found.tokenizer(), []
        for moment, scorer in _moments(found, steps):
            model = harness.PalmJax(scorer, moment.params, tokenizer)
            told = harness.results(model, tasks, folder, limit)
            evaluations.append({"step": moment.step, **logbook.plain(told)})
    if as_json:
        print_json({"run": str(run), "segment": found.segment, "evaluations": evaluations})
        return
    for row in evaluations:
        for name, numbers in row["results"].items():
            shown = ", ".join(
                f"{key.removesuffix(',none')} {value:.4f}"
                for key, value in numbers.items()
                if isinstance(value, float)
            )
            print(f"step {row['step']}, {name}: {shown}")
