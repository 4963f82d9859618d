"""A config is refused with a message, or is a config, whatever stands in its file."""

from __future__ import annotations

import json
import os
import pathlib

import hypothesis
import hypothesis.strategies as st
import mutations
import pytest
import yaml

from palm_jax import config
from palm_jax.config import explaining, reading
from palm_jax.errors import WrongInput
from palm_jax.plan import memory, parameters
from palm_jax.sharding import RULES

SETTINGS = {
    "steps": 40,
    "model": {
        "num_layers": 2,
        "width": 32,
        "num_heads": 4,
        "head_size": 8,
        "vocabulary_size": 257,
        "sequence_length": 16,
    },
    "data": {"corpus": "corpus", "ramp": {"starts": [0, 20], "sizes": [8, 16]}},
    "precision": {"policy": "float16", "loss_scale": 1024},
    "log": {"profile": "1:3"},
}
MIXTURE = {
    "corpora": {"books": "corpora/books", "code": "corpora/code"},
    "starts": [0, 10],
    "weights": [{"books": 0.75, "code": 0.25}, {"books": 0, "code": 1}],
}
MIXED = SETTINGS | {"data": {"mixture": MIXTURE, "ramp": {"sizes": [8]}}}
TEXT = yaml.safe_dump(SETTINGS)
LEAVES = sorted(explaining.keys(config.Config))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("configs") / "a.yaml"
    path.write_text(TEXT)
    return path


def load(path: pathlib.Path, *overrides: str) -> config.Config | None:
    loaded = mutations.answered(lambda: config.load(path, overrides), path, *overrides, "override")
    if loaded is None:
        return None
    # What can be said of it before it is trained.
    sizes = parameters.number(loaded.model), memory.on_each_device(loaded, RULES).total
    assert all(float(size) > 0 for size in sizes)
    assert config.from_dict(yaml.load(config.to_yaml(loaded), reading._Loader)) == loaded
    return loaded


def written(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.write_bytes(content)
    return path


# JSON is YAML.
CHANGED = st.one_of(map(mutations.value_changes, (SETTINGS, MIXED))).map(
    lambda changed: json.dumps(changed).encode()
)


@mutations.QUICK
@hypothesis.given(CHANGED | mutations.byte_changes(TEXT.encode()))
@hypothesis.example(b"!!int ''")
@hypothesis.example(TEXT.encode() + b"seed: !!int '1:1:1'\n")
@hypothesis.example(TEXT.encode() + b"seed: !!bool x\n")
@hypothesis.example(TEXT.encode() + b"eval: {every: " + b"9" * 5000 + b"}\n")
def test_any_file_is_a_config_or_refused_by_name(place, content):
    load(written(place.with_name("b.yaml"), content))


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(CHANGED | mutations.byte_changes(TEXT.encode()))
def test_many_files_are_configs_or_refused_by_name(place, content):
    load(written(place.with_name("b.yaml"), content))


VALUES = mutations.ODD.map(json.dumps) | st.text(max_size=8) | st.sampled_from(
    [
        *("9" * 4000, "-" + "9" * 4000, "1e400", "1e-400", ".nan", "2e10", "4503599627370496"),
        *("&a [*a]", "!!int ''", "!!float ''", "!!timestamp x", "{<<: {a: 1}}", "? [a]"),
        "'\ud800'",
    ]
)  # fmt: skip


@mutations.QUICK
@hypothesis.given(st.sampled_from(LEAVES) | st.text(max_size=9), VALUES)
@hypothesis.example("precision.loss_scale", "9" * 400)
@hypothesis.example("model.width", str(2**62))
def test_any_override_is_taken_or_refused_by_name(place, name, value):
    load(place, f"{name}={value}")


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(st.sampled_from(LEAVES), VALUES)
def test_many_overrides_are_taken_or_refused_by_name(place, name, value):
    load(place, f"{name}={value}")


@pytest.mark.parametrize("kind", mutations.KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(place, kind):
    with mutations.damaged(place.parent, place.name, kind):
        assert load(place) is None


def refusal(path: pathlib.Path, content: str) -> str:
    with pytest.raises(WrongInput) as caught:
        config.load(written(path, content.encode()))
    return str(caught.value)


def test_aliases_that_multiply_are_not_written_out(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    assert "more than 10,000 values" in refusal(tmp_path / "a.yaml", "\n".join(lines))


def test_a_large_file_is_not_parsed(tmp_path):
    assert "larger than" in refusal(tmp_path / "a.yaml", "a" * 2**19)
    with (tmp_path / "b.yaml").open("wb") as file:
        os.truncate(file.fileno(), 2**40)
    with pytest.raises(WrongInput, match="larger than"):
        config.load(tmp_path / "b.yaml")


def test_a_message_has_an_end_however_much_is_wrong(tmp_path):
    said = refusal(tmp_path / "a.yaml", "".join(f"k{n}: {'x' * 50}\n" for n in range(900)))
    assert len(said) < 5000
    assert "; and " in said
    assert len(refusal(tmp_path / "a.yaml", f"{TEXT}seed: {'x' * 10_000}\n")) < 1000


def test_a_long_row_of_bases_is_refused(tmp_path):
    for number in range(1200):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    with pytest.raises(WrongInput, match="the base of a base"):
        config.load(tmp_path / "0.yaml")


def test_a_batch_that_no_memory_holds_is_refused(place):
    with pytest.raises(WrongInput, match=r"data\.ramp\.sizes"):
        config.load(place, [f"data.ramp={{sizes: [{2**40}]}}"])
