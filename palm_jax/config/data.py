"""Settings of the batches: their sizes, and the corpora they are drawn from."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pydantic

from palm_jax import mixing
from palm_jax.config.explaining import explain, keys
from palm_jax.config.fields import END, BatchSize, NaturalInt, Place, PositiveInt, Section
from palm_jax.config.words import short

# Of all stages of a mixture together: they are made when a run starts, and held.
MOST_TURNS = 100_000
MOST_INCREMENTS = 1000  # of a linear ramp


def _weight(value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < END:
        return value
    raise ValueError(f"{short(value)} must be a number from 0 to 2^53")


def _corpus_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError(
            f"{short(name)} is no name of a corpus: letters, digits, '_' and '-', 64 at most"
        )
    return name


Weight = Annotated[int | float, pydantic.BeforeValidator(_weight)]
CorpusName = Annotated[str, pydantic.AfterValidator(_corpus_name)]


class Ramp(Section):
    """Batch size by stage (PaLM, section 5).

    Stage i starts at step starts[i] and has sizes[i] sequences per step.
    """

    starts: tuple[NaturalInt, ...] = (0,)
    sizes: tuple[BatchSize, ...]  # sequences per step

    @pydantic.model_validator(mode="before")
    @classmethod
    def _stages_of_a_linear_one(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if not set(given) & set(LinearRamp.model_fields):
            # Strict validation takes JSON's lists for tuples, but not behind a function.
            return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        # Null, so that a file can take back the stages of its base.
        given = {key: value for key, value in given.items() if value is not None}
        if stages := sorted(set(given) & set(Ramp.model_fields)):
            raise ValueError(
                f"{', '.join(stages)} cannot stand beside the settings of a linear ramp "
                f"({', '.join(LinearRamp.model_fields)}); leave out one or the other, or set "
                f"{' and '.join(stages)} to null"
            )
        try:
            return LinearRamp.model_validate(given).stages()
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False)
            raise ValueError("; ".join(explain(e, keys(LinearRamp)) for e in found)) from None

    @pydantic.model_validator(mode="after")
    def _one_size_per_stage(self) -> Ramp:
        rising = all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != len(self.sizes) or self.starts[:1] != (0,) or not rising:
            raise ValueError(
                f"starts={short(list(self.starts))}, sizes={short(list(self.sizes))}: "
                "need one size per stage, and starts that rise from 0"
            )
        return self


class Mixture(Section):
    """Several corpora, drawn from in the proportion of weights (docs/data.md).

    Stage i starts at step starts[i] and has weights[i]; 0 is not drawn.
    """

    # Folders by name. Their order is that of sequence ids, and of draws that are due together.
    corpora: Annotated[dict[CorpusName, Place], pydantic.Field(min_length=1)]
    starts: tuple[NaturalInt, ...] = (0,)
    weights: tuple[dict[str, Weight], ...]  # of each corpus, sequences

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The weights of each stage as whole numbers, in the order of `corpora`."""
        return tuple(
            mixing.shares([stage[name] for name in self.corpora]) for stage in self.weights
        )

    @pydantic.model_validator(mode="after")
    def _one_weight_per_corpus_and_stage(self) -> Mixture:
        rising = all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != len(self.weights) or self.starts[:1] != (0,) or not rising:
            raise ValueError(
                f"starts={short(list(self.starts))} and {len(self.weights)} weights: need one "
                "mapping of weights per stage, and starts that rise from 0"
            )
        for number, stage in enumerate(self.weights):
            if stage.keys() != self.corpora.keys():
                raise ValueError(
                    f"weights[{number}] names {short(list(stage))}, and corpora "
                    f"{short(list(self.corpora))}; give each corpus a weight, 0 to leave it out"
                )
            if not any(stage.values()):
                raise ValueError(f"weights[{number}] are all 0; give one corpus a weight")
        turns = [sum(stage) for stage in self.shares]
        if sum(turns) > MOST_TURNS:
            number = turns.index(max(turns))
            raise ValueError(
                f"weights[{number}]={short(self.weights[number])} are in whole sequences only "
                f"every {short(turns[number])} of them, and {MOST_TURNS} is the most for all "
                "stages together; give rounder weights"
            )
        return self


class LinearRamp(Section):
    """Batch size from `start` to `end`, `increment` sequences at a time, in equal stretches.

    A stretch is as many sequences, or steps, as the whole ramp's are over the increments; a step
    has the size of the stretch that its first sequence lies in. Only another way to write the
    stages of a `Ramp`: that is what a run keeps.

    Source: Megatron's --rampup-batch-size, with which BLOOM was trained.
    """

    start: BatchSize  # sequences per step
    end: BatchSize
    increment: BatchSize
    samples: PositiveInt | None = None  # sequences in the ramp
    steps: PositiveInt | None = None  # instead of `samples`

    @pydantic.model_validator(mode="after")
    def _is_a_staircase(self) -> LinearRamp:
        if self.end <= self.start or (self.end - self.start) % self.increment:
            raise ValueError(
                f"from start={self.start} to end={self.end} there are no whole increments of "
                f"{self.increment}; change one of them"
            )
        if (self.samples is None) == (self.steps is None):
            raise ValueError("a linear ramp takes samples or steps, and one of them")
        if self.num_increments > MOST_INCREMENTS:
            raise ValueError(
                f"increment={self.increment} makes {self.num_increments:,} stages, and each is a "
                f"program to compile; make it larger (at most {MOST_INCREMENTS:,})"
            )
        return self

    @property
    def num_increments(self) -> int:
        return (self.end - self.start) // self.increment

    def stages(self) -> dict[str, tuple[int, ...]]:
        """`starts` and `sizes` of the same ramp; a stretch that no step begins in has none."""
        stages: dict[int, int] = {}
        step = sequences = 0
        for number in range(self.num_increments):
            size = self.start + number * self.increment
            # Steps until (number + 1) / num_increments of the ramp is over, in integers.
            if self.samples is None:
                assert self.steps is not None
                num_steps = -(-(number + 1) * self.steps // self.num_increments) - step
            else:
                left = (number + 1) * self.samples - sequences * self.num_increments
                num_steps = -(-left // (size * self.num_increments))
            if num_steps > 0:
                stages[step] = size
                step, sequences = step + num_steps, sequences + num_steps * size
        stages[step] = self.end
        return {"starts": tuple(stages), "sizes": tuple(stages.values())}


class Data(Section):
    corpus: Place | None = None  # folder written by `palm-jax data prepare`
    ramp: Ramp
    read_threads: PositiveInt = 2
    prefetch_steps: PositiveInt = 4
    mixture: Mixture | None = None  # in place of `corpus`: several

    @property
    def places(self) -> dict[str, str]:
        """The folders of the corpora by the settings that name them."""
        if self.mixture is None:
            return {"data.corpus": str(self.corpus)}
        return {f"data.mixture.corpora.{k}": v for k, v in self.mixture.corpora.items()}

    @property
    def told(self) -> str:
        """What is trained on, for messages."""
        return ", ".join(f"{setting}={place}" for setting, place in self.places.items())

    @pydantic.model_validator(mode="after")
    def _one_corpus_or_a_mixture(self) -> Data:
        if self.corpus is None and self.mixture is None:
            raise ValueError("corpus is missing; set data.corpus=PATH, or data.mixture for several")
        if self.corpus is not None and self.mixture is not None:
            raise ValueError(
                f"corpus={short(self.corpus)} is given, and a mixture, too; leave one of them "
                "out, or set it to null"
            )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _without_what_is_not_given(self, values: Any) -> dict[str, Any]:
        # Runs of one corpus are older than mixtures, and keep their config and fingerprint.
        given: dict[str, Any] = values(self)
        absent = "mixture" if self.mixture is None else "corpus"
        return {key: value for key, value in given.items() if key != absent}
