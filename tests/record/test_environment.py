"""What can change bits is captured and compared; who and where is not."""

from __future__ import annotations

import getpass
import json
import os
import pathlib
import shutil
import socket
import subprocess
from typing import Any

import jax
import pytest

from palm_jax import config
from palm_jax.errors import WrongInput
from palm_jax.record import environment

MESH = {"data": 4, "fsdp": 1, "tensor": 2}


@pytest.fixture(scope="module")
def captured() -> dict[str, Any]:
    return environment.capture(numerics=config.Numerics(), mesh_shape=MESH)


def test_it_tells_versions_devices_and_settings(captured):
    assert captured["jax"] == jax.__version__
    assert captured["platform"] == jax.devices()[0].platform == "cpu"
    assert captured["device_count"] == len(jax.devices())
    assert (captured["mesh.data"], captured["mesh.fsdp"], captured["mesh.tensor"]) == (4, 1, 2)
    assert captured["process_count"] == 1
    assert captured["threads"] == 8
    assert captured["x64"] is False
    assert captured["prng"] == "threefry2x32"
    assert captured["numpy"]
    assert captured["libtpu"] is None or captured["libtpu"][0].isdigit()


def test_it_is_flat_json_and_stays_the_same(captured):
    assert json.loads(json.dumps(captured, allow_nan=False)) == captured
    assert not any(isinstance(value, dict) for value in captured.values())
    assert environment.capture(numerics=config.Numerics(), mesh_shape=MESH) == captured
    assert environment.differences(captured, captured) == {}


def test_it_names_no_person_machine_or_path(captured):
    text = json.dumps(captured)
    for private in (getpass.getuser(), socket.gethostname(), str(pathlib.Path.home()), os.getcwd()):
        assert f'"{private}' not in text
    assert '"/' not in text


def test_nproc_is_the_process_environments(monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    assert environment.capture(numerics=config.Numerics(), mesh_shape={})["NPROC"] == "3"
    monkeypatch.delenv("NPROC")
    assert environment.capture(numerics=config.Numerics(), mesh_shape={})["NPROC"] is None


def test_precision_settings_are_those_in_force():
    with jax.default_matmul_precision("highest"):
        assert (
            environment.capture(numerics=config.Numerics(), mesh_shape={})["matmul_precision"]
            == "highest"
        )
    with jax.enable_x64(True):
        assert environment.capture(numerics=config.Numerics(), mesh_shape={})["x64"] is True


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", []),
        ("--xla_b=1  --xla_a", ["--xla_a", "--xla_b=1"]),
        ("--xla_a=1 --xla_b=2 --xla_a=3", ["--xla_a=3", "--xla_b=2"]),
        ("--xla_force_host_platform_device_count=8 --xla_a=1", ["--xla_a=1"]),
        ("--xla_dump_to=/somewhere/dump --xla_dump_hlo_as_text --xla_a=1", ["--xla_a=1"]),
        ("--xla_data_dir=/somewhere/x", ["--xla_data_dir=<path>"]),
        ("--xla_a='b c'", ["--xla_a=b c"]),
    ],
)
def test_flags_are_split_sorted_and_stripped_of_paths(monkeypatch, text, flags):
    monkeypatch.setenv("XLA_FLAGS", text)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", text)
    assert environment.normalised_flags("XLA_FLAGS") == flags
    assert environment.normalised_flags("LIBTPU_INIT_ARGS") == flags


def test_a_file_of_flags_counts_by_what_it_holds(monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_b=1\n--xla_a=2\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert environment.normalised_flags("XLA_FLAGS") == ["--xla_a=2", "--xla_b=1"]
    monkeypatch.setenv("XLA_FLAGS", "nowhere")
    with pytest.raises(WrongInput, match="XLA_FLAGS=nowhere is neither"):
        environment.normalised_flags("XLA_FLAGS")


@pytest.mark.parametrize(
    "field",
    [
        "jax", "jaxlib", "flax", "optax", "grain", "platform", "device_kind", "mesh.tensor",
        "XLA_FLAGS", "matmul_precision", "x64", "prng", "threefry_partitionable",
        "compiler_options",
        "threads", "NPROC", "OPENBLAS_NUM_THREADS", "scipy", "machine", "cpu_model", "cpu_flags",
    ],
)  # fmt: skip
def test_a_field_that_can_change_bits_is_a_difference(captured, field):
    assert field in captured
    changed = {**captured, field: "other"}
    assert environment.differences(captured, changed) == {field: (captured[field], "other")}
    missing = {key: value for key, value in changed.items() if key != field}
    assert environment.differences(changed, missing) == {field: ("other", None)}


@pytest.mark.parametrize(
    "field",
    [
        "python", "numpy", "orbax-checkpoint", "palm_jax", "commit", "dirty", "source", "mesh.data",
        "mesh.fsdp", "device_count", "process_count", "libtpu", "LIBTPU_INIT_ARGS",
        "MEGASCALE", "chips",
    ],
)  # fmt: skip
def test_a_field_that_cannot_is_none(captured, field):
    assert field in captured
    assert environment.differences(captured, {**captured, field: "other"}) == {}


@pytest.mark.parametrize("field", ["mesh.data", "mesh.fsdp", "device_count", "process_count"])
def test_devices_count_where_xla_orders_the_sums(captured, field):
    fast = {**captured, "reduction": "fast"}
    assert environment.differences(fast, {**fast, field: "other"}) == {
        field: (captured[field], "other")
    }


def test_the_processor_counts_on_cpu_only_and_libtpu_on_tpu_only(captured):
    on_tpu = {**captured, "platform": "tpu", "device_kind": "TPU v4", "libtpu": "0.0.42"}
    other_host = {**on_tpu, "cpu_model": "other", "cpu_flags": "other", "NPROC": "1"}
    assert environment.differences(on_tpu, other_host) == {}
    other_library = {**on_tpu, "libtpu": "0.0.50"}
    assert environment.differences(on_tpu, other_library) == {"libtpu": ("0.0.42", "0.0.50")}
    moved = environment.differences(captured, {**other_host, "libtpu": captured["libtpu"]})
    assert {"platform", "device_kind", "cpu_model", "NPROC"} <= moved.keys()


def test_source_digest_covers_names_and_bytes_of_every_module(tmp_path):
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "a.py").write_bytes(b"x = 1\n")
    (package / "room" / "b.py").write_bytes(b"y = 2\n")
    (package / "notes.txt").write_bytes(b"not code")
    seen = {environment.source_digest(package)}
    copy = shutil.copytree(package, tmp_path / "elsewhere")
    (copy / "notes.txt").write_bytes(b"changed")
    (copy / "__pycache__").mkdir()
    assert environment.source_digest(copy) in seen

    def is_new() -> bool:
        before = len(seen)
        seen.add(environment.source_digest(package))
        return len(seen) > before

    (package / "a.py").write_bytes(b"x = 1 \n")
    assert is_new()
    (package / "a.py").rename(package / "c.py")
    assert is_new()
    (package / "c.py").rename(package / "room" / "c.py")
    assert is_new()
    (package / "room" / "c.py").unlink()
    assert is_new()
    (package / "a.py").write_bytes(b"1room/b.pyy = 2\n")
    (package / "room" / "b.py").unlink()
    assert is_new()
    (package / "a.py").write_bytes(b"1")
    (package / "room" / "b.py").write_bytes(b"y = 2\n")
    assert is_new()  # the same text in two files


def git(folder: pathlib.Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *identity, "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_changes_of_the_checkout_that_tracks_the_package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(environment, "_package_folder", lambda: package)
    (package / "errors.py").write_text("x = 1\n")
    nothing = {"commit": None, "dirty": None}
    assert environment._checkout() == nothing  # no repository
    git(tmp_path, "init", "-q")
    assert environment._checkout() == nothing  # no commit
    (tmp_path / "README").write_text("r")
    git(tmp_path, "add", "README")
    git(tmp_path, "commit", "-qm", "m")
    assert environment._checkout() == nothing  # the package is not in it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "m")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert environment._checkout() == {"commit": commit, "dirty": False}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))  # as inside a git hook
    (package / "errors.py").write_text("x = 2\n")
    assert environment._checkout() == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert environment._checkout() == nothing
