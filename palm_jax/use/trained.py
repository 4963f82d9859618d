"""A run's parameters before any step of its history, and the program that computes with them."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import pathlib

import jax
import numpy as np
import numpy.typing as npt

from palm_jax import config, data, model, sharding
from palm_jax.corpus import tokenizers
from palm_jax.corpus.corpora import Corpora, are_there, open_corpus
from palm_jax.corpus.joint import Contents
from palm_jax.corpus.reader import Corpus
from palm_jax.course import Course
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay import bundles, states
from palm_jax.step import Program
from palm_jax.use import tokenizer_file


class _NoRows:
    """Stands where a run's corpus is not: checkpoints need none, steps to execute do."""

    def __init__(self, run: RunFolder, settings: config.Config) -> None:
        self.folder, self.manifest = run.path, run.manifest()
        self._told = settings.data.told

    def num_sequences(self, split: str) -> int:
        return self.manifest.splits[split].sequences

    def read(
        self, split: str, ids: collections.abc.Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        raise WrongInput(
            f"{self.folder} has no checkpoint at that step, and {self._told}, which the steps up "
            "to it read, is not there; name a step that has one, or where the corpus is"
        )


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters of one moment, on the program's mesh."""

    step: int  # of the state: the next one
    params: model.Params
    program: Program
    from_checkpoint: int | None  # None: computed from the config
    damaged: tuple[str, ...]  # checkpoints that were passed over, with the reason


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A segment of a run to take parameters from, and what it was trained on."""

    run: RunFolder
    course: Course
    corpus: Corpus | Corpora | None  # None: it is not there, or the run is a bundle

    @property
    def segment(self) -> int:
        return self.course.segment.segment

    @property
    def contents(self) -> Contents:
        """What the manifests of the run say of what it was trained on."""
        return self.run.manifest()

    @property
    def end_of_document(self) -> int:
        return self.contents.end_of_document

    def newest_step(self) -> int:
        """Of the segment's newest checkpoint, or its first step."""
        with Checkpoints(self.run.checkpoints(self.segment), config.Checkpoint()) as saved:
            newest = saved.latest()
        return self.course.segment.start_step if newest is None else newest

    def at(self, step: int) -> Trained:
        """The parameters before `step`, executing what lies after the checkpoint before it.

        Raises:
          WrongInput: the run has not come to that step, or steps must be executed and the corpus
            is not there.
          CannotDo: no checkpoint of it can be read.
        """
        made = max(self.newest_step(), logbook.History.read(self.run.path).steps_of(self.segment))
        if step > made:
            raise WrongInput(
                f"--step {step}: segment {self.segment} of {self.run.path} has made {made} steps"
            )
        found = states.state_in_history(self.run, self.course, step)
        # The program that training evaluated with: that of the step before.
        before = max(step - 1, self.course.segment.start_step)
        return Trained(
            step=step,
            params=found.state.params,
            program=self.course.program_at(before),
            from_checkpoint=found.from_checkpoint,
            damaged=found.damaged,
        )

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The one that the run was trained with.

        Raises:
          WrongInput: its model lies with the corpus, which is not there.
        """
        return tokenizer_file.opened(self.run, self.course.base, self.contents.tokenizer)


@contextlib.contextmanager
def opened(
    run: RunFolder, settings: config.Config, segment: int | None = None
) -> collections.abc.Iterator[TrainedRun]:
    """A segment of a run, with its corpus if that is there.

    Args:
      settings: the run's, perhaps on another mesh or with its corpus elsewhere.
      segment: by default the last.
    Raises:
      WrongInput: there is no such segment, or the corpus is damaged, or another than it was.
    """
    number = run.last_segment() if segment is None else segment
    described = segments.read(run.segment(number))
    with contextlib.ExitStack() as stack:
        corpus: Corpus | Corpora | None = None
        rows: data.Rows
        if (run.path / bundles.ROWS).is_file():
            rows = bundles.BundledRows(run.path / bundles.ROWS, run.manifest())
        elif are_there(settings.data):
            rows = corpus = open_corpus(settings.data)
            stack.callback(corpus.close)
            if (was := run.manifest().digest) != (found := corpus.manifest.digest):
                raise WrongInput(
                    f"{run.path} was trained on the corpus {was[:16]}, but {settings.data.told} "
                    f"is {found[:16]}; name the run's own corpus with data.corpus=DIR"
                )
        else:
            rows = _NoRows(run, settings)
        course = Course(settings, described, rows, sharding.make_mesh(settings.mesh))
        yield TrainedRun(run, course, corpus)


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run's history had learned by one moment, without a corpus: to go on with texts."""

    settings: config.Config  # in force at the step
    mesh: jax.sharding.Mesh
    tokenizer: tokenizers.Tokenizer
    params: model.Params
    segment: int
    step: int  # the next one
    damaged: tuple[str, ...]  # checkpoints that were passed over, with the reason


def load(
    run: RunFolder, settings: config.Config, step: int | None = None, segment: int | None = None
) -> Model:
    """The model whose next step is `step`, by default that of the segment's newest checkpoint.

    Raises:
      WrongInput: as `opened`, and TrainedRun.at.
      CannotDo: this is one of several processes; as TrainedRun.at.
    """
    if jax.process_count() > 1:
        raise CannotDo(
            f"this is one of {jax.process_count()} processes, and a model is used in one; unset "
            "JAX_COORDINATOR_ADDRESS, and choose a mesh that one process has"
        )
    # The kernel of splash is for TPUs; parameters are the same without it.
    plain = settings.model.model_copy(update={"attention": "xla"})
    with opened(run, settings.model_copy(update={"model": plain}), segment) as found:
        moment = found.at(found.newest_step() if step is None else step)
        return Model(
            settings=moment.program.settings,
            mesh=moment.program.mesh,
            tokenizer=found.tokenizer(),
            params=moment.params,
            segment=found.segment,
            step=moment.step,
            damaged=moment.damaged,
        )


def corpus_to_evaluate(
    found: TrainedRun, other: pathlib.Path | None, stack: contextlib.ExitStack
) -> Corpus | Corpora:
    """The run's own corpus, or another that its model can read.

    Args:
      stack: closes another one.
    Raises:
      WrongInput: it is not there, or has another tokenizer or length of sequences.
    """
    if other is None:
        if found.corpus is None:
            raise WrongInput(
                f"the corpus of {found.run.path} is not there ({found.course.base.data.told}); "
                "say where it is with data.corpus=DIR, or evaluate on another with --corpus or "
                "--text"
            )
        return found.corpus
    corpus = stack.enter_context(Corpus.open(other))
    for what, own, its in (
        ("tokenizer", found.contents.tokenizer.identity, corpus.manifest.tokenizer.identity),
        ("sequence_length", found.contents.sequence_length, corpus.manifest.sequence_length),
    ):
        if own != its:
            raise WrongInput(
                f"--corpus {other} has {what}={its}, and {found.run.path} was trained with "
                f"{own}; prepare it again alike, or evaluate on its files with --text"
            )
    return corpus


def recorded_losses(
    found: TrainedRun, corpus: Corpus | Corpora | None, split: str
) -> dict[int, float]:
    """{step: the loss that the segment's logbook has of it}, on that corpus and split."""
    if corpus is None or corpus.manifest.digest != found.contents.digest:
        return {}
    losses = {}
    for record in logbook.scan(found.run.path):
        if (
            isinstance(record, dict)
            and record["event"] == "evaluation"
            and (record.get("segment"), record.get("split")) == (found.segment, split)
        ):
            logbook.required(record, found.run.path, step=int)
            loss = logbook.number(record.get("loss"))
            if loss is not None:
                losses[record["step"]] = loss
    return losses
