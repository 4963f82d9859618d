"""A checkpoint gives back the bits that were saved, or says by name why it cannot."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record.checkpoints import Checkpoints, bytes_of, check_space

KEEP_ALL = config.Checkpoint(keep_last=100)


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    moments: Any


class Moments(NamedTuple):
    mu: Any
    nu: Any


def mesh_of(data: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"))


def like_on(mesh: Mesh) -> State:
    def leaf(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    # Orbax keeps a piece of less than a kilobyte beside its index, a larger one by itself.
    w_DF = leaf((64, 128), jnp.float32, "data", "tensor")
    return State(
        step=leaf((), jnp.int32),
        params={"layers": {"w_in_DF": w_DF, "scale_D": leaf((16,), jnp.float32, "data")}},
        moments=(Moments(mu=w_DF, nu=leaf((64, 128), jnp.bfloat16, "tensor")), ()),
    )


def state_on(mesh: Mesh, seed: int = 0) -> State:
    random = np.random.default_rng(seed)

    def fill(target: jax.ShapeDtypeStruct) -> jax.Array:
        bits = random.integers(0, 256, (*target.shape, target.dtype.itemsize), np.uint8)
        values = bits.view(target.dtype).reshape(target.shape)  # any bits, NaN among them
        return jax.device_put(values, target.sharding)

    return jax.tree.map(fill, like_on(mesh))


def bits_of(tree: Any) -> list[tuple[str, bytes]]:
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4, 2)


def save(folder: pathlib.Path, *steps: int, mesh: Mesh) -> None:
    with Checkpoints(folder, KEEP_ALL) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_on(mesh, seed=step), {"tokens": 2**40 + step}, 1.0)


def test_state_and_record_come_back_as_they_were(tmp_path, mesh):
    record = {"tokens": 2**31, "note": "é", "stages": (1, 2), "loss": 0.1, 5: None}
    with Checkpoints(tmp_path / "new" / "folder", KEEP_ALL) as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.latest() is None
        told = checkpoints.save(0, state_on(mesh), record, held_out_loss=2.5)
        checkpoints.wait()
        state, found = checkpoints.restore(0, like_on(mesh))
        assert checkpoints.latest() == 0
        assert checkpoints.record(0) == found
    assert bits_of(state) == bits_of(state_on(mesh))
    assert jax.tree.structure(state) == jax.tree.structure(state_on(mesh))
    digest, leaves = found.pop("digest"), found.pop("leaves")
    assert leaves["moments/0/nu"] == "bfloat16[64,128]"
    assert digest["leaves"].keys() == leaves.keys()
    assert digest == {"whole": told.whole, "leaves": told.leaves}
    assert found == {
        "tokens": 2**31,
        "note": "é",
        "stages": [1, 2],
        "loss": 0.1,
        "5": None,
        "step": 0,
        "held_out_loss": 2.5,
    }


@pytest.mark.parametrize("shape", [(2, 4), (1, 1), (8, 1)])
def test_another_mesh_gets_the_same_bits_in_its_own_sharding(tmp_path, mesh, shape):
    save(tmp_path, 5, mesh=mesh)
    target = like_on(mesh_of(*shape))
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        restored, _ = checkpoints.restore(5, target)
    assert bits_of(restored) == bits_of(state_on(mesh, seed=5))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
        assert leaf.dtype == wanted.dtype


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path, mesh):
    # Arrays large enough that writing them takes longer than the next step.
    sharding = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    state = jax.device_put(np.random.default_rng(0).normal(size=(512, 1024)), sharding)
    state = {"a": state.astype(jnp.float32), "b": jnp.zeros((), jnp.int32)}
    step_fn = jax.jit(
        lambda s: {"a": s["a"] * 1.5 + 1, "b": s["b"] + 1}, donate_argnums=0, keep_unused=True
    )
    expected = {}
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        for step in range(10):
            expected[step] = bits_of(jax.tree.map(np.array, state))
            checkpoints.save(step, state, {}, None)
            donated = state["a"]
            state = step_fn(state)
            assert donated.is_deleted()  # else this test shows nothing
            state = jax.block_until_ready(step_fn(state))
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        for step in range(10):
            restored, _ = checkpoints.restore(step, like)
            assert bits_of(restored) == expected[step], step
        # A rollback: the restored state is donated at once, and the checkpoint survives it.
        rolled_back, _ = checkpoints.restore(4, like)
        jax.block_until_ready(step_fn(rolled_back))
        assert bits_of(checkpoints.restore(4, like)[0]) == expected[4]


def test_newest_and_best_stay_when_every_later_loss_is_worse(tmp_path, mesh):
    settings = config.Checkpoint(keep_last=2, keep_best=1)
    losses = [1.0, 1.1, float("nan"), 1.3, None]
    with Checkpoints(tmp_path, settings) as checkpoints:
        for step, loss in enumerate(losses, start=1):
            checkpoints.save(step, state_on(mesh), {}, loss)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4, 5]
        assert checkpoints.leftovers() == []
    # The best is remembered by the folder, not by the process; an unknown loss never wins.
    with Checkpoints(tmp_path, settings) as checkpoints:
        checkpoints.save(6, state_on(mesh), {}, float("-inf"))
        checkpoints.save(7, state_on(mesh), {}, 0.9)
        checkpoints.save(8, state_on(mesh), {}, float("nan"))
        checkpoints.save(9, state_on(mesh), {}, 0.95)
    assert Checkpoints(tmp_path, settings).steps() == [7, 8, 9]


def test_nan_is_not_best_even_when_nothing_else_is_known(tmp_path, mesh):
    with Checkpoints(tmp_path, config.Checkpoint(keep_last=1, keep_best=2)) as checkpoints:
        for step, loss in enumerate([float("nan"), None, 3.0, 4.0, 5.0]):
            checkpoints.save(step, state_on(mesh), {}, loss)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4]


def test_every_nth_step_stays(tmp_path, mesh):
    settings = config.Checkpoint(keep_last=1, keep_best=0, keep_every=4)
    with Checkpoints(tmp_path, settings) as checkpoints:
        for step in range(2, 12, 2):
            checkpoints.save(step, state_on(mesh), {}, -float(step))
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 10]


def test_death_while_removing_an_old_step_leaves_no_broken_step(tmp_path, mesh, monkeypatch):
    settings = config.Checkpoint(keep_last=1, keep_best=0)
    with monkeypatch.context() as patch:
        # As if the process died between setting a step aside and deleting it.
        patch.setattr(Checkpoints, "_empty_removed", lambda self: None)
        with Checkpoints(tmp_path, settings) as checkpoints:
            checkpoints.save(1, state_on(mesh), {}, None)
            checkpoints.save(2, state_on(mesh), {}, None)
    with Checkpoints(tmp_path, settings) as checkpoints:
        assert checkpoints.steps() == [2]
        assert checkpoints.leftovers() == ["removed"]
        assert (tmp_path / "removed" / "1" / "state").is_dir()
        checkpoints.save(3, state_on(mesh), {}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.parametrize("step", [5, 3])
def test_step_not_above_the_newest_is_refused(tmp_path, mesh, step):
    save(tmp_path, 5, mesh=mesh)
    with (
        Checkpoints(tmp_path, KEEP_ALL) as checkpoints,
        pytest.raises(CannotDo, match=f"cannot save step {step} .* already has step 5"),
    ):
        checkpoints.save(step, state_on(mesh), {}, None)
    assert Checkpoints(tmp_path, KEEP_ALL).steps() == [5]


def test_missing_step_is_refused_with_those_there_are(tmp_path, mesh):
    save(tmp_path, 5, 10, mesh=mesh)
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        with pytest.raises(WrongInput, match=r"no checkpoint 999 in .*; there are: 5, 10"):
            checkpoints.restore(999, like_on(mesh))
        with pytest.raises(WrongInput, match=r"no checkpoint 999"):
            checkpoints.record(999)
    with (
        Checkpoints(tmp_path / "nowhere", KEEP_ALL) as checkpoints,
        pytest.raises(WrongInput, match="there are: none"),
    ):
        checkpoints.restore(0, like_on(mesh))
    assert not (tmp_path / "nowhere").exists()


def test_other_leaves_shapes_and_dtypes_are_refused_by_name(tmp_path, mesh):
    save(tmp_path, 5, mesh=mesh)
    like = like_on(mesh)
    scale = like.params["layers"]["scale_D"]

    def with_scale(**changes: Any) -> State:
        arguments = {"shape": scale.shape, "dtype": scale.dtype, **changes}
        changed = jax.ShapeDtypeStruct(**arguments, sharding=NamedSharding(mesh, PartitionSpec()))
        return like.replace(params={"layers": {**like.params["layers"], "scale_D": changed}})

    new = {**like.params, "new_D": scale}
    cases = {
        "holds params/layers/scale_D as float32.16., but .* as float32.17.": with_scale(
            shape=(17,)
        ),
        "holds params/layers/scale_D as float32.16., but .* bfloat16": with_scale(
            dtype=jnp.bfloat16
        ),
        "has no leaf params/new_D": like.replace(params=new),
        "has a leaf moments/0/mu, moments/0/nu that": like.replace(moments=()),
    }
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        for message, target in cases.items():
            with pytest.raises(WrongInput, match=f"checkpoint 5 in .* {message}"):
                checkpoints.restore(5, target)


def test_an_optimizer_leaf_removed_from_the_arrays_is_refused_by_name(tmp_path, mesh):
    save(tmp_path, 5, mesh=mesh)
    # The arrays of a checkpoint without moments, under the record of one that has them.
    with Checkpoints(tmp_path / "other", KEEP_ALL) as checkpoints:
        checkpoints.save(5, state_on(mesh, seed=5).replace(moments=()), {}, None)
    shutil.rmtree(tmp_path / "5" / "state")
    shutil.copytree(tmp_path / "other" / "5" / "state", tmp_path / "5" / "state")
    with (
        Checkpoints(tmp_path, KEEP_ALL) as checkpoints,
        pytest.raises(CannotDo, match=r"checkpoint 5 .* is damaged: .*moments"),
    ):
        checkpoints.restore(5, like_on(mesh))


def test_other_bits_are_refused_with_leaf_and_an_older_step(tmp_path, mesh):
    save(tmp_path, 3, 5, mesh=mesh)
    # Whole and valid arrays that differ in one bit of one leaf.
    changed = state_on(mesh, seed=5)
    w = np.array(changed.params["layers"]["w_in_DF"])
    w.view(np.uint32)[3, 7] ^= 1
    w_sharding = changed.params["layers"]["w_in_DF"].sharding
    changed.params["layers"]["w_in_DF"] = jax.device_put(w, w_sharding)
    with Checkpoints(tmp_path / "other", KEEP_ALL) as checkpoints:
        checkpoints.save(5, changed, {}, None)
    shutil.rmtree(tmp_path / "5" / "state")
    shutil.copytree(tmp_path / "other" / "5" / "state", tmp_path / "5" / "state")
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        with pytest.raises(CannotDo) as caught:
            checkpoints.restore(5, like_on(mesh))
        assert "other bits than were saved in params/layers/w_in_DF; use step 3" in str(
            caught.value
        )
        # The older one is offered only while its record can be read.
        (tmp_path / "3" / "record" / "metadata").write_text("{}")
        with pytest.raises(CannotDo, match="there is no older one"):
            checkpoints.restore(5, like_on(mesh))
        with pytest.raises(CannotDo, match=r"checkpoint 3 .* record is unreadable .*checksum"):
            checkpoints.restore(3, like_on(mesh))


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def restore_damaged(
    original: pathlib.Path, copy: pathlib.Path, file: pathlib.Path, data: bytes | None, mesh: Mesh
) -> str:
    """Restore a copy with other bytes in one file; returns the refusal, or ""."""
    shutil.copytree(original, copy)  # a new path: TensorStore caches what it has read
    if data is None:
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(data)
    refusal = ""
    with Checkpoints(copy, KEEP_ALL) as checkpoints:
        try:
            state, record = checkpoints.restore(5, like_on(mesh))
        except (CannotDo, WrongInput) as error:
            refusal = str(error)
    if refusal:
        assert "checkpoint 5" in refusal
        assert "\n" not in refusal
        return refusal
    assert bits_of(state) == bits_of(state_on(mesh, seed=5)), file
    assert record["tokens"] == 2**40 + 5, file
    return ""


def test_a_flipped_bit_anywhere_is_refused_or_harmless(tmp_path, mesh):
    original = tmp_path / "checkpoints"
    save(original, 5, mesh=mesh)
    refusals = []
    for file in files_of(original):
        data = (original / file).read_bytes()
        # Raise this for a closer look: 1000 for every byte or so.
        per_file = int(os.environ.get("FLIPS_PER_FILE", "2"))
        for index in range(len(data) // (per_file + 1), len(data), len(data) // per_file + 1):
            flipped = bytearray(data)
            flipped[index] ^= 1 << (index % 8)
            copy = tmp_path / f"{len(refusals)}"
            refusals.append(restore_damaged(original, copy, file, bytes(flipped), mesh))
            shutil.rmtree(copy)
    text = "\n".join(refusals)
    assert "other bits than were saved in" in text  # Orbax noticed nothing
    assert "arrays cannot be read" in text
    assert "record is unreadable" in text
    assert "" in refusals  # Orbax keeps some indices twice


def test_a_truncated_or_missing_file_is_refused_or_harmless(tmp_path, mesh):
    original = tmp_path / "checkpoints"
    save(original, 5, mesh=mesh)
    refusals = []
    for file in files_of(original):
        data = (original / file).read_bytes()
        for left in (data[: len(data) // 2], None):
            copy = tmp_path / f"{len(refusals)}"
            refusals.append(restore_damaged(original, copy, file, left, mesh))
            shutil.rmtree(copy)
    text = "\n".join(refusals)
    assert "arrays cannot be read" in text
    assert "record is unreadable" in text
    assert "there is no checkpoint 5" in text  # incomplete, so not a step at all


def test_half_and_empty_folders_are_reported_not_listed_and_block_nothing(tmp_path, mesh):
    save(tmp_path, 5, mesh=mesh)
    (tmp_path / "15").mkdir()
    shutil.copytree(tmp_path / "5", tmp_path / "10.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "5", tmp_path / "12")
    (tmp_path / "12" / "record" / "metadata").unlink()
    (tmp_path / "20").write_text("a file")
    (tmp_path / "notes").mkdir()
    leftovers = ["10.orbax-checkpoint-tmp", "12", "15", "20"]
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        assert checkpoints.steps() == [5]
        assert checkpoints.latest() == 5
        assert checkpoints.leftovers() == leftovers
        with pytest.raises(WrongInput, match="no checkpoint 15"):
            checkpoints.restore(15, like_on(mesh))
        assert checkpoints.leftovers() == leftovers  # reading removes nothing
        checkpoints.save(10, state_on(mesh), {}, None)
        checkpoints.wait()
        assert checkpoints.leftovers() == []
        checkpoints.save(15, state_on(mesh), {}, None)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 10, 15]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "15", "5", "notes"]


KILLED_WHILE_SAVING = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from palm_jax import config
    from palm_jax.record.checkpoints import Checkpoints

    numbers = np.random.default_rng(0).integers(0, 2**31, (8, 2**20), np.int32)
    checkpoints = Checkpoints(sys.argv[1], config.Checkpoint())
    checkpoints.save(5, {"w": jnp.asarray(numbers[:, :64])}, {}, None)
    checkpoints.wait()
    checkpoints.save(10, {"w": jnp.asarray(numbers)}, {}, None)
    print("saving", flush=True)
    checkpoints.wait()
"""


def test_killed_inside_a_save_resumes_from_the_step_before(tmp_path):
    program = textwrap.dedent(KILLED_WHILE_SAVING)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    half = tmp_path / "10.orbax-checkpoint-tmp"
    until = time.monotonic() + 120
    while not any(half.glob("state*")) and time.monotonic() < until and child.poll() is None:
        time.sleep(0.001)  # until the arrays are being written
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        assert checkpoints.steps() == [5]
        assert checkpoints.leftovers() == [half.name]
        numbers = np.random.default_rng(0).integers(0, 2**31, (8, 2**20), np.int32)[:, :64]
        one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {"w": jax.ShapeDtypeStruct(numbers.shape, jnp.int32, sharding=one_device)}
        state, _ = checkpoints.restore(5, like)
        assert np.array_equal(np.asarray(state["w"]), numbers)
        checkpoints.save(10, state, {}, None)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 10]
        assert checkpoints.leftovers() == []


def test_a_background_save_that_fails_is_told_and_the_next_one_works(tmp_path, mesh):
    big = {"w": jax.random.bits(jax.random.key(0), (2**20,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(5, state_on(mesh), {}, None)
        checkpoints.wait()
        # As a full disk would: no file of this process may grow beyond a megabyte.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            checkpoints.save(10, big, {}, None)
            with pytest.raises(CannotDo, match=r"saving the checkpoint of step 10 in .* failed"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoints.wait()  # told once
        assert checkpoints.steps() == [5]
        assert checkpoints.leftovers() == ["10.orbax-checkpoint-tmp"]
        checkpoints.save(11, big, {}, None)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 11]
        assert checkpoints.leftovers() == []


def test_a_background_save_that_fails_is_told_by_close(tmp_path):
    big = {"w": jax.random.bits(jax.random.key(0), (2**20,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        checkpoints.save(10, big, {}, None)
        with pytest.raises(CannotDo, match="step 10"):
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Checkpoints(tmp_path, KEEP_ALL).steps() == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, mesh):
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(tmp_path / "file" / "checkpoints", KEEP_ALL) as checkpoints,
        pytest.raises(CannotDo, match=r"cannot prepare .*file/checkpoints"),
    ):
        checkpoints.save(0, state_on(mesh), {}, None)


def test_an_empty_array_is_refused_not_lost(tmp_path):
    with (
        Checkpoints(tmp_path, KEEP_ALL) as checkpoints,
        pytest.raises(CannotDo, match="without elements: w"),
    ):
        checkpoints.save(0, {"w": jnp.zeros((0, 3))}, {}, None)


@pytest.mark.parametrize("name", ["runs/a b", "läufe/日本 1"])
def test_relative_paths_with_spaces_and_other_alphabets(tmp_path, mesh, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(pathlib.Path(name), KEEP_ALL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # the folder was fixed when it was opened
    with checkpoints:
        checkpoints.save(5, state_on(mesh), {}, None)
    assert list(elsewhere.iterdir()) == []
    with Checkpoints(pathlib.Path("..") / name, KEEP_ALL) as checkpoints:
        state, _ = checkpoints.restore(5, like_on(mesh))
    assert bits_of(state) == bits_of(state_on(mesh))


def test_a_url_that_lost_a_slash_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongInput, match="lost a slash"):
        Checkpoints(pathlib.Path("gs://bucket/x"), KEEP_ALL)
    assert list(tmp_path.iterdir()) == []


def test_size_of_a_state_and_space_on_the_disk(tmp_path, mesh):
    size = 4 + 4 * 64 * 128 + 4 * 16 + 4 * 64 * 128 + 2 * 64 * 128
    assert bytes_of(like_on(mesh)) == bytes_of(state_on(mesh)) == size
    missing = tmp_path / "not" / "yet"
    check_space(missing, size)
    with pytest.raises(CannotDo, match=r"needs 1.07e\+09 GiB, but .*yet has"):
        check_space(missing, 2**60)
    check_space("gs://bucket/x", 2**60)
    assert list(tmp_path.iterdir()) == []


def test_the_record_on_the_disk_is_plain_json(tmp_path, mesh):
    save(tmp_path, 5, mesh=mesh)
    stored = json.loads((tmp_path / "5" / "record" / "metadata").read_text())
    assert stored["record"] == {"tokens": 2**40 + 5}
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints, pytest.raises(ValueError, match="JSON"):
        checkpoints.save(10, state_on(mesh), {"loss": float("nan")}, None)
