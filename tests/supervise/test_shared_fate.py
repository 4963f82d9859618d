"""What an error in one of several processes is taken for."""

from __future__ import annotations

import types

import jax
import pytest

from palm_jax import config, meeting, processes
from palm_jax.errors import LostPeer

RESET = "Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error"


@pytest.fixture
def two(monkeypatch):
    """As if this were one of two processes; holds what it told the other."""
    told = []

    def nobody_has_told(key):
        raise jax.errors.JaxRuntimeError("NOT_FOUND")

    client = types.SimpleNamespace(
        key_value_try_get=nobody_has_told, key_value_set=lambda key, value: told.append(value)
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_client", lambda: client)
    monkeypatch.setattr(processes, "_FAREWELL_S", 0)
    monkeypatch.setattr(processes, "_LISTEN_S", 0.01)
    monkeypatch.setattr(
        meeting, "waits", lambda: types.SimpleNamespace(**dict(config.Distributed(), timeout_s=0))
    )
    return told


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(f"UNKNOWN: {RESET}"),
        # As it comes where a collective fails while it is dispatched.
        ValueError(f"UNKNOWN: {RESET}"),
        ValueError("UNAVAILABLE: no connection"),
    ],
)
def test_failed_connections_are_a_lost_process_and_no_defect(two, error):
    with (
        pytest.raises(LostPeer, match="the processes' connections failed: U"),
        processes.shared_fate(),
    ):
        raise error
    assert two == []


@pytest.mark.parametrize(
    "error", [ValueError("UNKNOWN letters in the name"), OSError("UNKNOWN: disk"), KeyError("x")]
)
def test_own_errors_stay_what_they_are_and_the_others_hear_of_them(two, error):
    with pytest.raises(type(error)), processes.shared_fate():
        raise error
    (text,) = two
    assert type(error).__name__ in text
