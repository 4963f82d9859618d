from __future__ import annotations

import contextlib
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, stream
from palm_jax.errors import WrongInput

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SMALL = """\
steps: 40
model: {num_layers: 2, width: 32, num_heads: 4, head_size: 8, vocabulary_size: 257,
        sequence_length: 16}
data: {corpus: runs/corpus, ramp: {starts: [0, 20], sizes: [8, 16]}}
schedule: {kind: palm}
optimizer: {name: adafactor}
"""
COSINE = "schedule={kind: cosine, peak: 0.1, final: 0.01, warmup_steps: 3, decay_steps: 30}"
HUTCHINSON = "optimizer={name: sophia, estimator: hutchinson}"


@pytest.fixture
def small(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def small_for_all(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SMALL)
    return path


def refusal(path: pathlib.Path, *overrides: str) -> str:
    with pytest.raises(WrongInput) as caught:
        config.load(path, overrides)
    return str(caught.value)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            rows |= flat(value, f"{prefix}{key}.")
        else:
            rows[prefix + key] = value
    return rows


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_open_with_their_command(path):
    config.load(path)
    assert f"#   palm-jax train configs/{path.name} --run runs/{path.stem}" in path.read_text()


# Numbers


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4", ".1e-3", "1.e-4"])
def test_scientific_notation_is_a_number_in_a_file_and_on_the_command_line(small, text):
    assert config.load(small, [f"schedule.peak={text}"]).schedule.peak == 0.0001
    small.write_text(SMALL.replace("kind: palm", f"kind: palm, peak: {text}"))
    assert config.load(small).schedule.peak == 0.0001


@pytest.mark.parametrize("text", ["abc", "1e", "1e-4x", "'1e-4'", "[1]", "0.1 0.2", "null"])
def test_what_is_no_number_is_refused_with_the_setting_and_the_value(small, text):
    message = refusal(small, f"schedule.peak={text}")
    assert "schedule.peak" in message
    assert "number" in message
    small.write_text(SMALL.replace("kind: palm", f"kind: palm, peak: {text}"))
    assert "schedule.peak" in refusal(small)


@pytest.mark.parametrize("setting", ["seed", "steps", "model.width", "schedule.peak", "mesh.data"])
@pytest.mark.parametrize("text", ["true", "no", ".nan", ".inf", "-.inf", "1e999", "'12'", ""])
def test_booleans_text_and_non_finite_values_are_no_numbers(small, setting, text):
    assert setting in refusal(small, f"{setting}={text}")


def test_number_is_no_boolean(small):
    assert "model.qk_norm" in refusal(small, "model.qk_norm=1")


def test_fraction_is_no_count_even_where_it_is_whole(small):
    assert "steps=40.0" in refusal(small, "steps=40.0")


@pytest.mark.parametrize(
    ("setting", "refused", "accepted"),
    [
        ("steps", "0", "1"),
        ("seed", "-1", "0"),
        ("schedule.peak", "0", "1e-30"),
        ("optimizer.beta1", "1", "0"),
        ("optimizer.beta1", "-0.1", "0.999"),
        ("model.vocabulary_size", "1", "2"),
        ("model.z_loss", "-1e-4", "0"),
        ("checkpoint.keep_best", "-1", "0"),
    ],
)
def test_limits_lie_where_the_meaning_ends(small, setting, refused, accepted):
    assert setting in refusal(small, f"{setting}={refused}")
    config.load(small, [f"{setting}={accepted}"])


# Names


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.widht", "model.width"),
        ("step", "steps"),
        ("data.ramp.size", "data.ramp.sizes"),
        ("data.width", "model.width"),
        ("width", "model.width"),
        ("model.peak", "schedule.peak"),
        ("schedule.beta1", "optimizer.beta1"),
        ("optimizer.beta_1", "optimizer.beta1"),
        ("data.starts", "data.ramp.starts"),
    ],
)
def test_unknown_setting_is_named_with_the_one_that_was_meant(small, wrong, right):
    assert f"there is no setting {wrong}; did you mean {right}?" in refusal(small, f"{wrong}=1")


def test_unknown_section_is_named(small):
    assert "there is no setting modle" in refusal(small, "modle.width=1")


def test_unknown_setting_in_a_file_is_refused_too(small):
    small.write_text(SMALL.replace("width: 32", "width: 32, widht: 32"))
    message = refusal(small)
    assert "there is no setting model.widht; did you mean model.width?" in message
    assert str(small) in message


def test_all_problems_are_named_at_once(small):
    message = refusal(small, "model.widht=3", "seed=x", "log.evry=2")
    assert all(name in message for name in ("model.widht", "seed", "log.evry"))


def test_missing_setting_is_named_with_both_ways_to_set_it(small):
    small.write_text(SMALL.replace("steps: 40\n", ""))
    assert "steps is missing" in refusal(small)
    assert "steps=..." in refusal(small)
    assert config.load(small, ["steps=40"]).steps == 40


def test_setting_of_another_optimizer_is_refused(small):
    said = refusal(small, "optimizer.epsilon=1e-8")
    assert "optimizer.epsilon is a setting of another kind of optimizer than 'adafactor'" in said
    assert "adafactor" in refusal(small, "optimizer.name=sgdd")


@pytest.mark.parametrize(
    "override", ["", "steps", "=3", ".steps=3", "model.=3", "model..width=3", "--steps"]
)
def test_override_without_a_name_and_a_value_is_refused(small, override):
    assert "section.key=value" in refusal(small, override)


def test_override_below_a_value_is_refused(small):
    assert "steps holds a value" in refusal(small, "steps.x=3")


def test_later_overrides_win(small):
    assert config.load(small, ["steps=3", "steps=4"]).steps == 4


def test_override_may_hold_an_equals_sign(small):
    assert config.load(small, ["data.corpus=a=b"]).data.corpus == "a=b"


def test_one_setting_of_a_default_optimizer_or_schedule_can_be_overridden(small):
    small.write_text(SMALL.split("schedule:")[0])
    assert config.load(small, ["optimizer.beta1=0.5"]).optimizer.beta1 == 0.5
    assert config.load(small, ["schedule.peak=0.5"]).schedule.peak == 0.5


# Files


def test_base_is_read_from_the_files_own_folder_and_merged_section_by_section(small):
    (small.parent / "inner").mkdir()
    middle = small.parent / "inner" / "middle.yaml"
    middle.write_text("base: ../small.yaml\nmodel: {width: 64}\nseed: 5\n")
    top = small.parent / "top.yaml"
    top.write_text("base: inner/middle.yaml\nseed: 6\ndata: {ramp: {sizes: [16, 32]}}\n")
    loaded = config.load(top)
    assert (loaded.seed, loaded.model.width, loaded.model.num_layers) == (6, 64, 2)
    assert (loaded.data.ramp.starts, loaded.data.ramp.sizes) == ((0, 20), (16, 32))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_base_that_leads_back_is_refused(tmp_path, length):
    for i in range(length):
        (tmp_path / f"{i}.yaml").write_text(f"base: {(i + 1) % length}.yaml\n")
    assert "leads back to itself" in refusal(tmp_path / "0.yaml")


def test_base_that_leads_back_by_another_spelling_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(f"base: ../{tmp_path.name}/a.yaml\n")
    assert "leads back to itself" in refusal(tmp_path / "a.yaml")


def test_missing_base_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("base: nowhere.yaml\n")
    assert "nowhere.yaml" in refusal(tmp_path / "a.yaml")


@pytest.mark.parametrize("base", ["[a]", "3", "{a: b}", "true"])
def test_base_must_be_a_path(tmp_path, base):
    (tmp_path / "a.yaml").write_text(f"base: {base}\n")
    assert "base=" in refusal(tmp_path / "a.yaml")


def test_base_is_no_setting_for_the_command_line(small):
    assert "there is no setting base" in refusal(small, "base=other.yaml")


@pytest.mark.parametrize("base", ["a\\0b", "\\ud800"])
def test_base_that_no_file_can_have_is_refused(tmp_path, base):
    (tmp_path / "a.yaml").write_text(f'base: "{base}"\n')
    try:
        config.load(tmp_path / "a.yaml")
    except WrongInput:
        return  # not inside pytest.raises: WrongInput is itself a ValueError


@pytest.mark.parametrize("text", ["", "# nothing\n", "[1, 2]", "3", "text"])
def test_file_without_sections_is_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert str(path) in refusal(path)


def test_file_that_cannot_be_read_is_named(tmp_path):
    assert "absent.yaml" in refusal(tmp_path / "absent.yaml")
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xff\n")
    assert "latin.yaml" in refusal(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "text", ["steps: 40\nsteps: 41\n", "model: {width: 1, width: 2}\n", "a: {b: {c: 1, c: 1}}\n"]
)
def test_setting_that_stands_twice_is_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert "stands twice" in refusal(path)


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\t", "'", "*a", "? [a]\n: b", "{a: !!map 3}"])
def test_broken_yaml_is_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert "not valid YAML" in refusal(path)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{}]]",
        "!!python/object/apply:os.mkdir [{}]",
        "!!python/object/new:os.mkdir [{}]",
        "!!python/name:os.mkdir",
        "!!python/tuple [1]",
    ],
)
def test_yaml_cannot_run_code(small, tag):
    trace = small.parent / "trace"
    text = tag.format(trace)
    assert "not valid YAML" in refusal(small, f"data.corpus={text}")
    small.write_text(f"{SMALL}seed: {text}\n")
    assert "not valid YAML" in refusal(small)
    assert not trace.exists()


def test_override_of_an_aliased_section_leaves_the_other_one(small):
    small.write_text(f"{SMALL}checkpoint: &often {{every: 5}}\neval: *often\n")
    loaded = config.load(small, ["eval.every=7"])
    assert (loaded.checkpoint.every, loaded.eval.every) == (5, 7)


# Settings that must fit together


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.head_size=7"], ["model", "head_size=7", "even"]),
        (["data.ramp.starts=[0]"], ["data.ramp", "starts=[0]", "one size per stage"]),
        (["data.ramp.starts=[1, 20]"], ["data.ramp", "starts=[1, 20]", "rise from 0"]),
        (["data.ramp.starts=[0, 0]"], ["data.ramp", "starts=[0, 0]", "rise from 0"]),
        (["data.ramp={starts: [], sizes: []}"], ["data.ramp", "starts=[]"]),
        (["data.ramp.sizes=[8, 12]"], ["data.ramp.sizes", "12", "8 x 1 = 8"]),
        (["numerics.microbatch=2"], ["data.ramp.sizes", "holds 8", "8 x 2 = 16"]),
        (["numerics.lanes=6"], ["numerics", "lanes=6", "power of two"]),
        (["mesh.data=3"], ["mesh.data x mesh.fsdp = 3 x 1 = 3", "numerics.lanes=8"]),
        (["mesh.data=4", "mesh.fsdp=4"], ["4 x 4 = 16", "numerics.lanes=8"]),
        (["model.width=36"], ["model.width=36", "numerics.lanes=8"]),
        (["mesh.tensor=3"], ["model.num_heads = 4", "mesh.tensor=3"]),
        (["mesh.tensor=4", "model.feed_forward=90"], ["model.feed_forward = 90", "mesh.tensor=4"]),
        (
            ["mesh.tensor=4", "model.vocabulary_multiple=1"],
            ["model.vocabulary_size = 257", "mesh.tensor=4"],
        ),
        (["mesh.data=2", "mesh.emulated_devices=4"], ["mesh.emulated_devices=4", "2 x 1 x 1 = 2"]),
        ([COSINE, "schedule.warmup_steps=30"], ["warmup_steps=30", "decay_steps=30"]),
        ([COSINE, "schedule.final=0.2"], ["final=0.2", "peak=0.1"]),
        (
            ["optimizer={name: soap}", "model.feed_forward=90"],
            ["model.feed_forward = 90", "numerics.lanes=8", "optimizer.largest_side less than 90"],
        ),
        ([HUTCHINSON, "mesh.tensor=2"], ["mesh.tensor=2", "optimizer.estimator=hutchinson"]),
        ([HUTCHINSON, "model.attention=splash"], ["model.attention=splash", "hutchinson"]),
        ([HUTCHINSON, "precision.policy=float8"], ["precision.policy=float8", "hutchinson"]),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_all_their_values(
    small, overrides, said
):
    message = refusal(small, *overrides)
    assert [part for part in said if part not in message] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh={data: 2, fsdp: 4, tensor: 4, emulated_devices: 32}"],
        ["numerics={lanes: 4, microbatch: 2}"],
        ["numerics.lanes=1", "data.ramp={sizes: [3]}"],
        [COSINE, "schedule.warmup_steps=29", "schedule.final=0.1"],
        ["optimizer={name: adamw, beta2: 0.9}"],
        ["optimizer={name: sophia}", "mesh.tensor=2", "precision.policy=float8"],
        [HUTCHINSON, "mesh={data: 2, fsdp: 4}", "precision.policy=float16"],
        ["model.feed_forward=90", "mesh.tensor=2"],
    ],
)
def test_settings_that_fit_together_are_accepted(small, overrides):
    config.load(small, overrides)


def test_derived_sizes(small):
    model = config.load(small).model
    assert model.feed_forward_size == 128
    assert model.padded_vocabulary_size == 384
    assert config.load(small, ["model.feed_forward=90"]).model.feed_forward_size == 90
    assert config.load(small, ["model.vocabulary_size=256"]).model.padded_vocabulary_size == 256
    assert config.load(small, ["mesh={data: 2, fsdp: 4}"]).mesh.data_parallel == 8


def test_config_cannot_be_changed(small):
    loaded = config.load(small)
    with pytest.raises(ValueError, match="frozen"):
        loaded.steps = 3


# Fingerprint, and a config as text

# A value for each setting that differs from SMALL's, with what else it needs to be valid.
OTHER = {
    "seed": "1",
    "steps": "41",
    "model.num_layers": "3",
    "model.width": "64",
    "model.num_heads": "2",
    "model.head_size": "10",
    "model.feed_forward": "96",
    "model.vocabulary_size": "256",
    "model.vocabulary_multiple": "64",
    "model.sequence_length": "17",
    "model.num_key_value_heads": "2",
    "model.block": "serial",
    "model.norm": "layernorm",
    "model.final_norm_scale": "true",
    "model.biases": "true",
    "model.activation": "geglu",
    "model.positions": "alibi",
    "model.rope_base": "1e5",
    "model.tied_embedding": "false",
    "model.embedding_norm": "true",
    "model.embedding_scale": "2.0",
    "model.logit_scale": "1.0",
    "model.qk_norm": "true",
    "model.initialiser": "gpt2",
    "model.initial_std": "0.01",
    "model.embedding_std": "0.01",
    "model.mup_base_width": "16",
    "model.mup_base_head_size": "4",
    "model.dropout": "0.1",
    "model.attention_dropout": "0.1",
    "model.embedding_dropout": "0.1",
    "model.isolate_documents": "true",
    "model.z_loss": "0",
    "model.attention": "splash",
    "model.remat": "full",
    "data.corpus": "elsewhere",
    "data.ramp.starts": "[0, 21]",
    "data.ramp.sizes": "[8, 24]",
    "data.read_threads": "3",
    "data.prefetch_steps": "5",
    "optimizer.beta1": "0.8",
    "optimizer.beta2_exponent": "0.7",
    "optimizer.clip_norm": "null",
    "optimizer.update_clip": "null",
    "optimizer.weight_decay_exponent": "null",
    "optimizer.epsilon_square": "1e-20",
    "optimizer.epsilon_scale": "1e-4",
    "optimizer.factored": "true",
    "optimizer.no_decay": "[norms]",
    "schedule.batch_size_reference": "8",
    "schedule.peak": "0.02",
    "schedule.hold_steps": "9",
    "precision.policy": "bfloat16",
    "numerics.microbatch": "1",
    "numerics.lanes": "4",
    "numerics.reduction": "fast",
    "numerics.loss_chunk": "4",
    "numerics.threads": "4",
    "mesh.data": "2",
    "mesh.fsdp": "2",
    "mesh.tensor": "2",
    "mesh.emulated_devices": "1",
    "checkpoint.every": "7",
    "checkpoint.keep_last": "4",
    "checkpoint.keep_best": "0",
    "checkpoint.keep_every": "10",
    "eval.every": "9",
    "log.every": "3",
    "log.microbatch_digests": "true",
    "log.tensorboard": "false",
    "log.peak_flops": "1e12",
    "log.profile": "3:5",
    "log.vitals": "basic",
    "log.alert_command": "mail",
    "spikes.policy": "stop",
    "spikes.window": "200",
    "spikes.min_history": "31",
    "spikes.sigmas": "5",
    "spikes.least_sigma": "0.004",
    "spikes.jump": "2",
    "spikes.drift": "0.2",
    "spikes.stall_steps": "2000",
    "spikes.least_fall": "0.02",
    "spikes.patience_steps": "50",
    "spikes.recover_steps": "6",
    "spikes.nonfinite_steps": "6",
    "spikes.lag": "20",
    "spikes.least_gradient_ratio": "4",
    "spikes.most_skips": "30",
    "spikes.rewind_steps": "90",
    "spikes.exclude_batches": "400",
    "spikes.rate_scale": "0.9",
    "spikes.same_place_steps": "600",
    "checkpoint.mirror": "elsewhere",
    "checkpoint.mirror_every": "7",
    "verify.every": "10",
    "distributed.timeout_s": "10",
    "distributed.start_timeout_s": "20",
    "distributed.denied_hosts": "[a, b]",
    "supervise.restarts": "2",
    "supervise.backoff_s": "0.5",
    "supervise.longest_backoff_s": "9.0",
    "supervise.stall_factor": "3.0",
    "supervise.stall_s": "9.0",
    "supervise.start_s": "9.0",
    "precision.loss_scale": "none",
    "precision.loss_scale_initial": "4",
    "precision.loss_scale_factor": "4",
    "precision.loss_scale_growth_interval": "3",
    "precision.loss_scale_floor": "2",
    "precision.loss_scale_ceiling": "131072",
    "precision.loss_scale_hysteresis": "2",
    "precision.loss_scale_patience": "3",
    "precision.float8_scaling": "block",
    "precision.float8_history": "16",
    "precision.float8_margin": "1",
}
SWITCHES = ("optimizer.name", "schedule.kind")


def test_every_setting_is_in_the_table_of_other_values(small):
    names = set(flat(config.load(small).model_dump()))
    assert names == set(OTHER) | set(SWITCHES)


@pytest.mark.parametrize("name", OTHER)
def test_fingerprint_changes_with_every_setting_but_those_that_may_change(small, name):
    # Some settings can only change beside others.
    common = {
        "numerics.microbatch": ["numerics={lanes: 2, microbatch: 2}"],
        "model.num_key_value_heads": ["model.num_heads=4"],
        "model.initial_std": ["model.initialiser=gpt2"],
        "model.mup_base_width": ["optimizer={name: adamw}"],
        "model.mup_base_head_size": ["optimizer={name: adamw}", "model.mup_base_width=16"],
    }.get(name, [])
    before = config.load(small, common)
    after = config.load(small, [*common, f"{name}={OTHER[name]}"])
    assert after != before
    assert list(config.differences(before, after)) == [name]
    sections = {
        "steps",
        "log",
        "eval",
        "checkpoint",
        "spikes",
        "verify",
        "distributed",
        "supervise",
    }
    may_change = name.split(".")[0] in sections or name in {
        "data.corpus",
        "data.read_threads",
        "data.prefetch_steps",
        "mesh.data",
        "mesh.fsdp",
        "mesh.emulated_devices",
    }
    assert (config.fingerprint(after) == config.fingerprint(before)) == may_change


@pytest.mark.parametrize("mesh", ["mesh.data=2", "mesh.fsdp=2"])
def test_the_mesh_belongs_to_a_run_whose_sums_follow_it(small, mesh):
    fast = ["numerics.reduction=fast"]
    before, after = config.load(small, fast), config.load(small, [*fast, mesh])
    assert config.fingerprint(after) != config.fingerprint(before)


@pytest.mark.parametrize("override", [COSINE, "optimizer={name: adamw}"])
def test_fingerprint_changes_with_the_kind_of_schedule_and_optimizer(small, override):
    before, after = config.load(small), config.load(small, [override])
    assert config.fingerprint(after) != config.fingerprint(before)


# --- kinds that change ---


def test_another_kind_of_schedule_takes_its_own_settings_and_their_defaults(small):
    before = config.load(small)
    after = config.override(before, ["schedule.kind=wsd", "schedule.peak=0.3"])
    assert after.schedule == config.WsdSchedule(kind="wsd", peak=0.3)
    back = config.override(after, ["schedule.kind=palm"])
    assert back.schedule == config.PalmSchedule()
    same = config.override(after, ["schedule.kind=wsd", "schedule.final=0.1"])
    assert (same.schedule.peak, same.schedule.final) == (0.3, 0.1)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("{kind: wsd, peak: 1, hold_steps: 3}", "decay_steps=None are the two ends"),
        ("{kind: wsd, peak: 1, hold_steps: 3, decay_steps: 3}", "leaves nothing of decay_steps=3"),
        (
            "{kind: wsd, peak: 1, warmup_steps: 4, hold_steps: 3, decay_steps: 5}",
            "hold_steps=3 is before the end of warmup_steps=4",
        ),
        ("{kind: wsd, peak: 1, final: 2}", "final=2.0 is above peak=1.0"),
        (
            "{kind: linear, peak: 1, warmup_steps: 5, decay_steps: 5}",
            "warmup_steps=5 leaves nothing",
        ),
        ("{kind: inverse_square_root, peak: 1}", "schedule.warmup_steps is missing"),
        ("{kind: constant, peak: 1, final: 1}", "another kind of schedule than 'constant'"),
    ],
)
def test_schedules_that_cannot_be_are_refused(small, override, said):
    assert said in refusal(small, f"schedule={override}")


# --- a linear ramp ---


def bloom(consumed: int, start: int, end: int, increment: int, samples: int) -> int:
    """Megatron's rule: the batch size once so many sequences were consumed, in integers."""
    if consumed > samples:
        return end
    return start + consumed * ((end - start) // increment) // samples * increment


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    num=st.integers(1, 30),
    samples=st.integers(1, 20_000),
)
def test_linear_ramp_by_sequences_is_megatrons(start, increment, num, samples):
    end = start + num * increment
    ramp = config.Ramp(start=start, end=end, increment=increment, samples=samples)
    assert ramp.starts[0] == 0
    consumed = step = 0
    while consumed <= samples + end:
        size = stream.batch_size(ramp, step)
        assert size == bloom(consumed, start, end, increment, samples)
        assert stream.sequences_before(ramp, step) == consumed
        consumed, step = consumed + size, step + 1
    assert ramp.sizes[-1] == end


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    num=st.integers(1, 30),
    steps=st.integers(1, 300),
)
def test_linear_ramp_by_steps_rises_in_equal_stretches(start, increment, num, steps):
    ramp = config.Ramp(start=start, end=start + num * increment, increment=increment, steps=steps)
    for step in range(steps + 2):
        assert stream.batch_size(ramp, step) == start + min(num, step * num // steps) * increment


def test_ramp_of_bloom():
    ramp = config.Ramp(start=192, end=2048, increment=16, samples=9_765_625)
    assert len(ramp.sizes) == 117
    assert ramp.sizes[:3] == (192, 208, 224)
    assert ramp.sizes[-1] == 2048
    # A stretch is 9,765,625 / 116 = 84,186.4 sequences: 438.5 batches of 192.
    assert ramp.starts[:2] == (0, 439)


def test_linear_ramp_is_kept_as_the_stages_it_stands_for(small):
    common = ["numerics.lanes=2"]
    linear = config.load(small, [*common, "data.ramp={start: 8, end: 12, increment: 2, steps: 10}"])
    written = config.load(small, [*common, "data.ramp={starts: [0, 5, 10], sizes: [8, 10, 12]}"])
    assert linear == written
    assert config.fingerprint(linear) == config.fingerprint(written)


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ("{start: 16, end: 32, increment: 5, samples: 100}", "no whole increments of 5"),
        ("{start: 16, end: 16, increment: 8, samples: 100}", "no whole increments of 8"),
        ("{start: 16, end: 32, increment: 8}", "takes samples or steps"),
        ("{start: 16, end: 32, increment: 8, samples: 9, steps: 9}", "takes samples or steps"),
        ("{start: 16, end: 32, increment: 8, steps: true}", "steps=True: input should be a valid"),
        ("{start: 16, increment: 8, steps: 3}", "end is missing"),
        ("{start: 1, end: 3000, increment: 1, steps: 3}", "makes 2,999 stages"),
        ("{start: 16, end: 32, increment: 8, steps: 9, sizes: [8]}", "sizes cannot stand beside"),
        ("{start: 8, end: 12, increment: 2, steps: 10}", "data.ramp.sizes holds 10"),
    ],
)
def test_linear_ramps_that_cannot_be_are_refused(small, ramp, said):
    assert said in refusal(small, f"data.ramp={ramp}")


def test_null_takes_back_the_stages_of_a_base(small):
    overrides = ["numerics.lanes=8", "data.ramp.starts=null", "data.ramp.sizes=null"]
    linear = {"start": 8, "end": 24, "increment": 8, "steps": 10}
    overrides += [f"data.ramp.{key}={value}" for key, value in linear.items()]
    assert config.load(small, overrides).data.ramp.sizes == (8, 16, 24)


def test_fingerprint_does_not_depend_on_how_the_file_is_written(small):
    before = config.fingerprint(config.load(small))
    written_out = small.parent / "again.yaml"
    # Another order, another notation, and a default spelled out.
    written_out.write_text(
        "".join(reversed(SMALL.splitlines(keepends=True)[-2:]))
        + "".join(SMALL.splitlines(keepends=True)[:-2]).replace("steps: 40", "steps: 4_0")
        + "seed: 0\n"
    )
    assert config.fingerprint(config.load(written_out)) == before


def test_differences_give_both_values(small):
    before = config.load(small)
    after = config.load(small, ["model.width=64", "optimizer={name: adamw}"])
    changed = config.differences(before, after)
    assert changed["model.width"] == (32, 64)
    assert changed["optimizer.name"] == ("adafactor", "adamw")
    assert changed["optimizer.epsilon"] == (None, 1e-8)
    assert "model.num_layers" not in changed
    assert config.differences(before, before) == {}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_survive_being_written_and_read(path, tmp_path):
    loaded = config.load(path)
    (tmp_path / "config.yaml").write_text(config.to_yaml(loaded))
    again = config.load(tmp_path / "config.yaml")
    assert again == loaded
    assert config.fingerprint(again) == config.fingerprint(loaded)


@given(
    peak=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**32 - 1),
    epsilon=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    clip=st.none() | st.floats(1e-300, 1e300),
)
def test_any_number_survives_being_written_and_read(small_for_all, peak, seed, epsilon, clip):
    changed = config.load(small_for_all).model_dump()
    changed["seed"] = seed
    changed["schedule"]["peak"] = peak
    changed["optimizer"] |= {"epsilon_square": epsilon, "clip_norm": clip}
    built = config.from_dict(changed)
    assert built.schedule.peak == peak
    path = small_for_all.with_name("round.yaml")
    path.write_text(config.to_yaml(built))
    assert config.load(path) == built


@given(
    corpus=st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(
        lambda text: "e" not in text.lower()
    )
)
def test_any_folder_name_survives_being_written_and_read(small_for_all, corpus):
    built = config.from_dict(
        config.load(small_for_all).model_dump()
        | {"data": {"corpus": corpus, "ramp": {"sizes": [8]}}}
    )
    path = small_for_all.with_name("round.yaml")
    path.write_text(config.to_yaml(built), encoding="utf-8")
    assert config.load(path) == built


@pytest.mark.parametrize("corpus", ["1e5", "1e-4", ".5e1"])
def test_folder_name_that_looks_like_a_number_survives_being_written_and_read(small, corpus):
    loaded = config.load(small, [f"data.corpus='{corpus}'"])
    small.write_text(config.to_yaml(loaded))
    assert config.load(small) == loaded


# Anything at all

NAMES = st.sampled_from([*OTHER, *SWITCHES, "model", "data", "optimizer", "mesh", "base", "x.y"])
VALUES = st.one_of(
    st.text(max_size=20),
    st.text("0123456789.eE+-_:xo", max_size=8),
    st.text("{}[],:&*!|>'\"#%@`-? \nab1", max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["true", "~", "2020-01-01", "!!set {a}", "!!binary aGk=", "<<", "=", "010"]),
)


@given(overrides=st.lists(st.tuples(NAMES | st.text(max_size=8), VALUES), min_size=1, max_size=3))
def test_any_override_gives_a_config_or_a_refusal(small_for_all, overrides):
    try:
        loaded = config.load(small_for_all, [f"{name}={value}" for name, value in overrides])
    except WrongInput:
        return
    assert isinstance(loaded, config.Config)
    numbers = [x for x in flat(loaded.model_dump()).values() if isinstance(x, float)]
    assert all(math.isfinite(x) for x in numbers)


@given(text=st.text(st.characters(codec="utf-8"), max_size=60) | VALUES)
def test_any_file_gives_a_config_or_a_refusal(small_for_all, text):
    path = small_for_all.with_name("any.yaml")
    path.write_text(f"{SMALL}{text}", encoding="utf-8")
    with contextlib.suppress(WrongInput):
        assert isinstance(config.load(path), config.Config)


def test_reading_a_config_does_not_start_jax():
    program = """
import sys, palm_jax, palm_jax.config
palm_jax.config.load(sys.argv[1])
sys.exit(not {"jax", "numpy", "flax"}.isdisjoint(sys.modules))
"""
    subprocess.run([sys.executable, "-c", program, CONFIGS / "tiny.yaml"], check=True)
