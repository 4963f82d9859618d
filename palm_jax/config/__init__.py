"""Typed, frozen configuration: YAML files with a `base:`, and `section.key=value` overrides.

A configuration is data. Reading somebody's run never executes code from its folder, and
this module imports neither JAX nor anything that touches a device, so that thread counts
and emulated devices can be set from it before JAX starts.
"""

from __future__ import annotations

import collections.abc
import hashlib
import json
import pathlib
from typing import Annotated, Any, get_args

import pydantic
import yaml

from palm_jax.config import reading
from palm_jax.config.architecture import Model
from palm_jax.config.data import MOST_INCREMENTS, MOST_TURNS, Data, LinearRamp, Mixture, Ramp
from palm_jax.config.explaining import TAGS, explain, keys
from palm_jax.config.fields import MOST_STEPS, Section
from palm_jax.config.numerics import Mesh, Numerics, Precision
from palm_jax.config.optimizer import SGD, SOAP, Adafactor, AdamW, Lion, Muon, Optimizer, Sophia
from palm_jax.config.running import Checkpoint, Distributed, Eval, Log, Spikes, Supervise, Verify
from palm_jax.config.schedule import (
    ConstantSchedule,
    CosineSchedule,
    InverseSquareRootSchedule,
    LinearSchedule,
    PalmSchedule,
    Schedule,
    WsdSchedule,
)
from palm_jax.errors import WrongInput

__all__ = [
    "MAY_CHANGE_IF_CANONICAL",
    "MAY_CHANGE_ON_RESUME",
    "MOST_INCREMENTS",
    "MOST_STEPS",
    "MOST_TURNS",
    "PLACES_OF_DATA",
    "SGD",
    "SOAP",
    "TAGS",
    "Adafactor",
    "AdamW",
    "Checkpoint",
    "Config",
    "ConstantSchedule",
    "CosineSchedule",
    "Data",
    "Distributed",
    "Eval",
    "InverseSquareRootSchedule",
    "LinearRamp",
    "LinearSchedule",
    "Lion",
    "Log",
    "Mesh",
    "Mixture",
    "Model",
    "Muon",
    "Numerics",
    "Optimizer",
    "PalmSchedule",
    "Precision",
    "Ramp",
    "Schedule",
    "Section",
    "Sophia",
    "Spikes",
    "Supervise",
    "Verify",
    "WsdSchedule",
    "differences",
    "fingerprint",
    "flat",
    "from_dict",
    "is_within",
    "load",
    "may_change",
    "override",
    "to_yaml",
    "without_other_kinds",
]

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

_MOST_PROBLEMS = 20  # told at once


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
            *(
                [("model.num_key_value_heads", model.num_key_value_heads)]
                if model.num_key_value_heads > 1  # one key and value are whole on each device
                else []
            ),
            ("model.feed_forward", model.feed_forward_size),
            ("the padded model.vocabulary_size", model.padded_vocabulary_size),
            ("model.width", model.width),
        ):
            if size % mesh.tensor:
                raise ValueError(f"{setting} = {size} does not divide by mesh.tensor={mesh.tensor}")
        if isinstance(self.optimizer, SOAP):
            for setting, size in (
                ("model.width", model.width),
                ("model.feed_forward", model.feed_forward_size),
                ("model.num_heads x model.head_size", model.num_heads * model.head_size),
                (
                    "model.num_key_value_heads x model.head_size",
                    model.num_key_value_heads * model.head_size,
                ),
            ):
                if size <= self.optimizer.largest_side and size**2 % numerics.lanes:
                    raise ValueError(
                        f"{setting} = {size}: its square does not divide by numerics.lanes="
                        f"{numerics.lanes}, into which optimizer.name=soap cuts matrices of that "
                        "side; make it a multiple of a larger power of two, or "
                        f"optimizer.largest_side less than {size}"
                    )
        num_devices = mesh.data_parallel * mesh.tensor
        if model.mup_base_width is not None and not isinstance(self.optimizer, AdamW | Lion):
            raise ValueError(
                f"model.mup_base_width={model.mup_base_width}: its rates are those of AdamW and "
                f"Lion, and optimizer.name={self.optimizer.name}; set optimizer.name=adamw or "
                "lion, or model.mup_base_width=null"
            )
        if isinstance(self.optimizer, Sophia) and self.optimizer.estimator == "hutchinson":
            # Backward rules that must not be differentiated: some take a device's part of a
            # cotangent for all of it, a kernel's has none, eight bits round what it would see.
            for setting, is_refused in {
                f"mesh.tensor={mesh.tensor}": mesh.tensor > 1,
                f"model.attention={model.attention}": model.attention == "splash",
                f"precision.policy={self.precision.policy}": self.precision.policy == "float8",
            }.items():
                if is_refused:
                    raise ValueError(
                        f"{setting}: optimizer.estimator=hutchinson cannot differentiate that "
                        "twice; change it, or set optimizer.estimator=gauss_newton_bartlett"
                    )
        if mesh.emulated_devices is not None and mesh.emulated_devices != num_devices:
            raise ValueError(
                f"mesh.emulated_devices={mesh.emulated_devices}, but mesh.data x fsdp x tensor = "
                f"{mesh.data} x {mesh.fsdp} x {mesh.tensor} = {num_devices}; make them equal"
            )
        return self


def load(path: str | pathlib.Path, overrides: collections.abc.Sequence[str] = ()) -> Config:
    """Read a config file, its bases and overrides.

    Raises:
      WrongInput: a file that cannot be read, a key that does not exist (with the nearest
        that does), a value of the wrong kind, or settings that do not fit together.
    """
    settings = reading.read(pathlib.Path(path))
    for override in overrides:
        reading.apply_override(settings, override)
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
        reading.apply_override(settings, text)
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
    for model in get_args(Config.model_fields[section].annotation):
        if kind in get_args(model.model_fields[TAGS[section]].annotation):
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
        problems = [explain(e, keys(Config)) for e in found[:_MOST_PROBLEMS]]
        if more := len(found) - len(problems):
            problems.append(f"and {more:,} more")
        raise WrongInput(f"{where}: " + "; ".join(problems)) from None
    except (TypeError, ValueError) as error:
        raise WrongInput(f"{where}: {error}") from None


def to_yaml(config: Config) -> str:
    """The complete resolved config, readable, and accepted again by `load`."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=reading.Dumper, sort_keys=False)


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
