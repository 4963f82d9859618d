from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.errors import CannotDo, WrongInput
from palm_jax.plan import flops
from palm_jax.tpu import topologies
from palm_jax.tpu.topologies import parse

GIB = 2**30

DESCRIBE = """
import json, os, sys
from palm_jax.errors import CannotDo
from palm_jax.tpu import topologies
assert "jax" not in sys.modules
os.environ.update(topologies.environment())
answer = {}
for name, num_slices in json.loads(sys.argv[1]):
    try:
        devices = topologies.parse(name, num_slices).devices()
        answer[f"{name} {num_slices}"] = {
            "kind": devices[0].device_kind,
            "where": [[getattr(d, "slice_index", 0), *d.coords] for d in devices],
        }
    except CannotDo as error:
        answer[f"{name} {num_slices}"] = str(error)
import jax
assert jax.config.jax_platforms == "cpu"  # a TPU of this machine is left to others
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def libtpu():
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is not installed (pip install 'palm-jax[tpu]')")


@pytest.fixture(scope="module")
def described(libtpu):
    """What libtpu says of some topologies, from a process that does nothing else."""
    asked = [
        *(("v4:2x2x4", 1), ("v5e:4x4", 1), ("v5p:2x2x2", 1), ("v6e:2x4", 1)),
        *(("v5e:1x1", 1), ("v4:2x2x1", 3), ("v4:12x16x16", 2), ("v4:3x5x7", 1)),
    ]
    unset = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", DESCRIBE, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=unset | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_a_name_gives_kind_and_shape():
    topology = parse("v4:16x16x12", num_slices=2)
    assert (topology.kind, topology.shape, topology.num_slices) == ("v4", (16, 16, 12), 2)
    assert topology.name == "v4:16x16x12"
    assert topology.num_chips == 6144


@pytest.mark.parametrize(
    ("name", "num_chips"),
    [("v4:2x2x4", 16), ("v5e:4x4", 16), ("v5p:2x2x2", 8), ("v6e:16x16", 256), ("v5e:1x1", 1)],
)
def test_a_slice_has_the_product_of_its_axes_in_chips(name, num_chips):
    assert parse(name).num_chips == num_chips


@given(
    kind=st.sampled_from(["v4", "v5p"]),
    shape=st.tuples(*[st.integers(1, 16)] * 3),
    num_slices=st.integers(1, 9),
)
def test_parsing_the_name_of_a_topology_gives_it_back(kind, shape, num_slices):
    topology = topologies.Topology(kind, shape, num_slices)
    assert parse(topology.name, num_slices) == topology


@pytest.mark.parametrize(
    "name",
    [
        *("", "v4", "v4-32", "v4:", "v4:2x2x", "v4:x2x2", "v4:2X2X4", "v4:0x2x4", "v4:2x2x-4"),
        *("V4:2x2x4", "v4: 2x2x4", "v4:2x2x4\n", "v4:2x2x4_twisted", "v4:2x2x٤", "v4:02x2x4"),
    ],
)
def test_a_name_that_cannot_be_read_is_named_beside_an_example(name):
    with pytest.raises(WrongInput, match="for example v4:2x2x4 or v5e:4x4") as caught:
        parse(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["v3:4x4", "tpu7x:2x2x2", "v5litepod:4x4"])
def test_an_unknown_kind_is_named_beside_the_known_ones(name):
    with pytest.raises(WrongInput, match=f"'{name.split(':')[0]}'.* v4, v5e, v5p, v6e"):
        parse(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v4:4x4", "has 2 axes, but a slice of v4 has 3, for example v4:2x2x4"),
        ("v5e:4x4x1", "has 3 axes, but a slice of v5e has 2, for example v5e:4x4"),
        ("v4:16x16x17", "has 4352 chips, but a slice of v4 has at most 4096"),
        ("v6e:16x32", "has 512 chips, but a slice of v6e has at most 256"),
    ],
)
def test_a_slice_that_cannot_be_is_refused_with_the_reason(name, message):
    with pytest.raises(WrongInput, match=message):
        parse(name)


@pytest.mark.parametrize("num_slices", [0, -1])
def test_there_is_at_least_one_slice(num_slices):
    with pytest.raises(WrongInput, match=f"1 slice of v4:2x2x4 or more, not {num_slices}"):
        parse("v4:2x2x4", num_slices)


# By hand: 275e12 / (2 cores x 4 units x 128 x 128 x 2) = 275e12 / 262144; v5e has half the
# FLOPs a cycle, v6e twice as many.
@pytest.mark.parametrize(
    ("kind", "peak", "clock", "memory", "sold"),
    [
        ("v4", 275e12, 1.0490e9, 30.75, 32),
        ("v5e", 197e12, 1.5030e9, 15.75, 16),
        ("v5p", 459e12, 1.7509e9, 95.74, 96),
        ("v6e", 918e12, 1.7509e9, 31.25, 32),
    ],
)
def test_facts_of_each_chip(kind, peak, clock, memory, sold):
    chip = topologies.CHIPS[kind]
    assert chip.peak_flops == peak
    assert chip.clock == pytest.approx(clock, rel=1e-4)
    assert chip.hbm == int(memory * GIB) < sold * GIB


def test_every_chip_has_a_peak():
    for chip in topologies.CHIPS.values():
        assert flops.peak_flops(chip.device_kind) == chip.peak_flops


def test_without_libtpu_the_extra_that_has_it_is_named(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CannotDo, match=r"pip install 'palm-jax\[tpu\]'"):
        parse("v4:2x2x4").devices()


def test_forgetting_the_environment_is_our_mistake(libtpu, monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with pytest.raises(AssertionError, match="TPU_SKIP_MDS_QUERY"):
        parse("v4:2x2x4").devices()


@pytest.mark.tpu_compiler
def test_libtpu_says_nothing_of_its_own(described):
    assert described.stderr == ""
    assert described.stdout.count("\n") == 1
    assert described.returncode == 0


@pytest.mark.tpu_compiler
def test_each_chip_is_one_device_at_a_place_of_its_own(described):
    for asked, answer in json.loads(described.stdout).items():
        if asked != "v4:3x5x7 1":
            name, num_slices = asked.split()
            topology = parse(name, int(num_slices))
            sizes = (topology.num_slices, *topology.shape, 1)[:4]
            places = {tuple(place) for place in answer["where"]}
            assert len(answer["where"]) == len(places) == topology.num_chips
            assert tuple(max(axis) + 1 for axis in zip(*places, strict=True)) == sizes
            assert answer["kind"] == topology.chip.device_kind


@pytest.mark.tpu_compiler
def test_a_topology_libtpu_does_not_know_is_named_beside_ones_near_it(described):
    message = json.loads(described.stdout)["v4:3x5x7 1"]
    assert message.startswith(f"libtpu {importlib.metadata.version('libtpu')} cannot describe")
    # 3 x 5 x 7 = 105 chips; 2 x 6 x 7 = 84, 4 x 4 x 7 = 112, 2 x 4 x 7 = 56, 4 x 6 x 7 = 168.
    assert message.endswith("(near it: v4:4x4x7, v4:2x6x7, v4:2x4x7, v4:4x6x7)")


@pytest.mark.tpu_compiler
def test_two_processes_can_describe_topologies_at_once(libtpu):
    program = DESCRIBE + "sys.stdout.flush(); sys.stdin.read()"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, '[["v4:2x2x1", 1]]'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(2)
    ]
    lines = [process.stdout.readline() for process in both]  # each waits with libtpu loaded
    for process in both:
        process.communicate("")
    assert ["TPU v4" in line for line in lines] == [True, True]
