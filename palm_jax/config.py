"""Typed, frozen configuration: YAML files with a `base:`, and `section.key=value` overrides.

A configuration is data. Reading somebody's run never executes code from its folder, and
this module imports neither JAX nor anything that touches a device, so that thread counts
and emulated devices can be set from it before JAX starts.
"""

from __future__ import annotations

import collections.abc
import difflib
import hashlib
import json
import math
import pathlib
import re
from typing import Annotated, Any, Literal

import pydantic
import yaml

from palm_jax import files, mixing
from palm_jax.errors import WrongInput

# What may change when a run is resumed, sections or single settings: none of it can change
# the run's bits. (Corpora that moved are known by their digest.)
MAY_CHANGE_ON_RESUME = (
    "steps",
    "log",
    "eval",
    "checkpoint",
    "spikes",
    "verify",
    "distributed",
    "supervise",
    "data.corpus",
    "data.mixture.corpora",
    "data.read_threads",
    "data.prefetch_steps",
)
# Nor can these, where numerics.reduction is canonical.
MAY_CHANGE_IF_CANONICAL = ("mesh.data", "mesh.fsdp", "mesh.emulated_devices")

# Where corpora lie.
PLACES_OF_DATA = ("data.corpus", "data.mixture.corpora")
# Sections of several kinds, and the setting that says which.
TAGS = {"optimizer": "name", "schedule": "kind"}

MOST_STEPS = 2**31 - 1
# Of all stages of a mixture together: they are made when a run starts, and held.
MOST_TURNS = 100_000
# Whatever is worked out from a few of them still is a number.
_END = 2**53
PositiveInt = Annotated[int, pydantic.Field(gt=0, lt=_END)]
NaturalInt = Annotated[int, pydantic.Field(ge=0, lt=_END)]
# A batch is a list of its sequences' numbers before it is read.
BatchSize = Annotated[int, pydantic.Field(gt=0, le=2**20)]
MOST_INCREMENTS = 1000  # of a linear ramp
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
# What timers take.
Seconds = Annotated[float, pydantic.Field(gt=0, le=1e7)]
WholeSeconds = Annotated[int, pydantic.Field(gt=0, le=10**7)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
# Parameters that weight decay leaves alone. The paper mentions none.
Undecayed = tuple[Literal["norms", "embeddings", "biases"], ...]
# Sequences: the rate of a batch of B is multiplied by sqrt(B / reference). Null: by nothing.
BatchSizeReference = BatchSize | None


def _power_of_two(value: float) -> float:
    """Scaling by these is exact, and their products with gradients stay within float32."""
    if not 2.0**-40 <= value <= 2.0**40 or math.frexp(value)[0] != 0.5:
        raise ValueError(f"{_short(value)} must be a power of two from 2^-40 to 2^40")
    return float(value)


def _loss_scale(value: object) -> str | float:
    if isinstance(value, str) and value in ("dynamic", "none"):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _power_of_two(value)
    raise ValueError(f"{_short(value)} must be dynamic, none or a power of two")


PowerOfTwo = Annotated[float, pydantic.AfterValidator(_power_of_two)]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{_short(text)} is no name of a file")
    return text


def _weight(value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _END:
        return value
    raise ValueError(f"{_short(value)} must be a number from 0 to 2^53")


def _corpus_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ValueError(
            f"{_short(name)} is no name of a corpus: letters, digits, '_' and '-', 64 at most"
        )
    return name


Weight = Annotated[int | float, pydantic.BeforeValidator(_weight)]
CorpusName = Annotated[str, pydantic.AfterValidator(_corpus_name)]
Place = Annotated[str, pydantic.AfterValidator(_without_nul)]
LossScale = Annotated[str | float, pydantic.BeforeValidator(_loss_scale)]


class Section(pydantic.BaseModel):
    # Strict: YAML's `true` is not the integer 1, and "12" is not twelve.
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Model(Section):
    """The decoder (PaLM, section 2)."""

    num_layers: PositiveInt
    width: PositiveInt
    num_heads: PositiveInt
    head_size: PositiveInt  # 256 in the paper's models
    feed_forward: PositiveInt | None = None  # default 4 x width, at full width for SwiGLU
    vocabulary_size: Annotated[int, pydantic.Field(ge=2, lt=_END)]  # with the end-of-document id
    vocabulary_multiple: PositiveInt = 128  # the table is padded up to a multiple of this
    sequence_length: PositiveInt  # targets per sequence
    norm: Literal["rms", "layernorm"] = "rms"  # "rms": no mean, scale stored around zero
    rope_base: PositiveFloat = 10000.0
    tied_embedding: bool = True
    qk_norm: bool = False
    isolate_documents: bool = False  # PaLM mentions no masking between packed documents
    z_loss: NotNegative = 1e-4  # weight of (log Z)^2
    attention: Literal["xla", "splash"] = "xla"  # splash: a kernel for TPUs
    remat: Literal["none", "full", "dots", "attention"] = "none"

    @property
    def feed_forward_size(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def padded_vocabulary_size(self) -> int:
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @pydantic.model_validator(mode="after")
    def _head_size_is_even(self) -> Model:
        if self.head_size % 2:
            raise ValueError(
                f"head_size={self.head_size}: rotary embedding turns pairs, so it must be even"
            )
        return self


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
            raise ValueError("; ".join(_explain(e) for e in found)) from None

    @pydantic.model_validator(mode="after")
    def _one_size_per_stage(self) -> Ramp:
        rising = all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != len(self.sizes) or self.starts[:1] != (0,) or not rising:
            raise ValueError(
                f"starts={_short(list(self.starts))}, sizes={_short(list(self.sizes))}: "
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
                f"starts={_short(list(self.starts))} and {len(self.weights)} weights: need one "
                "mapping of weights per stage, and starts that rise from 0"
            )
        for number, stage in enumerate(self.weights):
            if stage.keys() != self.corpora.keys():
                raise ValueError(
                    f"weights[{number}] names {_short(list(stage))}, and corpora "
                    f"{_short(list(self.corpora))}; give each corpus a weight, 0 to leave it out"
                )
            if not any(stage.values()):
                raise ValueError(f"weights[{number}] are all 0; give one corpus a weight")
        turns = [sum(stage) for stage in self.shares]
        if sum(turns) > MOST_TURNS:
            number = turns.index(max(turns))
            raise ValueError(
                f"weights[{number}]={_short(self.weights[number])} are in whole sequences only "
                f"every {_short(turns[number])} of them, and {MOST_TURNS} is the most for all "
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
                f"corpus={_short(self.corpus)} is given, and a mixture, too; leave one of them "
                "out, or set it to null"
            )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _without_what_is_not_given(self, values: Any) -> dict[str, Any]:
        # Runs of one corpus are older than mixtures, and keep their config and fingerprint.
        given: dict[str, Any] = values(self)
        absent = "mixture" if self.mixture is None else "corpus"
        return {key: value for key, value in given.items() if key != absent}


class Adafactor(Section):
    """PaLM's optimizer (PaLM, section 5): Adafactor without factoring."""

    name: Literal["adafactor"] = "adafactor"
    beta1: Fraction = 0.9
    beta2_exponent: PositiveFloat = 0.8  # beta2 = 1 - k^-0.8
    clip_norm: PositiveFloat | None = 1.0  # global norm of the gradient
    update_clip: PositiveFloat | None = 1.0  # RMS of each update; the paper does not mention it
    weight_decay_exponent: PositiveFloat | None = 2.0  # decay = rate^2, not multiplied by rate
    epsilon_square: PositiveFloat = 1e-30  # added to g^2; the paper gives none, T5X this
    epsilon_scale: PositiveFloat = 1e-3  # floor of RMS(parameter); likewise
    factored: bool = False  # second moments of rows and columns alone (Adafactor, section 3)
    no_decay: Undecayed = ()


class AdamW(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"]
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.1  # multiplied by the rate
    # Multiply it by rate / peak instead (Wortsman et al., 2023, section 3.2.2).
    independent_decay: bool = False
    no_decay: Undecayed = ()


class Lion(Section):
    """Signs of an interpolated momentum (Chen et al., 2023, algorithm 2)."""

    name: Literal["lion"]
    beta1: Fraction = 0.9  # of what the sign is taken of
    beta2: Fraction = 0.99  # of the momentum that is kept
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 1e-3  # multiplied by the rate
    no_decay: Undecayed = ()


class Muon(Section):
    """Orthogonalised momentum of the layers' kernels; AdamW for all else (Jordan et al., 2024)."""

    name: Literal["muon"]
    momentum: Fraction = 0.95
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, pydantic.Field(gt=0, le=20)] = 5
    # RMS of a kernel's update over the rate (Liu et al., 2025, section 2.2: 0.2, as AdamW's is).
    # Null: singular values near sqrt(max(1, outputs / inputs)), as in Jordan's code.
    consistent_rms: PositiveFloat | None = None
    # Of all that is no kernel of a layer, by AdamW.
    adamw_rate: PositiveFloat = 1.0  # multiplies the rate
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.0  # multiplied by the rate
    no_decay: Undecayed = ()


class SGD(Section):
    """Gradient descent with momentum (Sutskever et al., 2013)."""

    name: Literal["sgd"]
    momentum: Fraction = 0.9
    nesterov: bool = False
    clip_norm: PositiveFloat | None = 1.0
    weight_decay: NotNegative = 0.0  # multiplied by the rate, and not kept in the momentum
    no_decay: Undecayed = ()


Optimizer = Adafactor | AdamW | Lion | Muon | SGD


class PalmSchedule(Section):
    """peak until update `hold_steps`, then peak * sqrt(hold_steps / k); k counts from 1."""

    kind: Literal["palm"] = "palm"
    peak: PositiveFloat = 0.01
    hold_steps: PositiveInt = 10_000
    batch_size_reference: BatchSizeReference = None


class CosineSchedule(Section):
    """Linear warm-up to `peak`, half a cosine to `final` at `decay_steps`, then constant."""

    kind: Literal["cosine"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    # Not `steps`: lengthening a run must not change the steps already made.
    decay_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> CosineSchedule:
        _check_decay("warmup_steps", self.warmup_steps, self.decay_steps)
        _check_final(self.final, self.peak)
        return self


class LinearSchedule(Section):
    """Linear warm-up to `peak`, a line to `final` at `decay_steps`, then constant."""

    kind: Literal["linear"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    decay_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> LinearSchedule:
        _check_decay("warmup_steps", self.warmup_steps, self.decay_steps)
        _check_final(self.final, self.peak)
        return self


class WsdSchedule(Section):
    """Warm-up, stable, decay: `peak` until update `hold_steps`, `final` from `decay_steps` on.

    Both null: stable for ever, until a branch or an intervention sets them.
    """

    kind: Literal["wsd"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    hold_steps: PositiveInt | None = None
    decay_steps: PositiveInt | None = None
    decay: Literal["linear", "1-sqrt", "cosine"] = "1-sqrt"
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> WsdSchedule:
        _check_final(self.final, self.peak)
        if (self.hold_steps is None) != (self.decay_steps is None):
            raise ValueError(
                f"hold_steps={self.hold_steps} and decay_steps={self.decay_steps} are the two ends "
                "of the decay; set both, or neither for a rate that stays"
            )
        if self.hold_steps is not None and self.decay_steps is not None:
            _check_decay("hold_steps", self.hold_steps, self.decay_steps)
            if self.hold_steps < self.warmup_steps:
                raise ValueError(
                    f"hold_steps={self.hold_steps} is before the end of "
                    f"warmup_steps={self.warmup_steps}; make hold_steps larger"
                )
        return self


class InverseSquareRootSchedule(Section):
    """Linear warm-up to `peak`, then peak * sqrt(warmup_steps / k)."""

    kind: Literal["inverse_square_root"]
    peak: PositiveFloat
    warmup_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None


class ConstantSchedule(Section):
    """Linear warm-up to `peak`, which stays."""

    kind: Literal["constant"]
    peak: PositiveFloat
    warmup_steps: NaturalInt = 0
    batch_size_reference: BatchSizeReference = None


Schedule = (
    PalmSchedule
    | CosineSchedule
    | LinearSchedule
    | WsdSchedule
    | InverseSquareRootSchedule
    | ConstantSchedule
)


def _check_decay(start: str, first: int, last: int) -> None:
    if first >= last:
        raise ValueError(
            f"{start}={first} leaves nothing of decay_steps={last}; make decay_steps larger"
        )


def _check_final(final: float, peak: float) -> None:
    if final > peak:
        raise ValueError(f"final={final} is above peak={peak}")


class Precision(Section):
    """Number formats (docs/precision.md). What begins with a policy's name is for it alone."""

    # bfloat16_pure stores what the others keep in float32, to show what that costs.
    policy: Literal["float32", "bfloat16", "bfloat16_pure", "float16", "float8"] = "float32"
    # Under float16: "dynamic", "none", or a number that stays. Multiplies the mean loss.
    loss_scale: LossScale = "dynamic"
    loss_scale_initial: PowerOfTwo = 2.0**16
    loss_scale_factor: PowerOfTwo = 2.0
    loss_scale_growth_interval: PositiveInt = 2000  # applied updates until it grows
    loss_scale_floor: PowerOfTwo = 1.0
    loss_scale_ceiling: PowerOfTwo = 2.0**32
    loss_scale_hysteresis: PositiveInt = 1  # overflows until it shrinks; refilled as it grows
    loss_scale_patience: PositiveInt = 20  # overflows in a row at the floor; then the run stops
    # "delayed": a scale per tensor, from the largest values of the last steps. "block": scales
    # of 1 x 128 activations and 128 x 128 weights, from the values themselves.
    float8_scaling: Literal["delayed", "block"] = "delayed"
    float8_history: PositiveInt = 1024  # steps
    float8_margin: NaturalInt = 0  # powers of two left free above the largest value

    @pydantic.model_validator(mode="after")
    def _loss_scale_is_usable(self) -> Precision:
        floor, ceiling = self.loss_scale_floor, self.loss_scale_ceiling
        if not floor <= self.loss_scale_initial <= ceiling:
            raise ValueError(
                f"loss_scale_initial={self.loss_scale_initial:g} must lie between "
                f"loss_scale_floor={floor:g} and loss_scale_ceiling={ceiling:g}"
            )
        if self.loss_scale_factor <= 1:
            raise ValueError(f"loss_scale_factor={self.loss_scale_factor:g} must be above 1")
        return self


class Numerics(Section):
    """What fixes the bits of a step (docs/bits.md). A change here is another run."""

    microbatch: PositiveInt = 1  # sequences; the unit of computation
    lanes: PositiveInt = 8  # the largest data-parallel width the run is meant for
    # "canonical": sums in one order whatever the data-parallel mesh. "fast": in XLA's.
    reduction: Literal["canonical", "fast"] = "canonical"
    # Positions of a sequence whose logits exist at once; null: all of them.
    loss_chunk: PositiveInt | None = None
    # Size of the pool of threads by which XLA:CPU splits contractions.
    threads: Annotated[int, pydantic.Field(gt=0, le=1024)] = 8

    @pydantic.model_validator(mode="after")
    def _lanes_are_a_power_of_two(self) -> Numerics:
        if self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes={self.lanes} must be a power of two (a binary tree's leaves)")
        return self


class Mesh(Section):
    data: PositiveInt = 1
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1
    emulated_devices: PositiveInt | None = None  # give a CPU machine this many devices

    @property
    def data_parallel(self) -> int:
        return self.data * self.fsdp


class Checkpoint(Section):
    every: PositiveInt = 100  # steps
    # The newest, and enough older ones to go back to from an incident seen late.
    keep_last: PositiveInt = 5
    keep_best: NaturalInt = 1  # by held-out loss
    keep_every: PositiveInt | None = None  # steps
    # A second folder for the run, on a disk that stays where the first may vanish.
    mirror: Place | None = None
    mirror_every: PositiveInt | None = None  # steps; null: each checkpoint


class Eval(Section):
    every: PositiveInt | None = None  # steps; a run that ends evaluates in any case


class Spikes(Section):
    """Which losses are incidents, and what is done about them (docs/spikes.md)."""

    policy: Literal["observe", "skip_update", "rollback", "rollback_healthy", "stop"] = "observe"

    # A loss is flagged above level + `sigmas` of the window's spread, or above level + `jump`.
    window: Annotated[int, pydantic.Field(ge=9, lt=_END)] = 100  # steps that the level comes from
    min_history: Annotated[int, pydantic.Field(ge=9, lt=_END)] = 30  # fewer give no spread
    sigmas: PositiveFloat = 6.0
    least_sigma: PositiveFloat = 0.003  # nats; a spread is taken to be at least this
    jump: PositiveFloat = 1.0  # nats
    drift: PositiveFloat = 0.1  # nats by which a slow rise lies above the best level
    stall_steps: Annotated[int, pydantic.Field(ge=600, lt=_END)] = (
        1000  # and at least a quarter of the run
    )
    least_fall: PositiveFloat = 0.01  # nats; who falls by less in so many steps has stalled

    # An incident is over after `recover_steps` good steps in a row, or judged.
    patience_steps: Annotated[int, pydantic.Field(ge=8, lt=_END)] = 100
    recover_steps: PositiveInt = 5
    nonfinite_steps: PositiveInt = 5  # in a row: diverged, without waiting

    # policy: skip_update. The limit of step s comes from steps up to s - lag.
    lag: PositiveInt = 10
    least_gradient_ratio: Annotated[float, pydantic.Field(gt=1)] = 3.0  # limit over level, at least
    most_skips: PositiveInt = 20  # in a row

    # policy: rollback, rollback_healthy.
    rewind_steps: PositiveInt = 100  # PaLM, section 5.1: "roughly 100 steps before the spike"
    exclude_batches: PositiveInt = 300  # likewise: "roughly 200-500 data batches"
    rate_scale: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.5
    same_place_steps: PositiveInt = 500  # onsets nearer than this are one place

    @pydantic.model_validator(mode="after")
    def _exclusion_reaches_the_spike(self) -> Spikes:
        if self.exclude_batches <= self.rewind_steps:
            raise ValueError(
                f"exclude_batches={self.exclude_batches} counts from rewind_steps="
                f"{self.rewind_steps} before the spike and does not reach it; make it larger"
            )
        if not self.min_history <= self.window:
            raise ValueError(
                f"min_history={self.min_history} is more than window={self.window} ever holds"
            )
        return self


class Verify(Section):
    """Silent corruption: gradients computed again on other devices (docs/faults.md)."""

    every: PositiveInt | None = None  # steps


class Distributed(Section):
    """Several processes of one run (docs/faults.md)."""

    timeout_s: WholeSeconds = 100  # without a sign of life from another process, the run ends
    start_timeout_s: WholeSeconds = 300  # for all to start, and to agree about what they train
    denied_hosts: tuple[str, ...] = ()  # no process of the run starts on these


class Supervise(Section):
    """What `palm-jax train --supervise` takes for a hang, and how often it starts anew."""

    restarts: PositiveInt = 5  # in a row, without a newer checkpoint
    backoff_s: Annotated[float, pydantic.Field(ge=0, le=1e7)] = 5.0  # then twice as long each time
    longest_backoff_s: Seconds = 300.0
    # No news for so long is a hang: at least `stall_s`, and `stall_factor` times the median.
    stall_factor: Annotated[float, pydantic.Field(gt=1, le=1e6)] = 10.0
    stall_s: Seconds = 600.0
    start_s: Seconds = 3600.0  # likewise, until the first steps are done


class Log(Section):
    every: PositiveInt = 10  # steps between flushes of the logbook
    # Of each microbatch's own gradient: names the lane, and so the host, where runs part.
    microbatch_digests: bool = False
    # "all": layer by layer, too (docs/vitals.md). "basic": losses, norms, rates.
    vitals: Literal["basic", "all"] = "all"
    tensorboard: bool = True
    # Run by the shell at each alarm and incident, with the event as a line of JSON on its input.
    alert_command: str | None = None
    peak_flops: PositiveFloat | None = None  # FLOP/s of one device, where it is not known
    profile: str | None = None  # "A:B": a profiler's trace of steps A to B - 1

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """`profile` as numbers."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)

    @pydantic.field_validator("profile")
    @classmethod
    def _profile_is_an_interval(cls, profile: str | None) -> str | None:
        if profile is not None:
            found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", profile)
            if found is None or int(found[1]) >= int(found[2]):
                raise ValueError(f"{_short(profile)} must be A:B with whole numbers, 0 <= A < B")
        return profile


class Config(Section):
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    steps: Annotated[int, pydantic.Field(gt=0, le=MOST_STEPS)]
    model: Model
    data: Data
    optimizer: Annotated[Optimizer, pydantic.Field(discriminator="name")] = Adafactor()
    schedule: Annotated[Schedule, pydantic.Field(discriminator="kind")] = PalmSchedule()
    precision: Precision = Precision()
    numerics: Numerics = Numerics()
    mesh: Mesh = Mesh()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    spikes: Spikes = Spikes()
    verify: Verify = Verify()
    distributed: Distributed = Distributed()
    supervise: Supervise = Supervise()
    log: Log = Log()

    @pydantic.model_validator(mode="after")
    def _sections_agree(self) -> Config:
        numerics, mesh, model = self.numerics, self.mesh, self.model
        unit = numerics.lanes * numerics.microbatch
        for size in self.data.ramp.sizes:
            if size % unit:
                raise ValueError(
                    f"data.ramp.sizes holds {size}, which is not a multiple of numerics.lanes x "
                    f"numerics.microbatch = {numerics.lanes} x {numerics.microbatch} = {unit}"
                )
        if numerics.lanes % mesh.data_parallel:
            raise ValueError(
                f"mesh.data x mesh.fsdp = {mesh.data} x {mesh.fsdp} = {mesh.data_parallel} must "
                f"divide numerics.lanes={numerics.lanes}"
            )
        if self.spikes.policy == "skip_update" and self.spikes.lag < self.log.every:
            raise ValueError(
                f"spikes.lag={self.spikes.lag}, but with log.every={self.log.every} the host may "
                "know no step that recent; make spikes.lag at least log.every"
            )
        chunk = numerics.loss_chunk
        if chunk is not None and model.sequence_length % chunk:
            raise ValueError(
                f"numerics.loss_chunk={chunk} must divide model.sequence_length="
                f"{model.sequence_length}"
            )
        if model.width % numerics.lanes:
            raise ValueError(
                f"model.width={model.width} must be a multiple of numerics.lanes={numerics.lanes}: "
                "parameters are cut into that many slices along it"
            )
        for setting, size in (
            ("model.num_heads", model.num_heads),
            ("model.feed_forward", model.feed_forward_size),
            ("the padded model.vocabulary_size", model.padded_vocabulary_size),
            ("model.width", model.width),
        ):
            if size % mesh.tensor:
                raise ValueError(f"{setting} = {size} does not divide by mesh.tensor={mesh.tensor}")
        num_devices = mesh.data_parallel * mesh.tensor
        if mesh.emulated_devices is not None and mesh.emulated_devices != num_devices:
            raise ValueError(
                f"mesh.emulated_devices={mesh.emulated_devices}, but mesh.data x fsdp x tensor = "
                f"{mesh.data} x {mesh.fsdp} x {mesh.tensor} = {num_devices}; make them equal"
            )
        return self


# Of a config file; and what may be in it, written out.
_MOST_BYTES, _MOST_VALUES = 2**18, 10_000
_MOST_BASES = 20  # one below the other
_MOST_PROBLEMS = 20  # told at once


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers; a repeated key, a tag and aliases that multiply are errors."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[int, int] = {}  # by node: values in it, with all that aliases repeat

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()

        def refused(problem: str) -> yaml.composer.ComposerError:
            return yaml.composer.ComposerError(None, None, problem, event.start_mark)

        # SafeLoader's own tags run nothing, but it does not expect `!!int ""` or `!!bool x`.
        if getattr(event, "tag", None) is not None:
            raise refused(f"the tag {event.tag}: plain values have none")
        node = super().compose_node(parent, index)
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = self._size(node)
        if id(node) not in self._sizes:
            raise refused("an alias of what it lies within")
        if self._sizes[id(node)] > _MOST_VALUES:
            raise refused(f"there are more than {_MOST_VALUES:,} values")
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        return 1 + sum(self._sizes[id(part)] for part in inner)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, collections.abc.Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {_short(key)} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


# YAML 1.1 reads 1e-4 as text, 010 as eight, 1:30 as ninety and 2020-01-01 as a date.
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [
            (tag, form) for tag, form in rows if tag.rpartition(":")[2] in ("bool", "null", "merge")
        ]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
            r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )


def _parse(text: str, where: str) -> Any:
    """Plain data: what JSON can hold, no part of it shared by two places (YAML's aliases)."""
    try:
        # A SafeLoader: it builds plain data only, and runs nothing.
        return json.loads(json.dumps(yaml.load(text, _Loader)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise WrongInput(f"{where} is not valid YAML: {error}") from None


def _read_file(path: pathlib.Path, below: tuple[pathlib.Path, ...] = ()) -> dict[str, Any]:
    """Settings of a file over those of its base; `below` are the files that lead here."""
    try:
        text = files.text(path, _MOST_BYTES)
        own_place = path.resolve()
    # ValueError: not UTF-8, or a name that no file can have. RuntimeError: links in a circle.
    except (OSError, ValueError, RuntimeError) as error:
        raise WrongInput(f"cannot read the config {path}: {error}") from None
    if own_place in below:
        raise WrongInput(f"{path}: its base leads back to itself")
    if len(below) > _MOST_BASES:
        raise WrongInput(f"{path}: it is the base of a base, more than {_MOST_BASES} times over")
    settings = _parse(text, str(path))
    if not isinstance(settings, dict):
        raise WrongInput(f"{path} must hold `section:` mappings, not {type(settings).__name__}")
    base = settings.pop("base", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise WrongInput(f"{path}: base={_short(base)} must be the path of another config")
    return _merged(_read_file(path.parent / base, (*below, own_place)), settings)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise WrongInput(f"override {_short(override)} must have the form section.key=value")
    *sections, key = name.split(".")
    if len(sections) > 3:
        raise WrongInput(f"override {_short(override)}: there are no settings that deep")
    place = settings
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise WrongInput(f"override {_short(override)}: {section} holds a value, not a section")
        place = inner
    place[key] = _parse(text, f"override {_short(override)}")


def load(path: str | pathlib.Path, overrides: collections.abc.Sequence[str] = ()) -> Config:
    """Read a config file, its bases and overrides.

    Raises:
      WrongInput: a file that cannot be read, a key that does not exist (with the nearest
        that does), a value of the wrong kind, or settings that do not fit together.
    """
    settings = _read_file(pathlib.Path(path))
    for override in overrides:
        _apply_override(settings, override)
    return from_dict(settings, str(path))


def override(config: Config, overrides: collections.abc.Sequence[str]) -> Config:
    """`config` with some settings replaced; errors as in `load`."""
    settings = config.model_dump(mode="json")
    # The settings of a kind of a section go with it.
    for section, tag in TAGS.items():
        kinds = [text.partition("=") for text in overrides if text.startswith(f"{section}.{tag}=")]
        if kinds and kinds[-1][2] != settings[section][tag]:
            settings[section] = {}
    for text in overrides:
        _apply_override(settings, text)
    return from_dict(settings, "overrides")


def without_other_kinds(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without nulls that the kinds of their sections have no place for.

    Such a null is what `differences` gives for a setting that went with its kind.
    """
    found = dict(settings)
    for section, tag in TAGS.items():
        fields = _settings_of_kind(section, settings[section].get(tag)) or set(settings[section])
        found[section] = {
            k: v for k, v in settings[section].items() if v is not None or k in fields
        }
    return found


def _settings_of_kind(section: str, kind: object) -> set[str] | None:
    """Names of the settings of a kind of a section; None: there is no such kind."""
    for model in Config.model_fields[section].annotation.__args__:  # type: ignore[union-attr]
        if kind in model.model_fields[TAGS[section]].annotation.__args__:
            return set(model.model_fields)
    return None


def from_dict(settings: dict[str, Any], where: str = "config") -> Config:
    """Build a Config from plain data; errors as in `load`."""
    for section, tag in TAGS.items():
        # So that one setting of the default kind can be changed without naming it.
        if isinstance(given := settings.get(section), dict) and tag not in given:
            default = Config.model_fields[section].default
            settings = {**settings, section: {tag: getattr(default, tag), **given}}
    try:
        # Through JSON, because strict validation of JSON takes a list for a tuple.
        return Config.model_validate_json(json.dumps(settings))
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_explain(e) for e in found[:_MOST_PROBLEMS]]
        if more := len(found) - len(problems):
            problems.append(f"and {more:,} more")
        raise WrongInput(f"{where}: " + "; ".join(problems)) from None
    except (TypeError, ValueError) as error:
        raise WrongInput(f"{where}: {error}") from None


def _keys(model: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key there is, e.g. `model.width`."""
    found = []
    for name, field in model.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(kind, type) and issubclass(kind, Section)
        ]
        for kind in inner:
            found += _keys(kind, f"{prefix}{name}.")
        if not inner:
            found.append(f"{prefix}{name}")
    return list(dict.fromkeys(found))


def _explain(error: Any) -> str:
    # A discriminated union puts its tag into the location: optimizer.adamw.beta1.
    name = ".".join(
        str(part)
        for position, part in enumerate(error["loc"])
        if not (position == 1 and error["loc"][0] in TAGS)
    )
    if error["type"] == "extra_forbidden" and name in _keys(Config):
        kind = error["loc"][1]
        return f"{name} is a setting of another kind of {error['loc'][0]} than {kind!r}"
    if error["type"] == "extra_forbidden":
        return f"there is no setting {_cut(name)}{_nearest(name)}"
    if error["type"] == "json_invalid":
        return f"it holds text that is no Unicode, or is nested too deep ({error['msg']})"
    if error["type"] == "missing":
        return f"{name} is missing; set it in the file or with {name}=..."
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}" if name else str(error["ctx"]["error"])
    return f"{name}={_short(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _short(value: object) -> str:
    try:
        return _cut(repr(value))
    except ValueError:  # an integer of thousands of digits
        return "a number far too large"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _nearest(name: str) -> str:
    if len(name) > 200:
        return ""
    keys = _keys(Config)
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    close = same_leaf or difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    if not close:
        by_leaf = {key.rpartition(".")[2]: key for key in keys}
        close = [by_leaf[k] for k in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)]
    return f"; did you mean {close[0]}?" if close else ""


def to_yaml(config: Config) -> str:
    """The complete resolved config, readable, and accepted again by `load`."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def fingerprint(config: Config) -> str:
    """Hash of every setting that must stay the same while a run is continued."""
    fixed = {key: value for key, value in flat(config).items() if not may_change(key, config)}
    text = json.dumps(fixed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def may_change(key: str, config: Config) -> bool:
    """Whether a dotted setting may differ when a run of `config` is resumed."""
    canonical = config.numerics.reduction == "canonical"
    return is_within(key, MAY_CHANGE_ON_RESUME + (MAY_CHANGE_IF_CANONICAL if canonical else ()))


def is_within(key: str, names: tuple[str, ...]) -> bool:
    """Whether a dotted setting is one of `names`, or lies in such a section."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted settings that differ, with both values: {"model.width": (64, 128)}."""
    before, after = flat(old), flat(new)
    return {
        key: (before.get(key), after.get(key))
        for key in before | after
        if before.get(key) != after.get(key)
    }


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key."""

    def rows(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in settings.items():
            if isinstance(value, dict):
                found |= rows(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = value
        return found

    return rows(config.model_dump(mode="json"), "")
