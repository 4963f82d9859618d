"""A run that shrinks and grows: its history does not show on which devices it was computed."""

from __future__ import annotations

import itertools
import pathlib

import pytest

from palm_jax import config, train
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.replay import branches
from palm_jax.replay import replay as replaying

STEPS = 20
# Four batch sizes, two of them between checkpoints; the clip binds at the start.
SETTINGS = {
    "steps": STEPS,
    "data.ramp": {"starts": [0, 3, 9, 14], "sizes": [8, 16, 24, 16]},
    "optimizer.clip_norm": 0.5,
    "checkpoint.every": 4,
}


def on(settings: config.Config, mesh: tuple[int, ...], steps: int = STEPS) -> config.Config:
    data, fsdp, tensor = (*mesh, 1)[:3]
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    return settings.model_copy(update={"mesh": config.Mesh(**sizes), "steps": steps})


def eventful(path: pathlib.Path, settings: config.Config, meshes) -> dict[str, object]:
    """Train with an intervention, and a rollback that leaves data out; the next of `meshes` is
    taken at the start and at every checkpoint. Returns what must not depend on them."""
    places = itertools.cycle(meshes)

    def train_to(step: int) -> train.Outcome:
        return train.train(on(settings, next(places), step), path)

    run = RunFolder(path.absolute())
    for step in (4, 8):
        train_to(step)
    branches.intervene(run, 8, branches.Changes(("schedule.peak=0.02",)), "try a higher rate")
    for step in (12, 16):
        train_to(step)
    # Back to step 12, leaving out the data of steps 12 and 13.
    branches.intervene(run, 12, branches.Changes(exclude=((12, 14),)), "bad data")
    for step in (16, STEPS):
        outcome = train_to(step)
    steps, digests = {}, {}
    for record in logbook.read(path).records:
        if record["event"] == "step":
            steps[record["segment"], record["step"]] = record["bits"]
        elif record["event"] == "checkpoint":
            digests[record["segment"], record["step"]] = record["state_digest"]
    return {"steps": steps, "checkpoints": digests, "end": outcome.state_digest}


@pytest.fixture(scope="module")
def history(small, tmp_path_factory):
    """The eventful history on one device, by precision."""
    known = {}

    def get(policy: str):
        if policy not in known:
            path = tmp_path_factory.mktemp("elastic") / "run"
            settings = small(**SETTINGS, **{"precision.policy": policy})
            known[policy] = path, eventful(path, settings, [(1, 1)])
        return known[policy]

    return get


MESHES = [(8, 1), (1, 4), (4, 2)]  # one after the other, and again


def test_a_run_moves_to_other_devices_at_a_checkpoint(small, tmp_path):
    settings = small(**{"data.ramp": {"sizes": [8]}})
    stayed = train.train(on(settings, (1, 1), 6), tmp_path / "stayed")
    train.train(on(settings, (1, 2), 3), tmp_path / "moved")
    moved = train.train(on(settings, (2, 1), 6), tmp_path / "moved")
    assert moved.state_digest == stayed.state_digest
    starts = [r for r in logbook.read(tmp_path / "moved").records if r["event"] == "start"]
    assert starts[1]["settings_changed"] == {
        "steps": [3, 6],
        "mesh.data": [1, 2],
        "mesh.fsdp": [2, 1],
    }
    assert starts[1]["environment_changed"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_history_is_the_same_on_changing_devices(small, history, tmp_path, policy):
    _, on_one = history(policy)
    settings = small(**SETTINGS, **{"precision.policy": policy})
    assert eventful(tmp_path / "run", settings, MESHES) == on_one


@pytest.mark.slow
def test_the_history_has_what_it_is_compared_by(history):
    path, found = history("float32")
    assert sorted(found["steps"]) == [
        *((0, step) for step in range(8)),
        *((1, step) for step in range(8, 16)),
        *((2, step) for step in range(12, 20)),
    ]
    records = [r for r in logbook.read(path).records if r["event"] == "step"]
    clipped = [r for r in records if r["computed"]["gradient_norm"] > 0.5]
    assert clipped
    assert len({r["computed"]["batch_size"] for r in records}) == 3
    first = {r["segment"]: r["computed"] for r in records if r["step"] == 12}
    assert first[2]["first_position"] > first[1]["first_position"]
    rates = {r["step"]: r["computed"]["rate"] for r in records}
    assert rates[8] == 2 * rates[7]


@pytest.mark.slow
def test_every_segment_replays_on_other_devices(history):
    path, _ = history("float32")
    run = RunFolder(path)
    with Corpus.open(run.config().data.corpus) as corpus:
        for segment, start, stop in [(0, 2, 8), (1, 10, 16), (2, 13, 20)]:
            found = replaying.replay(
                run,
                start,
                stop,
                corpus=corpus,
                segment=segment,
                mesh=config.Mesh(data=2, fsdp=4),
            )
            assert found.identical, (segment, found.first_difference)


# --- what the comparison would show ---


@pytest.mark.slow
def test_fast_sums_depend_on_the_devices(small, tmp_path):
    """The negative control: with XLA's own sums the comparison fails."""
    settings = small(**{"numerics.reduction": "fast", "data.ramp": {"sizes": [16]}})
    ends = {
        mesh: train.train(on(settings, mesh, 6), tmp_path / f"run-{mesh[0]}x{mesh[1]}").state_digest
        for mesh in [(1, 1), (8, 1)]
    }
    assert len(set(ends.values())) == 2, ends


def test_a_run_with_fast_sums_keeps_its_mesh(small, tmp_path):
    settings = small(**{"numerics.reduction": "fast"})
    train.train(on(settings, (2, 1), 2), tmp_path / "run")
    with pytest.raises(WrongInput, match=r"mesh.data was 2, now 1"):
        train.train(on(settings, (1, 1), 8), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with (
        Corpus.open(run.config().data.corpus) as corpus,
        pytest.raises(CannotDo, match=r"mesh.data was 2, is 1"),
    ):
        replaying.replay(run, 0, 2, corpus=corpus, mesh=config.Mesh())


@pytest.mark.slow
def test_tensor_parallelism_belongs_to_the_run(small, tmp_path):
    settings = small()
    train.train(on(settings, (1, 2, 2), 4), tmp_path / "run")
    with pytest.raises(WrongInput, match=r"mesh.tensor was 2, now 1"):
        train.train(on(settings, (1, 2, 1), 8), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with Corpus.open(run.config().data.corpus) as corpus:
        found = replaying.replay(run, 0, 4, corpus=corpus, mesh=config.Mesh(tensor=2))
    assert found.identical
