"""What the doctor calls wrong, from answers as machines give them; and that it always answers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest
import yaml

from palm_jax import config, doctor, errors, probe
from palm_jax.record import lock

ROOT = pathlib.Path(__file__).parents[1]
SET_BY_CONFTEST = ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")
GIB = 2**30
# 8.6 billion parameters: 96 GiB of them and of two moments.
LARGE = config.load(ROOT / "configs" / "palm_8b.yaml")
SMALL = config.from_dict(doctor.SMALLEST)

DEVICES = {
    "seconds": 4.0,
    "platform": "tpu",
    "kind": "TPU v4",
    "count": 8,
    "local_count": 4,
    "processes": 2,
    "process": 0,
    "memory": 30 * GIB,
    "mesh": {"shape": {"data": 1, "fsdp": 8, "tensor": 1}, "problem": None},
    "clocks": {"spread": 0.01, "uncertain": 0.002},
}
DISK = {"folder": "/r", "free": 900 * GIB, "mount": "/", "kind": "ext4", "problem": None}


def only(findings: list[doctor.Finding], check: str) -> doctor.Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def test_devices_are_told_with_their_mesh_and_clocks():
    findings = doctor.devices(DEVICES, 120)
    assert [(f.check, f.status) for f in findings] == [
        ("devices", "ok"),
        ("mesh", "ok"),
        ("clocks", "ok"),
    ]
    for words in ("8 x TPU v4", "30.0 GiB each", "4 of them here", "2 processes"):
        assert words in findings[0].found


def test_mesh_that_does_not_fit_is_wrong():
    answer = {**DEVICES, "mesh": {"shape": None, "problem": "9 devices, but there are 8"}}
    found = only(doctor.devices(answer, 120), "mesh")
    assert (found.status, found.found) == ("wrong", "9 devices, but there are 8")
    assert "mesh.fsdp" in found.remedy


@pytest.mark.parametrize(
    ("spread", "uncertain", "status"),
    [(1.5, 0.1, "warning"), (0.5, 0.1, "ok"), (1.5, 1.0, "ok")],
)
def test_clocks_apart_are_a_warning_as_far_as_one_can_tell(spread, uncertain, status):
    answer = {**DEVICES, "clocks": {"spread": spread, "uncertain": uncertain}}
    assert only(doctor.devices(answer, 120), "clocks").status == status


def test_devices_that_do_not_start_are_wrong():
    (found,) = doctor.devices(errors.CannotDo("no answer within 120 seconds"), 120)
    assert found.status == "wrong"
    assert "no answer within 120 seconds" in found.found
    assert "other process" in found.remedy


@pytest.mark.parametrize(
    ("free", "status"), [(90 * GIB, "wrong"), (600 * GIB, "warning"), (700 * GIB, "ok")]
)
def test_disk_must_hold_a_checkpoint_and_should_hold_all_that_are_kept(free, status):
    assert LARGE.checkpoint.keep_last + LARGE.checkpoint.keep_best == 6
    found = doctor.disk({**DISK, "free": free}, LARGE)
    assert found.status == status
    assert "a checkpoint takes 96.5 GiB, and 6 are kept" in found.found


@pytest.mark.parametrize("kind", ["fuse.gcsfuse", "fuse"])
def test_mounted_bucket_is_warned_of(kind):
    found = doctor.disk({**DISK, "kind": kind, "mount": "/bucket"}, SMALL)
    assert found.status == "warning"
    for words in ("/bucket", kind, "hierarchical namespace", "locks hold on this machine alone"):
        assert words in found.found
    broken = doctor.disk({**DISK, "kind": kind, "problem": "cannot be used"}, SMALL)
    assert broken.status == "wrong"
    assert "hierarchical namespace" in broken.remedy


def test_network_disk_is_warned_of():
    assert doctor.disk({**DISK, "kind": "nfs4"}, None).status == "warning"


def test_cache_that_cannot_be_written_is_a_warning():
    assert doctor.cache({**DISK, "problem": "/c cannot be written to"}).status == "warning"
    assert doctor.cache({**DISK, "free": GIB // 2}).status == "warning"
    assert doctor.cache(DISK).status == "ok"


@pytest.mark.parametrize(
    ("platform", "count", "status"), [("tpu", 2, "wrong"), ("tpu", 4, "warning"), ("tpu", 8, "ok")]
)
def test_train_state_is_compared_with_the_memory_of_the_devices(platform, count, status):
    answer = {**DEVICES, "platform": platform, "count": count}
    assert doctor.memory(LARGE, answer).status == status  # 96 GiB of 60, 120 and 240


def test_replicas_hold_the_state_once_more():
    settings = config.override(LARGE, ["mesh.data=4"])
    assert doctor.memory(settings, {**DEVICES, "count": 8}).status == "wrong"


def test_variables_that_decide_about_bits_are_told():
    environ = {"NPROC": "4", "XLA_FLAGS": " --xla_cpu_enable_fast_math=true "}
    by_check = {f.check: f for f in doctor.variables(SMALL, environ)}
    assert [f.status for f in by_check.values()] == ["warning", "warning", "ok"]
    assert "NPROC=4 is ignored" in by_check["threads"].found
    assert by_check["XLA_FLAGS"].found == "--xla_cpu_enable_fast_math=true"
    assert {f.status for f in doctor.variables(None, {"NPROC": "8"})} == {"ok"}


def test_tested_versions_are_those_of_this_python():
    tested = doctor.tested_versions()
    text = (ROOT / "constraints.txt").read_text()
    old = re.search(r'^jax==(\S+); python_version < "3.12"', text, re.M)[1]
    new = re.search(r'^jax==(\S+); python_version >= "3.12"', text, re.M)[1]
    assert tested["jax"] == (old if sys.version_info < (3, 12) else new)
    assert tested["optax"] == re.search(r"^optax==(\S+)", text, re.M)[1]


def test_untested_and_missing_packages_are_found(monkeypatch):
    installed = {name: "1.0" for name in doctor.PACKAGES if name not in ("libtpu", "grain")}

    def version(name: str) -> str:
        if name not in installed:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    findings = doctor.packages({**installed, "jax": "2.0"})
    assert [(f.check, f.status) for f in findings] == [
        ("packages", "ok"),
        ("jax", "warning"),
        ("grain", "wrong"),
    ]
    assert findings[1].found == "1.0; tested with 2.0"
    assert "no libtpu" in findings[0].found
    assert "no constraints.txt" in doctor.packages(None)[0].found


def test_python_that_was_not_tested_is_a_warning():
    assert doctor.python("3.12.4").status == "ok"
    assert doctor.python("3.14.0").status == "warning"


def test_memory_is_what_the_kernel_says():
    total, available = doctor.host_memory()
    assert 0 < available <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- questions to a process of its own ---


def test_file_system_is_that_of_the_nearest_mount():
    mounts = [("/", "ext4"), ("/mnt/a", "nfs4"), ("/mnt/a/b", "tmpfs"), ("/mnt/a", "fuse.gcsfuse")]

    def kind(path: str) -> str | None:
        return probe.file_system(pathlib.Path(path), mounts)[1]

    assert kind("/mnt/a/b/c") == "tmpfs"
    assert kind("/mnt/a") == kind("/mnt/a/x") == "fuse.gcsfuse"  # mounted over the first
    assert kind("/mnt/ab") == kind("/") == "ext4"
    assert probe.file_system(pathlib.Path("/x"), []) == (None, None)


def test_good_disk_has_no_problem_and_nothing_stays_on_it(tmp_path):
    answer = probe.place(str(tmp_path / "not" / "yet"))
    assert answer["problem"] is None
    assert answer["folder"] == str(tmp_path)
    assert answer["free"] > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_grants_a_lock_twice_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "held", lambda run: contextlib.nullcontext())
    problem = probe.place(str(tmp_path))["problem"]
    assert "cannot be locked" in problem
    assert "granted as well" in problem


def test_disk_that_refuses_locks_is_found(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    assert "cannot be locked" in probe.place(str(tmp_path))["problem"]


def test_disk_that_cannot_rename_folders_is_found(tmp_path, monkeypatch):
    def refuse(path: pathlib.Path, target: pathlib.Path) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as gcsfuse does

    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    assert "cannot be renamed" in probe.place(str(tmp_path))["problem"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def as_a_person(monkeypatch):
    """Processes started here see the variables that a person's would."""
    for name in SET_BY_CONFTEST:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_question_without_an_answer_is_given_up(tmp_path, as_a_person):
    # Reading a pipe into which nobody writes does not end.
    os.mkfifo(tmp_path / "manifest.json")
    settings = {**doctor.SMALLEST, "data": {"corpus": str(tmp_path), "ramp": {"sizes": [8]}}}
    began = time.monotonic()
    with pytest.raises(errors.CannotDo) as caught:
        probe.ask("corpus", 1.5, settings=settings)
    assert str(caught.value) == "no answer within 1.5 seconds"
    assert time.monotonic() - began < 6
    # Its process is gone: nobody waits to open the pipe any more.
    with pytest.raises(OSError, match="No such device or address"):
        os.open(tmp_path / "manifest.json", os.O_WRONLY | os.O_NONBLOCK)


def test_flag_that_xla_does_not_know_is_named(as_a_person, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(errors.CannotDo) as caught:
        probe.ask("devices", 60, settings=doctor.SMALLEST, with_mesh=False)
    assert str(caught.value).startswith("Unknown flag in XLA_FLAGS: --xla_no_such_flag=1 (")


def test_wrong_description_of_processes_is_told(as_a_person, monkeypatch):
    monkeypatch.setenv("PALM_JAX_NUM_PROCESSES", "abc")
    with pytest.raises(errors.CannotDo, match="not JAX_COORDINATOR_ADDRESS"):
        probe.ask("devices", 60, settings=doctor.SMALLEST, with_mesh=False)


# --- the command ---


def command(*arguments: object, cwd: pathlib.Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "palm_jax.cli", "doctor", *map(str, arguments)],
        cwd=cwd,
        env={
            **{k: v for k, v in os.environ.items() if k not in SET_BY_CONFTEST},
            "PYTHONPATH": str(ROOT),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_machine_is_looked_over_for_a_config(tmp_path, corpus_folder):
    model = {**doctor.SMALLEST["model"], "width": 16}
    settings = {**doctor.SMALLEST, "model": model, "data": {"corpus": str(corpus_folder)}}
    settings["data"]["ramp"] = {"sizes": [8]}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    mesh = ("mesh.fsdp=2", "mesh.data=2", "mesh.emulated_devices=4")
    done = command("small.yaml", *mesh, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["ok"] is True
    by_check = {finding["check"]: finding for finding in said["findings"]}
    assert by_check["devices"]["found"].startswith("4 x cpu")
    assert by_check["mesh"]["found"] == "data 2 x fsdp 2 x tensor 1"
    digest = json.loads((corpus_folder / "manifest.json").read_text())["digest"]
    assert digest[:16] in by_check["corpus"]["found"]
    assert by_check.keys() >= {
        *("python", "packages", "disk", "compile cache", "gcloud", "threads", "XLA_FLAGS", "memory")
    }
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_what_is_wrong_is_told_with_a_remedy(tmp_path):
    settings = {**doctor.SMALLEST, "data": {"corpus": "gs://b/c", "ramp": {"sizes": [8]}}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    done = command("small.yaml", "mesh.fsdp=8", "--run", "gs://bucket/run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    # A finding, and the indented lines that belong to it.
    wrong = re.findall(r"^wrong .*\n(?: .*\n)*", done.stdout, re.M)
    assert [text.split()[1] for text in wrong] == ["mesh", "disk", "corpus"]
    assert "gs://bucket/run is a URL" in wrong[1]
    assert all("-> " in text for text in wrong)
    assert "gcsfuse" in wrong[1]
    assert done.stdout.splitlines()[-1].startswith("3 wrong, ")


def test_setting_without_a_config_is_wrong_input(tmp_path):
    done = command("mesh.fsdp=8", cwd=tmp_path)
    assert done.returncode == 2
    assert "name a config file" in done.stderr


@pytest.mark.slow
def test_clocks_of_two_processes_are_compared(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"

    def one(index: int) -> subprocess.CompletedProcess:
        return command(
            "--json",
            cwd=tmp_path,
            JAX_PLATFORMS="cpu",
            JAX_COORDINATOR_ADDRESS=address,
            PALM_JAX_NUM_PROCESSES="2",
            PALM_JAX_PROCESS_ID=str(index),
        )

    with concurrent.futures.ThreadPoolExecutor() as both:
        for done in both.map(one, range(2)):
            assert done.returncode == 0, done.stdout + done.stderr
            findings = json.loads(done.stdout)["findings"]
            by_check = {finding["check"]: finding["found"] for finding in findings}
            assert "2 processes" in by_check["devices"]
            # It is one clock.
            apart, unsure = map(float, re.findall(r"([\d.]+) s", by_check["clocks"]))
            assert apart <= unsure + 0.2
