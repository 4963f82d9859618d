"""`palm-jax data`: prepare a corpus, and look at what a step trains on."""

from __future__ import annotations

import collections
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palm_jax import config
from palm_jax.cli.terms import (
    AsJson,
    Overrides,
    Run,
    check_is_run,
    in_bytes,
    interval,
    print_json,
)
from palm_jax.errors import WrongInput

if TYPE_CHECKING:
    from palm_jax.corpus.manifest import Manifest
    from palm_jax.corpus.stats import Stats

app = typer.Typer(help="Prepare a corpus, and look at what a step trains on.", no_args_is_help=True)


@app.command(
    epilog="Example: palm-jax data prepare --source 'jsonl:dump/*.jsonl.zst' "
    "--tokenizer sentencepiece:train:32768 --out corpora/dump"
)
def prepare(
    source: Annotated[
        list[str],
        typer.Option(
            help="stdlib, text:GLOB, jsonl:GLOB or tfds:NAME, all forms of which are in "
            "docs/data.md; may be given several times."
        ),
    ],
    out: Annotated[str, typer.Option(help="The corpus folder to write, or that of a part.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, sentencepiece:FILE, or sentencepiece:train:VOCABULARY.")
    ] = "bytes",
    sequence_length: Annotated[int, typer.Option(help="Targets per sequence.")] = 256,
    held_out: Annotated[float, typer.Option(help="Fraction of documents held out.")] = 0.005,
    document_separator: Annotated[
        str | None, typer.Option(help="Split each text file into documents at this string.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Orders the documents.")] = 0,
    data_dir: Annotated[
        str | None, typer.Option(help="Where the datasets of tfds: were prepared.")
    ] = None,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Keep one document of each content.")
    ] = False,
    sample_megabytes: Annotated[
        int, typer.Option(help="Text that a tokenizer is trained on.", min=1, max=10_000)
    ] = 16,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Only this part of the source's files; `data merge` joins all N."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; the result does not depend on it.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Turn text into a corpus: tokenised, split, shuffled and cut into sequences.

    Interrupted, it goes on where it was when it is called again.
    """
    from palm_jax import console
    from palm_jax.corpus import prepare as preparation

    settings: dict[str, Any] = {
        "source": tuple(source),
        "sequence_length": sequence_length,
        "seed": seed,
        "held_out": held_out,
        "document_separator": document_separator,
        "tokenizer": tokenizer,
        "sample_bytes": sample_megabytes * 2**20,
        "data_dir": data_dir,
        "drop_duplicates": drop_duplicates,
        "workers": workers,
    }
    if shard is None:
        with console.PreparationProgress() as progress:
            manifest = preparation.prepare(out=out, progress=progress, **settings)
        _print_corpus(out, manifest, as_json)
        return
    here, slash, shards = shard.partition("/")
    if not (slash and here.isdecimal() and shards.isdecimal() and len(shard) < 20):
        raise WrongInput(f"--shard {shard} is not I/N, as 0/4 to 3/4 for four parts")
    with console.PreparationProgress() as progress:
        journal = preparation.prepare_part(
            out=out, progress=progress, shard=int(here), shards=int(shards), **settings
        )
    if as_json:
        print_json({"out": out, **journal.model_dump(mode="json", exclude={"files"})})
        return
    documents = sum(tally.documents for tally in journal.tallies.values())
    print(f"{out}: part {shard} of a corpus, {documents:,} documents; join all by `data merge`")


@app.command(epilog="Example: palm-jax data merge parts/* --out corpora/dump")
def merge(
    parts: Annotated[
        list[pathlib.Path], typer.Argument(help="All that `data prepare --shard` made.")
    ],
    out: Annotated[str, typer.Option(help="The corpus folder to write.")],
    as_json: AsJson = False,
) -> None:
    """Join the parts of a corpus: it is the one that one machine would have made."""
    from palm_jax import console
    from palm_jax.corpus import prepare as preparation

    with console.PreparationProgress() as progress:
        manifest = preparation.merge(parts=parts, out=out, progress=progress)
    _print_corpus(out, manifest, as_json)


def _print_corpus(out: str, manifest: Manifest, as_json: bool) -> None:
    if as_json:
        print_json({"out": out, **manifest.model_dump(mode="json")})
        return
    print(f"{out}: corpus {manifest.digest[:16]}, {manifest.documents_read:,} documents")
    print(
        f"  empty and left out: {manifest.empty_documents:,}; not UTF-8, kept byte for byte: "
        f"{manifest.invalid_utf8_documents:,}; longest: {in_bytes(manifest.longest_document_bytes)}"
    )
    copies = sum(s.documents - s.distinct_documents for s in manifest.splits.values())
    print(
        f"  exact copies: {manifest.duplicates_dropped:,} dropped, {copies:,} kept; documents in "
        f"both splits: {manifest.documents_in_both_splits}"
    )
    tokenizer = manifest.tokenizer
    trained = (
        f", trained on {tokenizer.training.sample_documents:,} documents of "
        f"{in_bytes(tokenizer.training.sample_bytes)}"
        if tokenizer.training
        else ""
    )
    print(f"  tokenizer: {tokenizer.kind}, {tokenizer.vocabulary_size:,} ids{trained}")
    for name, split in manifest.splits.items():
        print(
            f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, "
            f"{split.sequences:,} sequences of {manifest.sequence_length}; "
            f"{split.tail_tokens} tokens at the end left out"
        )
    if manifest.bigram_bits_per_byte is not None:
        print(f"  a bigram model: {manifest.bigram_bits_per_byte:.4f} bits per held-out byte")


@app.command(epilog="Example: palm-jax data show runs/quickstart --step 100 --rows 2")
def show(
    where: Annotated[pathlib.Path, typer.Argument(metavar="RUN|CONFIG")],
    step: Annotated[int, typer.Option(help="The step.", min=0)],
    rows: Annotated[int, typer.Option(help="How many sequences to print.", min=0)] = 4,
    overrides: Overrides = None,
    segment: Annotated[
        int | None, typer.Option(help="Of a run, which history; the default is the last.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what step STEP of a run, or of a config, trains on."""
    from palm_jax import data
    from palm_jax import train as training
    from palm_jax.corpus.corpora import open_corpus
    from palm_jax.record import folder, segments

    is_run = folder.is_run(where)
    settings = config.load(where / folder.CONFIG if is_run else where, overrides or ())
    if is_run:
        recorded = folder.RunFolder(where).config()
        changes = config.differences(recorded, settings)
        if other := [key for key in changes if not config.may_change(key, recorded)]:
            raise WrongInput(
                f"{where} is a run of another {', '.join(other)}; leave that out, or show the "
                "config file with it"
            )
    with open_corpus(settings.data) as corpus:
        training.check_corpus(settings, corpus.manifest)
        if is_run and folder.RunFolder(where).manifest().digest != corpus.manifest.digest:
            raise WrongInput(
                f"{settings.data.told} is not the corpus that {where} was trained on; name that one"
            )
        described = segments.Segment()
        if is_run:
            run = folder.RunFolder(where)
            number = run.last_segment() if segment is None else segment
            described = segments.read(run.segment(number))
        batch = data.batch(
            corpus,
            settings.seed,
            described.data_step(step),
            settings.data.ramp,
            described.exclusions,
            mixture=settings.data.mixture,
        )
        fed = described.stream_of(settings)
        places = fed.places(described.data_step(step))
        if as_json:
            of_corpora = {
                "corpora": [name for name, _ in places],
                "positions": [position for _, position in places],
            }
            print_json(
                {
                    "step": step,
                    "first_position": batch.first_position,
                    "batch_size": len(batch.sequence_ids),
                    "sequence_ids": batch.sequence_ids.tolist(),
                    "digest": batch.digest,
                    **({} if settings.data.mixture is None else of_corpora),
                }
            )
            return
        drawn = collections.Counter(name for name, _ in places)
        parts = [
            f"{drawn[name]} sequences{'' if name is None else f' of {name}'} from position {first}"
            for name, first in fed.next_positions(described.data_step(step)).items()
        ]
        print(f"step {step}: {', '.join(parts)}, digest {batch.digest}")
        for row, sequence_id in enumerate(batch.sequence_ids.tolist()[:rows]):
            spans = corpus.documents("train", sequence_id)
            print(
                f"\n--- row {row}: sequence {sequence_id}, from "
                + ", ".join(f"{span.name} [{span.start}:{span.stop}]" for span in spans)
            )
            print(corpus.decode(batch.tokens[row]))
        if rows < len(batch.sequence_ids):
            print(f"\n({len(batch.sequence_ids) - rows} more; --rows N shows them)")


@app.command(epilog="Example: palm-jax data scan runs/quickstart --steps 120:200")
def scan(
    run: Run,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A up to, not with, B.")],
    like: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="ONSET", help="Only what stood out in the diagnosis of this spike."
        ),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Which history; the default is the last.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find unusual text in what steps A:B of RUN are fed, and propose what to leave out.

    Unusual is text that repeats itself, that compresses far better or worse than the corpus's,
    or that holds many rare tokens.
    """
    import dataclasses

    from palm_jax import console
    from palm_jax.corpus.corpora import open_corpus
    from palm_jax.diagnosis import scan as scanning
    from palm_jax.diagnosis.casefile import CaseFile
    from palm_jax.diagnosis.texts import TextScores
    from palm_jax.record import folder, segments

    check_is_run(run)
    first, stop = interval("--steps", steps)
    there = folder.RunFolder(run.absolute())
    settings = there.config()
    number = there.last_segment() if segment is None else segment
    kinds: tuple[str, ...] = TextScores._fields
    if like is not None:
        found = CaseFile.of(there, number, like).forensics()
        if found is None:
            raise WrongInput(
                f"--like {like}: segment {number} of {run} has no diagnosis of a spike at that "
                "step with its data looked at; `palm-jax spikes diagnose` it first"
            )
        seen = {name for suspect in found["suspects"] for name in suspect["unusual"]}
        kinds = tuple(name for name in kinds if name in seen)
    with open_corpus(settings.data) as corpus, console.PreparationProgress() as progress:
        result = scanning.scan(
            corpus,
            settings,
            segments.read(there.segment(number)),
            range(first, stop),
            kinds,
            progress,
        )
    if as_json:
        print_json({"run": str(run), "steps": [first, stop], **dataclasses.asdict(result)})
        return
    for x in result.unusual[:20]:
        why = ", ".join(f"{name} {sigmas:+.0f} sigma" for name, sigmas in x.sigmas.items())
        print(f"step {x.step}, row {x.row}: sequence {x.sequence}, {x.source}: {why}")
    if len(result.unusual) > 20:
        print(f"and {len(result.unusual) - 20} more; --json has them all")
    print(f"{len(result.unusual)} of {result.sequences} sequences are unusual")
    for start, end in result.exclude:
        print(
            f"to leave out: palm-jax intervene {run} --at {start} --exclude {start}:{end} "
            "--reason 'unusual text'"
        )


@app.command(epilog="Example: palm-jax data stats corpora/books --picture books.svg")
def stats(
    corpora: Annotated[list[pathlib.Path], typer.Argument(metavar="CORPUS...")],
    picture: Annotated[
        pathlib.Path | None, typer.Option(help="Where to draw one (SVG); of one corpus.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What each CORPUS holds: lengths, tokens, what stands out; and what they share.

    Of several, documents that one holds out and another is trained on are counted.
    """
    import contextlib
    import dataclasses

    from palm_jax import console
    from palm_jax.corpus import picture as drawing
    from palm_jax.corpus import stats as counting
    from palm_jax.corpus.reader import Corpus

    if picture is not None and len(corpora) > 1:
        raise WrongInput(f"--picture {picture} is of one corpus, and {len(corpora)} are named")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Corpus.open(corpus)) for corpus in corpora]
        found = []
        for corpus in opened:
            with console.PreparationProgress() as progress:
                found.append(counting.stats(corpus, progress))
        shared = [counting.overlap(one, other) for one in opened for other in opened]
        if picture is not None:
            picture.write_text(drawing.draw(found[0], opened[0].folder.name), encoding="utf-8")
    if as_json:
        print_json(
            {
                "corpora": {
                    str(corpus): dataclasses.asdict(each)
                    for corpus, each in zip(corpora, found, strict=True)
                },
                "overlaps": [dataclasses.asdict(each) for each in shared],
            }
        )
        return
    for path, each in zip(corpora, found, strict=True):
        _print_stats(path, each)
    for pair in shared:
        print(
            f"held out of {pair.held_out} and in the split train of {pair.train}: "
            f"{pair.documents:,} documents"
        )


def _print_stats(corpus: pathlib.Path, stats: Stats) -> None:
    print(corpus)
    for name, split in stats.splits.items():
        print(
            f"  {name}: {split.documents:,} documents ({split.copies:,} copies), "
            f"{in_bytes(split.bytes)}, {split.tokens:,} tokens "
            f"({split.bytes / split.tokens:.2f} bytes each), {split.sequences:,} sequences"
        )
    lengths = stats.splits["train"].lengths
    most = max(bin.documents for bin in lengths)
    print("  documents of train by their tokens:")
    for bin in lengths:
        bar = "#" * -(-40 * bin.documents // most)
        print(f"    {bin.low:>12,} to {bin.high:>12,} {bin.documents:>12,} {bar}")
    print(
        f"  in {stats.looked_at:,} sequences of train: {stats.entropy:.2f} bits a token if they "
        f"were independent; {stats.unused_ids:,} ids do not occur; the most frequent:"
    )
    line = ", ".join(f"{token.text!r} {token.share:.1%}" for token in stats.frequent[:10])
    print(f"    {line}")
    print(f"  unusual: {len(stats.outliers):,} of them")
    for outlier in stats.outliers[:5]:
        why = ", ".join(f"{name} {sigmas:+.0f} sigma" for name, sigmas in outlier.sigmas.items())
        print(f"    sequence {outlier.sequence}, {outlier.source}: {why}")
        print(f"      {outlier.text[:70]!r}")
