"""What lies in a folder of checkpoints is told from its files, and damage is found by reading."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import digests, inventory
from palm_jax.record.checkpoints import Checkpoints

KEEP_ALL = config.Checkpoint(keep_last=100)
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))


def state_of(seed: int) -> dict[str, Any]:
    """Three leaves, spread over eight devices: 32 KiB, 2 KiB, 4 bytes."""
    random = np.random.default_rng(seed)
    spread = NamedSharding(MESH, PartitionSpec("data", "tensor"))
    return {
        "params": {"w_DF": jax.device_put(random.normal(size=(64, 128)).astype("f4"), spread)},
        "nu_DF": jax.device_put(jnp.asarray(random.normal(size=(8, 128)), jnp.bfloat16), spread),
        "step": jax.device_put(jnp.int32(seed), NamedSharding(MESH, PartitionSpec())),
    }


def like_of(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def save(folder: pathlib.Path, *steps: int, state: Any = None, loss: float | None = None) -> None:
    with Checkpoints(folder, KEEP_ALL) as saved:
        for step in steps:
            saved.save(step, state_of(step) if state is None else state, {}, loss)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    save(folder, 5, 7, loss=2.5)
    return folder


@pytest.fixture
def copied(original: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    # A new path: TensorStore caches what it has read.
    return pathlib.Path(shutil.copytree(original, tmp_path / "checkpoints"))


def verified(folder: pathlib.Path, step: int = 5) -> list[str]:
    with Checkpoints(folder, KEEP_ALL) as saved:
        return saved.verify(step)


def walked(folder: pathlib.Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )


def test_entries_have_the_bytes_of_their_files_and_what_was_saved(copied):
    found = inventory.entries(epath.Path(copied))
    assert [entry.step for entry in found] == [5, 7]
    assert [entry.bytes for entry in found] == [walked(copied / "5"), walked(copied / "7")]
    assert [entry.digest for entry in found] == [digests.digest(state_of(n)).whole for n in (5, 7)]
    assert [(entry.held_out_loss, entry.problem) for entry in found] == [(2.5, None)] * 2


def test_what_is_not_complete_is_a_leftover(copied):
    (copied / "5" / "state" / "_METADATA").unlink()
    (copied / "9.orbax-checkpoint-tmp").mkdir()
    (copied / "removed" / "3").mkdir(parents=True)
    (copied / "notes").mkdir()  # nobody's but a person's
    folder = epath.Path(copied)
    assert inventory.steps(folder) == [7]
    assert inventory.named_steps(folder) == [5, 7]
    assert inventory.missing(folder / "5") == ["state/_METADATA"]
    assert inventory.leftovers(folder) == ["5", "9.orbax-checkpoint-tmp", "removed"]
    with Checkpoints(copied, KEEP_ALL) as saved:
        assert saved.leftovers() == inventory.leftovers(folder)
    inventory.remove(folder, inventory.leftovers(folder))
    assert sorted(path.name for path in copied.iterdir()) == ["7", "notes"]


def test_a_changed_record_is_a_problem_of_its_entry_alone(copied):
    record = copied / "5" / "record" / "metadata"
    record.write_text(record.read_text().replace("2.5", "1.5"))
    damaged, sound = inventory.entries(epath.Path(copied))
    assert "checksum does not fit" in str(damaged.problem)
    assert (damaged.digest, damaged.held_out_loss) == (None, None)
    assert damaged.bytes == walked(copied / "5")
    assert sound.problem is None


def test_a_checkpoint_that_was_set_aside_is_whole_elsewhere(copied):
    before = walked(copied / "5")
    inventory.set_aside(epath.Path(copied), 5)
    assert inventory.steps(epath.Path(copied)) == [7]
    assert walked(copied / "removed" / "5") == before


def test_folder_that_is_not_there_holds_nothing(tmp_path):
    folder = epath.Path(tmp_path / "nowhere")
    assert (inventory.entries(folder), inventory.leftovers(folder)) == ([], [])
    assert not folder.exists()


# --- reading it all ---


def test_sound_checkpoint_of_eight_devices_is_read_leaf_by_leaf_on_one(copied, monkeypatch):
    told, seen = [], []
    whole = digests.digest

    def digest(leaf: Any) -> digests.Digest:
        seen.append((leaf.nbytes, len(leaf.sharding.device_set)))
        return whole(leaf)

    monkeypatch.setattr(digests, "digest", digest)
    with Checkpoints(copied, KEEP_ALL) as saved:
        assert saved.verify(5, lambda done, total: told.append((done, total))) == []
    assert sorted(seen) == [(4, 1), (2048, 1), (32768, 1)]
    assert told[0] == (0, 34820)
    assert told[-1] == (34820, 34820)
    assert len(told) == 4


def with_arrays_of(folder: pathlib.Path, state: Any) -> list[str]:
    """Verify checkpoint 5 with whole and valid arrays of another state under its record."""
    save(folder.parent / "other", 5, state=state)
    shutil.rmtree(folder / "5" / "state")
    shutil.copytree(folder.parent / "other" / "5" / "state", folder / "5" / "state")
    return verified(folder)


def test_one_other_bit_is_named_with_its_leaf(copied):
    changed = state_of(5)
    w_DF = np.array(changed["params"]["w_DF"])
    w_DF.view(np.uint32)[3, 7] ^= 1
    changed["params"]["w_DF"] = jax.device_put(w_DF, changed["params"]["w_DF"].sharding)
    assert with_arrays_of(copied, changed) == ["params/w_DF has other bits than were saved"]


def test_leaf_that_is_missing_is_named(copied):
    without = state_of(5)
    del without["nu_DF"]
    (problem,) = with_arrays_of(copied, without)
    assert problem.startswith("nu_DF cannot be read (")


def test_leaf_too_many_is_damage(copied):
    problems = with_arrays_of(copied, {**state_of(5), "surplus": jnp.zeros(3)})
    assert problems
    assert "surplus" in problems[0]


def test_other_digest_of_the_whole_than_that_of_the_leaves_is_damage(copied, monkeypatch):
    monkeypatch.setattr(
        digests, "joined", lambda leaves, named: digests.Digest(dict(leaves), "0" * 16)
    )
    assert verified(copied) == ["another digest of the whole than was saved"]


def test_verification_and_restoring_refuse_the_same(original, tmp_path):
    state, answers = state_of(5), []
    for file in sorted(p.relative_to(original) for p in (original / "5").rglob("*") if p.is_file()):
        data = (original / file).read_bytes()
        for number, change in enumerate(("flip", "cut", "delete")):
            copy = tmp_path / f"{change} {str(file).replace('/', ' ')}"
            shutil.copytree(original, copy)
            at = len(data) * (number + 1) // 4
            if change == "delete":
                (copy / file).unlink()
            elif data:
                flipped = bytes([*data[:at], data[at] ^ 4, *data[at + 1 :]])
                (copy / file).write_bytes(flipped if change == "flip" else data[:at])
            with Checkpoints(copy, KEEP_ALL) as saved:
                if 5 not in saved.steps():
                    continue
                try:
                    restored = saved.restore(5, like_of(state)) is not None
                except (CannotDo, WrongInput):
                    restored = False
                problems = saved.verify(5)
            answers.append((restored, not problems))
            assert restored == (not problems), (file, change, problems)
    assert {True, False} == {restored for restored, _ in answers}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"),
        ValueError("PERMISSION_DENIED: Error opening local file"),
    ],
)
def test_what_the_machine_cannot_do_is_not_called_damage(copied, monkeypatch, error):
    def fail(*arguments: Any) -> None:
        raise RuntimeError("reading failed") from error

    monkeypatch.setattr(Checkpoints, "_read_leaf", fail)
    with pytest.raises(CannotDo, match=r"checkpoint 5 in .* cannot be read here"):
        verified(copied)
