"""Replays: identical where nothing was touched, and able to say what was."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest

from palm_jax import config, data
from palm_jax import train as training
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import environment, logbook
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.replay import replay as replaying

MESHES = [(8, 1), (4, 2)]


@pytest.fixture(scope="module")
def run(small, tmp_path_factory) -> pathlib.Path:
    """Twelve ramped steps with checkpoints at 4, 8 and 12. Read only."""
    path = tmp_path_factory.mktemp("replay") / "run"
    training.train(small(), path)
    return path


@pytest.fixture
def copy(run, tmp_path) -> pathlib.Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def replay(path: pathlib.Path, start: int, stop: int, **options):
    folder = RunFolder(path)
    with Corpus.open(folder.config().data.corpus) as corpus:
        return replaying.replay(folder, start, stop, corpus=corpus, **options)


def content(path: pathlib.Path) -> dict[str, str]:
    return {
        str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


@pytest.mark.parametrize(
    ("start", "stop", "checkpoint"), [(0, 12, None), (4, 8, 4), (5, 7, 4), (9, 12, 8)]
)
def test_untouched_run_replays_identically_and_stays_untouched(run, start, stop, checkpoint):
    before = content(run)
    found = replay(run, start, stop)
    assert found.identical
    assert found.first_difference is None
    assert (found.compared_steps, found.from_checkpoint) == (stop - start, checkpoint)
    assert {"loss", "gradient_norm", "beta2", "batch_digest", "tokens"} <= set(found.fields)
    assert found.compared_digests == tuple(s for s in (4, 8, 12) if (checkpoint or 1) <= s <= stop)
    assert found.expectation.startswith("same program, same chips")
    assert content(run) == before


@pytest.mark.parametrize(
    "mesh", MESHES[:1] + [pytest.param(m, marks=pytest.mark.slow) for m in MESHES[1:]]
)
def test_run_replays_identically_on_other_device_counts(run, mesh):
    found = replay(run, 3, 9, mesh=config.Mesh(data=mesh[0], fsdp=mesh[1]))
    assert found.identical
    assert found.expectation.startswith("other device count")


def change_record(path: pathlib.Path, step: int, change) -> None:
    """Rewrite the logbook with `change` applied to the record of a step."""
    for part in sorted((path / "logbook").iterdir()):
        records = [json.loads(line) for line in part.read_text().splitlines()]
        for record in records:
            if record["event"] == "step" and record["step"] == step:
                change(record)
        part.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("field", ["loss", "gradient_norm", "parameter_norm", "rate"])
def test_one_flipped_bit_of_a_recorded_number_is_the_first_difference(copy, field):
    def flip(record):
        record["bits"][field] = f"{int(record['bits'][field], 16) ^ 1:08x}"

    change_record(copy, 6, flip)
    found = replay(copy, 4, 9)
    assert not found.identical
    first = found.first_difference
    assert (first.step, first.field) == (6, field)
    assert int(first.recorded, 16) ^ int(first.replayed, 16) == 1
    assert [row[0] for row in found.rows if row[2]] == [6]


def flip_in_checkpoint(path: pathlib.Path, step: int, leaf: str, small) -> None:
    """Save checkpoint `step` anew with one bit of `leaf` flipped, digests and all."""
    folder = RunFolder(path)
    checkpoints = folder.checkpoints(0)
    with Corpus.open(folder.config().data.corpus) as corpus:
        from palm_jax import sharding
        from palm_jax.course import Course
        from palm_jax.record.segments import Segment

        course = Course(folder.config(), Segment(), corpus, sharding.make_mesh(config.Mesh()))
        shapes = course.program_at(0).state_shapes
    with Checkpoints(checkpoints, config.Checkpoint()) as saved:
        state, _ = saved.restore(step, shapes)
    import jax

    def flip(path, x):
        if jax.tree_util.keystr(path, simple=True, separator="/") != leaf:
            return x
        bits = np.array(x)
        bits.view(np.uint32).reshape(-1)[7] ^= 1
        return jax.device_put(bits, x.sharding)

    state = jax.tree_util.tree_map_with_path(flip, state)
    shutil.rmtree(checkpoints)
    with Checkpoints(checkpoints, config.Checkpoint()) as saved:
        saved.save(step, state, {}, None)


@pytest.mark.parametrize(
    "leaf", ["params/layers/w_gate_DF", "optimizer/momentum/ema/layers/w_gate_DF"]
)
def test_one_flipped_bit_of_the_state_shows_as_a_difference(copy, small, leaf):
    flip_in_checkpoint(copy, 4, leaf, small)
    found = replay(copy, 4, 8)
    assert not found.identical
    # The logbook knows the state's digest, even where no number of a step shows the bit.
    assert (found.first_difference.step, found.first_difference.field) == (3, "state_digest")


def test_damaged_checkpoint_is_passed_over_and_named(copy):
    arrays = [p for p in (copy / "segments/000/checkpoints/8/state").rglob("*") if p.is_file()]
    largest = max(arrays, key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    found = replay(copy, 9, 11)
    assert found.identical
    assert found.from_checkpoint == 4
    assert "checkpoint 8" in found.damaged_checkpoints[0]


def test_one_changed_token_is_the_first_difference(copy, tmp_path, monkeypatch):
    read = Corpus.read

    def other(self, split, ids):
        tokens = read(self, split, ids)
        if split == "train" and len(tokens) == 16:
            tokens[3, 2] ^= 1
        return tokens

    monkeypatch.setattr(Corpus, "read", other)
    found = replay(copy, 4, 7)
    first = found.first_difference
    assert first.step == 5  # the first batch of 16
    differing = {row[0]: row[2] for row in found.rows}
    assert "batch_digest" in differing[5]
    assert differing[4] == ()


def test_changed_environment_is_refused_by_name_unless_allowed(copy, monkeypatch):
    capture = environment.capture
    monkeypatch.setattr(
        environment, "capture", lambda **arguments: capture(**arguments) | {"flax": "0.0.1"}
    )
    with pytest.raises(CannotDo, match=r"flax was '.*', is '0.0.1'"):
        replay(copy, 4, 6)
    found = replay(copy, 4, 6, allow_environment=True)
    assert found.identical
    assert list(found.environment_differences) == ["flax"]


def test_other_program_is_said_to_be_one(copy, monkeypatch, compiled_afresh):
    from palm_jax.decoder import norms

    monkeypatch.setattr(norms, "EPSILON", 1e-5)
    found = replay(copy, 4, 6)
    assert not found.identical
    assert found.expectation.startswith("other program")


def test_steps_that_were_not_recorded_are_refused(run):
    with pytest.raises(WrongInput, match="no record of step 12"):
        replay(run, 10, 14)
    with pytest.raises(WrongInput, match="no record of step 4 as attempt 2"):
        replay(run, 4, 6, attempt=2)
    with pytest.raises(WrongInput, match="there is no segment 003"):
        replay(run, 4, 6, segment=3)


@pytest.mark.slow
def test_resumed_run_replays_whichever_attempt_is_asked_for(small, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        add = training.StepRecorder.add

        def add_or_die(self, step, batch, vitals):
            if step == 7:
                raise KeyboardInterrupt
            add(self, step, batch, vitals)

        patch.setattr(training.StepRecorder, "add", add_or_die)
        with pytest.raises(KeyboardInterrupt):
            training.train(small(), path)
    training.train(small(), path)
    assert replay(path, 4, 6, attempt=1).identical
    assert replay(path, 4, 6, attempt=2).identical
    assert replay(path, 0, 12).identical


def test_replay_reads_the_recorded_batches(run, small):
    reading = logbook.read(run)
    digests = {
        r["step"]: r["computed"]["batch_digest"] for r in reading.records if r["event"] == "step"
    }
    settings = small()
    with Corpus.open(settings.data.corpus) as corpus:
        for step in (0, 5, 11):
            batch = data.batch(corpus, settings.seed, step, settings.data.ramp)
            assert digests[step] == batch.digest
