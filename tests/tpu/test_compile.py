"""What the TPU compiler is asked, how its answers are read, and what the command line says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, modules, sharding
from palm_jax.cli import compile as command
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import activations
from palm_jax.plan import memory as planning
from palm_jax.tpu import compile as compiling
from palm_jax.tpu import topologies

ROOT = pathlib.Path(__file__).parents[2]
GIB = 2**30

SETTINGS = {
    "steps": 100,
    "model": {
        "num_layers": 1,
        "width": 128,
        "num_heads": 4,
        "head_size": 32,
        "vocabulary_size": 500,
        "sequence_length": 128,
    },
    "data": {"corpus": "nowhere", "ramp": {"starts": [0, 10], "sizes": [4, 8]}},
    "numerics": {"lanes": 4},
    "mesh": {"data": 1, "fsdp": 2, "tensor": 2},
}
FOUR = topologies.parse("v5e:2x2")

# libtpu 0.0.42's own words; the second form stands in it too, for programs that fail later.
ON_HBM = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(40.07G) exceeds available HBM (30.75G)."
)
IN_SPACE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G. Memory usage report: \n\nTotal"
)
NOT_IMPLEMENTED = "UNIMPLEMENTED: AllReduce over groups of 3.\nmore of it"


def settings(*overrides: str) -> config.Config:
    return config.override(config.from_dict(SETTINGS), overrides)


# --- reading the compiler's answers -------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        (ON_HBM, 40.07 * GIB, 30.75 * GIB),
        (IN_SPACE, 17.5 * GIB, 15.75 * GIB),
        (ON_HBM.replace("40.07G", "1.51T"), 1.51 * 1024 * GIB, 30.75 * GIB),
        (ON_HBM.replace("(30.75G)", "(512.5M)"), 40.07 * GIB, 512.5 * 2**20),
    ],
)
def test_running_out_of_memory_gives_both_figures(message, needed, limit):
    refused = compiling.refusal(message)
    assert (refused.needed_bytes, refused.limit_bytes) == (int(needed), int(limit))
    assert refused.reason == message.split("\n")[0]


@pytest.mark.parametrize(
    "message",
    [
        NOT_IMPLEMENTED,
        "INTERNAL: during context [x]: (40.07G) exceeds nothing",
        IN_SPACE.replace("hbm", "vmem"),  # a kernel's own memory: no mesh helps
    ],
)
def test_other_refusals_keep_their_first_line_and_claim_no_bytes(message):
    refused = compiling.refusal(message)
    assert refused == compiling.Refusal(message.split("\n")[0])


MODULE = """HloModule jit_train_step, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

body {
  p = (s32[], f32[1000]{0}) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[1000]{0} get-tuple-element(p), index=1
  t = token[] after-all()
  s = (f32[1000]{0}, u32[], token[]) send(x, t), channel_id=2, is_host_transfer=true, SLICES
  ROOT both = (s32[], f32[1000]{0}) tuple(i, x)
}

condition {
  p = (s32[], f32[1000]{0}) parameter(0)
  ROOT go = pred[] constant(true)
}

ENTRY main {
  p = f32[1000]{0} parameter(0)
  zero = s32[] constant(0)
  t = token[] after-all()
  over_data = f32[1000]{0} all-reduce(p), replica_groups={{0,2},{1,3}}, to_apply=add
  over_tensor = f32[2000]{0} all-gather(p), replica_groups={{0,1},{2,3}}, dimensions={0}
  total = (f32[1000]{0}, u32[], token[]) send(p, t), channel_id=3, is_host_transfer=true, SUMMED
  other = (f32[9000]{0}, u32[], token[]) send(p, t), channel_id=4, is_host_transfer=true
  state = (s32[], f32[1000]{0}) tuple(zero, p)
  loop = (s32[], f32[1000]{0}) while(state), condition=condition, body=body, LOOPED
  ROOT f = f32[1000]{0} fusion(p), kind=kLoop, backend_config={"estimated_cycles":"5000"}
}
"""
for word, attributes in {
    "SLICES": 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="all-gather.66_0",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_GATHER"}',
    "SUMMED": 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}',
    "LOOPED": 'backend_config={"known_trip_count":{"n":"3"}}',
}.items():
    MODULE = MODULE.replace(word, attributes)
MEMORY = types.SimpleNamespace(
    argument_size_in_bytes=100,
    temp_size_in_bytes=70,
    alias_size_in_bytes=90,
    peak_memory_in_bytes=150,
)


@pytest.mark.parametrize("num_slices", [2, 3])
def test_what_crosses_slices_is_told_from_what_stays_in_one(num_slices):
    mesh = {"data": 2 * num_slices, "fsdp": 1, "tensor": 2}
    found = {
        (t.kind, t.axes, t.crosses_slices): (t.count, t.operand_bytes, t.sent_bytes)
        for t in compiling.transfers(modules.read(MODULE), mesh, num_slices)
    }
    # By hand, 4000 bytes each: an all-reduce of g sends 2 (g - 1) / g x 4000, an all-gather
    # (g - 1) x 4000; the loop runs three times. A send that is no exchange does not count.
    assert found == {
        ("all-reduce", ("data",), False): (1, 4000, 4000),
        ("all-gather", ("tensor",), False): (1, 4000, 4000),
        ("all-gather", ("data",), True): (3, 12000, (num_slices - 1) * 12000),
        ("all-reduce", ("data",), True): (1, 4000, {2: 4000, 3: 5334}[num_slices]),
    }


def test_a_program_of_all_slices_together_is_not_misread():
    with pytest.raises(CannotDo, match="for 4 chips, and a slice has 2"):
        compiling.transfers(modules.read(MODULE), {"data": 2, "fsdp": 1, "tensor": 2}, 2)


def test_a_program_is_described_by_hand_calculated_figures(monkeypatch):
    monkeypatch.setattr(topologies, "libtpu_version", lambda: "1.2.3")
    eight = settings("mesh.data=4", "mesh.fsdp=1", "data.ramp.sizes=[8,8]")
    answer = compiling.described(
        eight,
        topologies.parse("v4:2x2x1", num_slices=2),
        8,
        modules.read(MODULE),
        compile_s=2.5,
        memory=MEMORY,
    )
    # Queries and outputs, keys and values, feed-forward, the norm's scale, the table.
    parameters = 2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 512 + 128 + 500 * 128
    needed = (6 * parameters + 12 * 1 * 4 * 32 * 128) * 8 * 128
    seconds = 5000 / (275e12 / 262144)
    assert answer.fits
    assert answer.reason is None
    assert (answer.chips, answer.libtpu, answer.compile_s) == (8, "1.2.3", 2.5)
    assert answer.mesh == {"data": 4, "fsdp": 1, "tensor": 2}
    assert answer.flops_per_step == needed
    assert answer.flops_per_chip == needed / 8
    assert answer.estimated_step_s == pytest.approx(seconds)
    assert answer.estimated_mfu == pytest.approx(needed / 8 / seconds / 275e12)
    assert answer.crosses_slices_bytes == 12000 + 4000
    assert (answer.hbm_argument_bytes, answer.hbm_temp_bytes) == (100, 70)
    assert (answer.hbm_alias_bytes, answer.hbm_peak_bytes) == (90, 150)
    assert answer.hbm_limit_bytes == int(30.75 * GIB)


def test_time_in_splash_kernels_is_added_to_what_the_compiler_estimates(monkeypatch):
    monkeypatch.setattr(topologies, "libtpu_version", lambda: "1.2.3")
    splash = settings("model.attention=splash")
    module = modules.read(MODULE)
    answer = compiling.described(splash, FOUR, 8, module, compile_s=1.0, memory=MEMORY)
    # One layer, 4 sequences and 2 heads a chip, 1 block of 128: 9 products of 2 x 128^2 x 32.
    cycles = 4 * 2 * 9 * 2 * 128**2 * 32 / (4 * 128 * 128 * 2)
    assert answer.attention_kernel_cycles == cycles
    assert answer.estimated_step_s == pytest.approx((5000 + cycles) / FOUR.chip.clock)


def test_a_refusal_is_described_with_the_limit_that_it_names(monkeypatch):
    monkeypatch.setattr(topologies, "libtpu_version", lambda: "1.2.3")
    for message, peak, limit, memory in (
        (ON_HBM.replace("30.75G", "31.5G"), int(40.07 * GIB), int(31.5 * GIB), True),
        (NOT_IMPLEMENTED, None, FOUR.chip.hbm, False),
    ):
        answer = compiling.described(
            settings(), FOUR, 8, compiling.refusal(message), compile_s=1.0, argument_bytes=77
        )
        assert not answer.fits
        assert answer.out_of_memory == memory
        assert answer.reason == message.split("\n")[0]
        assert (answer.hbm_peak_bytes, answer.hbm_limit_bytes) == (peak, limit)
        assert answer.hbm_argument_bytes == 77


@given(
    num_blocks=st.integers(1, 6), heads=st.sampled_from([2, 4, 8]), batch=st.sampled_from([4, 8])
)
def test_splash_flops_are_those_of_every_block_that_the_mask_shows(num_blocks, heads, batch):
    run = settings(
        *("model.attention=splash", "model.remat=full", f"model.num_heads={heads}"),
        *(f"model.sequence_length={512 * num_blocks}", f"data.ramp.sizes=[{batch},{batch}]"),
    )
    counted = 0
    for _ in range(batch // 2 * heads // 2):
        for queries in range(0, 512 * num_blocks, 512):
            for keys in range(0, 512 * num_blocks, 512):
                if queries + 511 >= keys:
                    counted += (2 + 2 + 7) * 2 * 512 * 512 * 32
    assert compiling.splash_flops(run, batch) == counted


def test_without_the_kernel_no_time_is_spent_in_it():
    assert compiling.splash_flops(settings(), 8) == 0


# --- what would help ----------------------------------------------------------------------


def test_advice_is_ordered_and_concrete():
    run = settings("numerics.microbatch=2", "data.ramp.sizes=[8,8]")
    assert [line.split(":")[0] for line in compiling.advice(run)] == [
        "model.remat=full",
        "numerics.microbatch=1",
        "numerics.loss_chunk=16",
        "model.attention=splash",
        "mesh.fsdp=4 on twice the chips, or with a smaller mesh.tensor",
        "numerics.reduction=fast",
    ]


def test_advice_leaves_out_what_is_in_force():
    run = settings(
        *("model.remat=full", "model.attention=splash", "numerics.loss_chunk=16"),
        *("numerics.reduction=fast", "mesh.data=2"),
    )
    assert [line.split(":")[0] for line in compiling.advice(run)] == ["mesh.data=1 mesh.fsdp=4"]


def test_advice_names_no_kernel_for_lengths_that_it_cannot_take():
    run = settings("model.sequence_length=100")
    assert not any("splash" in line for line in compiling.advice(run))


@given(
    remat=st.sampled_from(["none", "full", "dots"]),
    microbatch=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2]),
)
def test_single_settings_that_are_advised_can_be_set(remat, microbatch, data):
    run = settings(
        *(f"model.remat={remat}", f"numerics.microbatch={microbatch}", f"mesh.data={data}"),
        "data.ramp.sizes=[8,8]",
    )
    for line in compiling.advice(run):
        if " on twice " not in line:
            overrides = line.split(":")[0].split()
            assert config.differences(run, config.override(run, overrides))


# --- a sweep ------------------------------------------------------------------------------


CHOSEN = ("model.remat", "numerics.microbatch", "mesh.tensor")


def test_a_sweep_begins_with_the_config_and_stays_on_the_chips():
    run = settings("data.ramp.sizes=[8,16]")
    tries, num_more = compiling.candidates(run, FOUR)
    assert tries[0].settings == config.override(
        run, ["data.ramp.starts=[0]", "data.ramp.sizes=[16]"]
    )
    assert len(tries) == compiling.SWEEP_LIMIT
    # remat none, full, dots; microbatch 1, 2; tensor 2, 1, 4.
    assert num_more == 3 * 2 * 3 - compiling.SWEEP_LIMIT
    for this in tries:
        mesh = this.settings.mesh
        assert mesh.data_parallel * mesh.tensor == 4
        assert config.override(run, this.overrides) == this.settings
    assert len({this.overrides for this in tries}) == len(tries)
    changes = [sum(text.split("=")[0] in CHOSEN for text in this.overrides) for this in tries]
    assert changes == sorted(changes)
    assert changes[-1] > 1


def test_a_sweep_raises_the_lanes_where_a_mesh_is_wider():
    tries, _ = compiling.candidates(settings("numerics.lanes=2"), FOUR)
    lanes = {this.settings.mesh.fsdp: this.settings.numerics.lanes for this in tries}
    assert lanes == {2: 2, 4: 4, 1: 2}


def test_a_sweep_leaves_out_what_no_config_may_be():
    # 12 heads do not divide by 8 tensor-parallel devices, nor 8 sequences by 4 x 4.
    run = settings("model.num_heads=12", "numerics.microbatch=2", "data.ramp.sizes=[8,8]")
    tries, _ = compiling.candidates(
        config.override(run, ["mesh.tensor=4"]), topologies.parse("v5e:2x4")
    )
    assert {this.settings.mesh.tensor for this in tries} == {4, 2}
    assert {this.settings.numerics.microbatch for this in tries} == {2, 1}


def answer(**fields: object) -> compiling.Answer:
    """One that fits, but for `fields`."""
    whole = {
        "batch_size": 8,
        "reduction": "canonical",
        "mesh": {"data": 1, "fsdp": 2, "tensor": 2},
        "chips": 4,
        "libtpu": "1.2.3",
        "fits": True,
        "reason": None,
        "compile_s": 1.5,
        "hbm_argument_bytes": 2 * GIB,
        "hbm_temp_bytes": 3 * GIB,
        "hbm_alias_bytes": 2 * GIB,
        "hbm_peak_bytes": 5 * GIB,
        "hbm_limit_bytes": 15 * GIB,
        "flops_per_step": 4e12,
        "flops_per_chip": 1e12,
        "estimated_cycles": 10**9,
        "attention_kernel_cycles": 0,
        "estimated_step_s": 0.5,
        "estimated_mfu": 0.4,
        "collectives": (compiling.Transfer("all-gather", ("fsdp",), False, 3, 1024, 1024),),
        "crosses_slices_bytes": 0,
    }
    return compiling.Answer(**{**whole, **fields})


def refused(needed: int | None = 40 * GIB, **fields: object) -> compiling.Answer:
    unknown = ("hbm_temp_bytes", "hbm_alias_bytes", "estimated_cycles", "estimated_step_s")
    nothing = dict.fromkeys((*unknown, "estimated_mfu", "crosses_slices_bytes"))
    reason = NOT_IMPLEMENTED.split("\n")[0] if needed is None else ON_HBM
    return answer(
        **nothing, fits=False, reason=reason, hbm_peak_bytes=needed, collectives=(), **fields
    )


def test_the_best_of_a_sweep_is_the_fastest_that_fits_then_what_nearly_does():
    answers = {
        "refused": refused(None),
        "far": refused(40 * GIB),
        "near": refused(16 * GIB),
        "slow": answer(estimated_step_s=2.0),
        "fast": answer(estimated_step_s=1.0),
    }
    order = [name for name, _ in compiling.by_merit(answers.items())]
    assert order == ["fast", "slow", "near", "far", "refused"]


# --- the command, with a compiler that is not there ----------------------------------------


@pytest.fixture
def said(monkeypatch, tmp_path, capsys):
    """said(answers, ...): exit code and stdout, where the compiler gives those answers in turn."""
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    monkeypatch.setattr(command, "_prepare", lambda settings: None)
    monkeypatch.setattr(topologies, "libtpu_version", lambda: "1.2.3")
    monkeypatch.setattr(topologies.Topology, "devices", lambda self: [])

    def end() -> None:
        raise SystemExit(130)

    monkeypatch.setattr(command, "_end_interrupted", end)

    def run(answers, *overrides, topology="v5e:2x2", **options):
        left = iter(answers)

        def give(settings, topology, batch_size):
            this = next(left)
            if isinstance(this, BaseException):
                raise this
            reduction = settings.numerics.reduction
            return dataclasses.replace(this, batch_size=batch_size, reduction=reduction)

        monkeypatch.setattr(compiling, "answer", give)
        code = 0
        try:
            command.compile(file, topology, list(overrides), **options)
        except SystemExit as ended:
            code = ended.code
        except command.typer.Exit as ended:
            code = ended.exit_code
        return code, capsys.readouterr().out

    return run


FLAT_KEYS = {
    *("fits", "hbm_argument_bytes", "hbm_temp_bytes", "hbm_peak_bytes", "hbm_limit_bytes"),
    *("compile_s", "flops_per_step", "estimated_step_s", "estimated_mfu", "collectives"),
    *("crosses_slices_bytes", "chips", "libtpu", "mesh", "reduction", "batch_size", "stages"),
}


def test_what_fits_in_every_stage_ends_with_0(said):
    code, out = said([answer(), answer(compile_s=9.0)], as_json=True)
    fields = json.loads(out)
    assert code == 0
    assert fields.keys() >= FLAT_KEYS
    assert fields["fits"] is True
    assert [stage["batch_size"] for stage in fields["stages"]] == [4, 8]
    assert (fields["batch_size"], fields["compile_s"]) == (8, 9.0)
    assert fields["stages"][0].keys() >= FLAT_KEYS - {"stages"}
    assert fields["would_help"] == fields["with_fast_reduction"] == []


def test_one_stage_that_does_not_fit_ends_with_1_and_fast_stands_beside_it(said):
    code, out = said([refused(), answer(), answer()], as_json=True)
    fields = json.loads(out)
    assert code == 1
    assert fields["fits"] is False
    assert [(s["batch_size"], s["reduction"], s["fits"]) for s in fields["stages"]] == [
        (4, "canonical", False),
        (8, "canonical", True),
    ]
    beside = fields["with_fast_reduction"]
    assert [(s["batch_size"], s["reduction"], s["fits"]) for s in beside] == [(4, "fast", True)]
    assert fields["would_help"][0].startswith("model.remat=full")


def test_fast_is_not_tried_beside_fast(said):
    code, out = said([refused(), answer()], "numerics.reduction=fast", as_json=True)
    assert code == 1
    assert json.loads(out)["with_fast_reduction"] == []


def test_a_refusal_for_another_reason_is_an_answer_without_advice(said):
    code, out = said([refused(None), answer()])
    assert code == 1
    assert "UNIMPLEMENTED: AllReduce over groups of 3." in out
    assert "would help" not in out


def test_a_person_reads_memory_time_collectives_and_advice(said):
    code, out = said([answer(), refused(), answer()])
    assert code == 1
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "v5e:2x2: 4 chips, data 1 x fsdp 2 x tensor 2; libtpu 1.2.3"
    for line in (
        "sequences a step 4 8 8",
        "numerics.reduction canonical canonical fast",
        "fits yes no yes",
        "peak 5.0 GiB 40.0 GiB 5.0 GiB",
        "estimated step 0.5 s - 0.5 s",
        "utilisation that would be 40.0% - 40.0%",
        "all-gather fsdp 3 1.0 KiB 1.0 KiB",
        "numerics.reduction=fast: sums in XLA's order, whose bits follow the mesh",
    ):
        assert line in lines
    assert "the compiler's estimate, not a measurement" in out
    assert ON_HBM in out


@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupted_command_says_what_is_known(said, as_json):
    code, out = said([answer(), KeyboardInterrupt()], as_json=as_json)
    assert code == 130
    if as_json:
        assert len(json.loads(out)["stages"]) == 1
        assert json.loads(out)["interrupted"] is True
        assert json.loads(out)["fits"] is False
    else:
        assert "5.0 GiB" in out


def test_an_interruption_before_the_first_answer_prints_nothing(said):
    assert said([KeyboardInterrupt()]) == (130, "")


def test_our_own_error_is_no_answer(said):
    with pytest.raises(ZeroDivisionError):
        said([ZeroDivisionError()])


def test_a_sweep_prints_the_best_first(said):
    left_out = CannotDo("no such mesh in this network")
    answers = [refused(), left_out, *[answer(estimated_step_s=9.0 - n / 10) for n in range(10)]]
    code, out = said(answers, sweep=True, as_json=True)
    fields = json.loads(out)
    assert code == 0
    assert [row["fits"] for row in fields["results"]] == [True] * 10 + [False]
    assert fields["results"][0]["estimated_step_s"] == pytest.approx(8.1)
    assert fields["results"][-1]["remat"] == "none"
    code, out = said(answers, sweep=True)
    assert "best: " in out


def test_a_sweep_in_which_nothing_fits_ends_with_1(said):
    code, out = said([refused()] * 12, sweep=True)
    assert code == 1
    assert "best" not in out


@pytest.mark.parametrize(
    ("topology", "slices", "message"),
    [
        ("v5e:4x4", 1, r"= 1 x 2 x 2 = 4, but v5e:4x4 have 16 chips"),
        ("v5e:2x2", 2, r"= 1 x 2 x 2 = 4, but 2 slices of v5e:2x2 have 8 chips"),
    ],
)
def test_a_mesh_of_another_size_than_the_topology_names_both(said, topology, slices, message):
    with pytest.raises(WrongInput, match=message):
        said([], topology=topology, slices=slices)


def test_emulated_devices_play_no_part(said):
    code, _ = said([answer(), answer()], "mesh.emulated_devices=64")
    assert code == 0


# --- the real compiler --------------------------------------------------------------------


@pytest.fixture
def real(tmp_path):
    """Starts the real command on the small config."""
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is not installed (pip install 'palm-jax[tpu]')")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SETTINGS))
    unset = ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")
    environ = {name: value for name, value in os.environ.items() if name not in unset}

    def start(*arguments: object, file: object = "small.yaml") -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "palm_jax.cli", "compile", file, *arguments],
            cwd=tmp_path,
            env=environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=1500)
    return process.returncode, out, err


@pytest.mark.tpu_compiler
def test_a_small_step_fits(real):
    one_stage = ("data.ramp.starts=[0]", "data.ramp.sizes=[8]")
    code, out, err = finish(real("--topology", "v5e:2x2", *one_stage, "--json"))
    assert (code, out.count("\n")) == (0, 1), err
    assert len(err.splitlines()) == 2  # what is compiled, and its verdict: nothing of libtpu's
    fields = json.loads(out)
    assert fields["fits"] is True
    assert fields["libtpu"] == importlib.metadata.version("libtpu")
    # By hand: float32 parameters and two moments, the table padded to 512 rows. The chips cut
    # all in 4, but for keys' and values' kernels and the norm's scale, cut in 2.
    cut_by_both = 2 * 128 * 128 + 3 * 128 * 512 + 512 * 128
    state = 3 * 4 * (cut_by_both // 4 + (2 * 128 * 32 + 128) // 2)
    tokens = 2 * 2 * 129 * 4
    # Tiles of 8 x 128 pad what has 32 in its last dim.
    assert state + tokens < fields["hbm_argument_bytes"] < 1.25 * (state + tokens)
    assert fields["hbm_argument_bytes"] < fields["hbm_peak_bytes"] < fields["hbm_limit_bytes"]
    assert 0 < fields["estimated_mfu"] < 1
    over = {(c["kind"], *c["axes"]) for c in fields["collectives"]}
    assert {("all-gather", "fsdp"), ("all-to-all", "fsdp"), ("all-gather", "tensor")} <= over
    assert fields["crosses_slices_bytes"] == 0


@pytest.mark.tpu_compiler
def test_a_step_that_is_too_large_is_an_answer_with_advice(real):
    one_stage = ("data.ramp.starts=[0]", "data.ramp.sizes=[8]", "numerics.reduction=fast")
    large = ("model.width=32768", *one_stage)
    code, out, err = finish(real("--topology", "v5e:2x2", *large, "--json"))
    assert code == 1, err
    assert "Traceback" not in err
    fields = json.loads(out)
    assert fields["fits"] is False
    assert fields["reason"].startswith("RESOURCE_EXHAUSTED")
    # Feed-forward, 3 x 32768 x 131072, is most of the parameters.
    at_least = 3 * 4 * 3 * 32768 * 131072 // 4
    assert at_least < fields["hbm_argument_bytes"] < 1.1 * at_least
    assert fields["hbm_argument_bytes"] < fields["hbm_peak_bytes"] > fields["hbm_limit_bytes"]
    assert fields["hbm_limit_bytes"] == int(15.75 * GIB)
    assert fields["would_help"][0].startswith("model.remat=full")


@pytest.mark.tpu_compiler
def test_wrong_input_ends_with_2_before_anything_is_compiled(real):
    code, out, err = finish(real("--topology", "v5e:4x4"))
    assert (code, out) == (2, "")
    assert "= 1 x 2 x 2 = 4, but v5e:4x4 have 16 chips" in err


@pytest.mark.tpu_compiler
def test_an_interrupt_does_not_wait_for_the_compiler(real):
    process = real("--topology", "v5e:2x2")
    assert "compiling" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_palm_540b_fits_on_two_pods_and_only_gradients_and_scalars_cross(real):
    # The largest of the ramp's stages, each of which is a program.
    one = ("data.ramp.starts=[0]", "data.ramp.sizes=[2048]")
    arguments = ("--topology", "v4:12x16x16", "--slices", 2, "--json", *one)
    code, out, err = finish(real(*map(str, arguments), file=str(ROOT / "configs/palm_540b.yaml")))
    assert code == 0, err
    check_540b(json.loads(out))


def check_540b(fields: dict) -> None:
    run = config.load(ROOT / "configs/palm_540b.yaml")
    assert fields["fits"] is True
    assert fields["chips"] == 6144
    assert [stage["batch_size"] for stage in fields["stages"]] == [2048]
    assert fields["hbm_temp_bytes"] <= 12 * GIB
    planned = planning.on_each_device(run, sharding.RULES).arguments
    planned += activations.on_each_device(run, sharding.RULES).total
    told = fields["hbm_argument_bytes"] + fields["hbm_temp_bytes"]
    assert planned == pytest.approx(told, rel=0.1)
    assert fields["estimated_mfu"] >= 0.462
    # By hand: float32 gradients of a chip's slice, cut 256 x 12 ways (keys, values and norms
    # 256), once in each of the four passes of 512 sequences.
    m = run.model
    shared = m.num_layers * m.width * (2 * m.head_size + 1)
    table = m.padded_vocabulary_size * m.width
    rest = m.num_layers * m.width * (2 * m.num_heads * m.head_size + 3 * m.feed_forward_size)
    gradient = 4 * (shared // 256 + (table + rest) // (256 * 12))
    crossing = [c for c in fields["collectives"] if c["crosses_slices"]]
    assert all(c["axes"] == ["data"] for c in crossing)
    assert sum(c["operand_bytes"] for c in crossing) == pytest.approx(4 * gradient, rel=1e-3)
    assert fields["crosses_slices_bytes"] == pytest.approx(4 * gradient, rel=1e-3)
