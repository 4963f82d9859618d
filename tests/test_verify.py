"""Gradients computed again on other devices: what is silent corruption, and whose it is."""

from __future__ import annotations

import dataclasses
import socket

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from palm_jax import course, sharding, step, train, verify
from palm_jax.errors import CannotDo
from palm_jax.record import logbook

END = 256


def on_four(small, **overrides):
    return small(**{"mesh.data": 2, "mesh.fsdp": 2, "steps": 5}, **overrides)


@hypothesis.given(
    width=st.integers(1, 8),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    bad=st.integers(0, 7),
)
def test_device_whose_every_gradient_is_off_is_found(width, passes, seed, bad):
    rng = np.random.default_rng(seed)
    right = rng.integers(0, 2**32, (passes, width, 2), np.uint32)
    straight, moved = right.copy(), np.empty_like(right)
    for device in range(width):  # the device after it computes each one's microbatch
        moved[:, (device + 1) % width] = right[:, device]
    straight_flat, moved_flat = straight.reshape(-1, 2), moved.reshape(-1, 2)
    assert verify.compare(straight_flat, moved_flat, width) == ((), ())
    if bad < width and width > 1:
        straight[:, bad, 1] ^= 1
        moved[:, bad, 0] ^= 4
        differing, suspects = verify.compare(straight_flat, moved_flat, width)
        expected = {p * width + d for p in range(passes) for d in (bad, (bad - 1) % width)}
        assert set(differing) == expected
        assert bad in suspects
        assert suspects == (bad,) or width == 2


def test_digests_are_those_that_a_step_records(small):
    settings = on_four(small)
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), END)
    shape = (8, settings.model.sequence_length + 1)
    batch = program.put(np.random.default_rng(3).integers(0, 257, shape).astype(np.int32))
    found = np.asarray(program.microbatch_digests(program.init(), batch))
    recording = on_four(small, **{"log.microbatch_digests": True})
    program = step.make_program(recording, program.mesh, END)
    _, vitals = program.step(program.init(), batch, step.controls())
    assert found.tolist() == np.asarray(vitals["microbatch_digests"]).tolist()


def test_healthy_devices_are_verified_and_no_bit_changes(small, tmp_path):
    straight = train.train(on_four(small), tmp_path / "straight")
    verified = train.train(on_four(small, **{"verify.every": 2}), tmp_path / "verified")
    assert verified.state_digest == straight.state_digest
    events = [
        r for r in logbook.read(tmp_path / "verified").records if r["event"] == "verification"
    ]
    assert [r["step"] for r in events] == [0, 2, 4]
    assert all(r["differing"] == [] and r["microbatches"] == 8 for r in events)


def test_device_that_computes_something_else_ends_the_run_and_is_named(
    small, tmp_path, monkeypatch
):
    train.train(on_four(small), tmp_path, stop_requested=lambda: "SIGTERM")

    def with_a_bad_chip(*given):
        program = step.make_program(*given)

        def digests(state, batch):
            found = np.array(program.microbatch_digests(state, batch))
            found[2::4, 0] ^= 1  # whatever the third device was given
            return found

        return dataclasses.replace(program, microbatch_digests=digests)

    monkeypatch.setattr(course, "make_program", with_a_bad_chip)
    with pytest.raises(CannotDo) as caught:
        train.train(on_four(small, **{"verify.every": 2}), tmp_path)
    host = socket.gethostname()
    for words in ("before step 2", "4 of 8 microbatches", f"device 2 on {host} (process 0)"):
        assert words in str(caught.value)
    (event,) = [r for r in logbook.read(tmp_path).records if r["event"] == "verification"]
    assert event["differing"] == [1, 2, 5, 6]
    assert [(s["device"], s["host"]) for s in event["suspects"]] == [(2, host)]


def test_batch_moves_on_by_one_device(small):
    settings = on_four(small)
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), END)
    rows = np.arange(16 * (settings.model.sequence_length + 1), dtype=np.int32).reshape(16, -1)
    there, moved = np.asarray(program.put(rows)), np.asarray(program.moved(program.put(rows)))
    for device in range(4):
        assert moved[:, (device + 1) % 4].tolist() == there[:, device].tolist()
