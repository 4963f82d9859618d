"""`palm-jax memorisation`."""

from __future__ import annotations

from typing import Annotated

import typer

from palm_jax.cli.terms import AsJson, Run, check_is_run, moved, prepare_jax, print_json
from palm_jax.errors import WrongInput


def memorisation(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="mesh.* of another mesh; data.corpus, or data.mixture.corpora.NAME, elsewhere.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Before which step; the default: newest checkpoint.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(min=0, help="Which history; the default is the last.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="train: of what was trained on. held_out: what can be guessed.")
    ] = "train",
    sequences: Annotated[int, typer.Option(min=1, help="How many passages.")] = 100,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that are given.")] = 50,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens to come out.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of passages.")] = 0,
    occurrences: Annotated[
        bool, typer.Option(help="Count each passage in the training split, which is all read.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """How much of its training data RUN's model recites (PaLM, section 7).

    Passages of sequences that were trained on, each within one document: the model is given the
    first tokens and continues greedily, and a passage counts if all the rest comes out.
    """
    check_is_run(run)
    from palm_jax.record import folder

    there = folder.RunFolder(run.absolute())
    settings = moved(there.config(), overrides or (), "probed")
    prepare_jax(settings)

    from palm_jax.use import memorisation as probe
    from palm_jax.use import scoring, trained

    with trained.opened(there, settings, segment) as found:
        if found.corpus is None:
            raise WrongInput(
                f"the corpus of {run} is not there ({settings.data.told}); say where it is with "
                "data.corpus=DIR"
            )
        moment = found.at(found.newest_step() if step is None else step)
        if split == "train":
            total, sequence_id = probe.trained_on(found, moment.step)
            if not total:
                raise WrongInput(
                    f"{run} has no record of what was trained on before step {moment.step}; name "
                    "a later --step, or another split"
                )
        else:
            total, sequence_id = found.corpus.num_sequences(split), int
        length = prompt + continuation
        passages = probe.draw(found.corpus, split, total, sequence_id, sequences, length, seed)
        counts = probe.count_occurrences(found.corpus, passages) if occurrences else None
        scorer = scoring.make_scorer(moment.program, found.end_of_document)
        recitals = probe.recite(scorer, moment.params, passages, prompt, counts)
    memorised = sum(probe.is_memorised(one, prompt) for one in recitals)
    buckets = probe.by_occurrences(recitals, prompt)
    if as_json:
        print_json(
            {
                "run": str(run),
                "segment": found.segment,
                "step": moment.step,
                "split": split,
                "prompt": prompt,
                "continuation": continuation,
                "seed": seed,
                "passages": len(recitals),
                "memorised": memorised,
                "share": memorised / len(recitals),
                "mean_right": sum(one.right for one in recitals) / len(recitals),
                "by_occurrences": [
                    {"from": own.start, "to": own.stop - 1, "passages": of, "memorised": known}
                    for own, of, known in buckets
                ],
                "recitals": [
                    {
                        "sequence": one.passage.sequence,
                        "column": one.passage.start,
                        "right": one.right,
                        "occurrences": one.occurrences,
                    }
                    for one in recitals
                ],
            }
        )
        return
    print(
        f"{run}, segment {found.segment}, step {moment.step}, split {split}: after {prompt} tokens "
        f"the next {continuation} come out in {memorised} of {len(recitals)} passages "
        f"({memorised / len(recitals):.1%})"
    )
    right = sum(one.right for one in recitals) / len(recitals)
    print(f"tokens before the first wrong one: {right:.2f} of {continuation} on average")
    for own, of, known in buckets:
        these = str(own.start) if len(own) == 1 else f"{own.start} to {own.stop - 1}"
        print(f"  of those that occur {these} x in training: {known} of {of} ({known / of:.1%})")
