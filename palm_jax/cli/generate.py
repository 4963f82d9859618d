"""`palm-jax generate`: a run's model goes on with a text."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Annotated, Any

import typer

from palm_jax.cli.terms import AsJson, Run, check_is_run, moved, prepare_jax, print_json
from palm_jax.errors import WrongInput


def generate(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="How a document begins.")
    ] = None,
    batch: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; of FILE.jsonl, a JSON string, or an object with a `prompt`.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The default: 128, or fewer where the context ends before."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Scores are divided by it; 0: the likeliest token, always.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Only so many likeliest tokens; the default: all.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Only the likeliest tokens of together this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws, with row and position.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=0, help="Before which step; the default: newest checkpoint.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows that a device computes together; the default: numerics.microbatch."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """RUN's model goes on with a text, token by token.

    A row's text depends on the seed, on its number among the prompts, and on its own prompt;
    neither on the other rows, nor on how many there are. On a terminal it appears as it is made.
    Nothing in the run changes.
    """
    prompts = _prompts(prompt, batch)
    check_is_run(run)
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "used of the run")
    prepare_jax(settings)

    from palm_jax.use import decode, sample, texts, tokenizer_file, trained
    from palm_jax.use import generate as generating

    sampling = sample.Sampling(temperature, top_k, top_p, seed)
    sample.check(sampling)
    tokenizer = tokenizer_file.opened(there, settings, there.manifest().tokenizer)
    context = settings.model.sequence_length
    name = "--prompt" if batch is None else f"prompt {{}} of {batch}"
    rows = [
        generating.prompt_tokens(tokenizer, text, context, max_tokens, name.format(number))
        for number, text in enumerate(prompts)
    ]
    found = trained.load(there, settings, step, segment)
    for reason in found.damaged:
        print(reason, file=sys.stderr)
    decoder = decode.make_decoder(found.settings, found.mesh, tokenizer.end_of_document, microbatch)
    is_live = prompt is not None and not as_json and sys.stdout.isatty()
    stream = texts.Stream(tokenizer)

    def tell(row: int, tokens: list[int], is_last: bool) -> None:
        print(texts.shown(stream(tokens, is_last=is_last)), end="", flush=True)

    if is_live:
        print(texts.shown(prompts[0].decode("utf-8", errors="replace")), end="", flush=True)
    done = generating.generate(
        decoder,
        decoder.weights(found.params),
        tokenizer,
        rows,
        sampling,
        max_tokens,
        tell if is_live else None,
    )
    if as_json:
        fields = [dataclasses.asdict(row) for row in done.rows]
        said: dict[str, Any] = fields[0] if batch is None else {"rows": fields}
        print_json(
            {
                "run": str(run),
                "segment": found.segment,
                "step": found.step,
                **said,
                "tokens_per_second": done.tokens_per_second,
                "prompt_seconds": done.prompt_seconds,
                "cache_bytes": done.cache_bytes,
            }
        )
        return
    if is_live:
        print()
    else:
        for number, (text, row) in enumerate(zip(prompts, done.rows, strict=True)):
            if batch is not None:
                print(f"--- {number}")
            whole = text.decode("utf-8", errors="replace") + row.text
            print(texts.shown(whole) if sys.stdout.isatty() else whole)
    num_tokens = sum(len(row.tokens) for row in done.rows)
    print(
        f"step {found.step}; {num_tokens} tokens, {done.tokens_per_second:.4g} a second; "
        f"ended by {', '.join(dict.fromkeys(row.ended for row in done.rows))}",
        file=sys.stderr,
    )


def _prompts(prompt: str | None, batch: pathlib.Path | None) -> list[bytes]:
    """One prompt, or those of a file; as bytes, which need not be UTF-8."""
    if (prompt is None) == (batch is None):
        raise WrongInput("give either --prompt TEXT or --batch FILE")
    if batch is None:
        assert prompt is not None
        return [os.fsencode(prompt)]
    try:
        lines = batch.read_bytes().split(b"\n")
    except OSError as error:
        raise WrongInput(f"cannot read --batch {batch}: {error}") from error
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise WrongInput(f"--batch {batch} is empty; write a prompt a line")
    if batch.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"--batch {batch}, line {n + 1}") for n, line in enumerate(lines)]


def _prompt_of(line: bytes, where: str) -> bytes:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise WrongInput(f"{where} is no JSON: {error}") from None
    text = entry.get("prompt") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise WrongInput(f"{where} must be a JSON string, or an object with a string `prompt`")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"{where} is no text: {error.reason}") from None
