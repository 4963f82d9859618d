"""scripts/tpu_vm: what it would run, and what it does with a stand-in for gcloud.

The stand-in writes down its arguments, answers with states from a list, and, where a test asks
for workers, copies and executes in a folder for each node, as ssh would in its home folder.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("scripts/tpu_vm", "scripts/_tpu_worker", "scripts/_environment.bash", "configs/tiny.yaml",
          "pyproject.toml", "constraints.txt", ".gitignore")  # fmt: skip
ZONE = "--zone=us-central2-b"
RESOURCES = f"gcloud compute tpus queued-resources {{}} pod {ZONE}"
TPU_VM = "gcloud compute tpus tpu-vm"
DESCRIBE = RESOURCES.format("describe") + " '--format=value(state.state)'"
CREATE = (
    RESOURCES.format("create")
    + " --accelerator-type=v4-32 --runtime-version=tpu-ubuntu2204-base --node-id=pod"
)
POD = ("create", "pod", "--zone", "us-central2-b", "--accelerator-type", "v4-32")
AWKWARD = ('note=it\'s "one" $HOME `id` \\ & two', "x.y=", "a=*", "b=two\nlines", "c=ü ~ !")

GCLOUD = """
import json, os, pathlib, shutil, subprocess, sys
here, arguments = pathlib.Path(__file__).parents[1], sys.argv[1:]
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
failing = (here / "failing").read_text()
if failing and failing in " ".join(arguments):
    sys.exit("ERROR: quota exceeded")
if arguments[3] == "describe" and "--format=value(state.state)" in arguments:
    print("WARNING: a notice", file=sys.stderr)
    first, *rest = (here / "states").read_text().split()
    (here / "states").write_text(" ".join(rest or [first]))
    if first == "GONE":
        sys.exit("ERROR: (gcloud.compute) NOT_FOUND: Resource 'pod' was not found")
    print(first)
elif arguments[3] == "describe":
    print("state:\\n  failedData: no capacity in this zone")
elif (here / "workers").exists():
    home = here / "workers" / arguments[4 + (arguments[3] == "scp")].rstrip(":")
    home.mkdir(exist_ok=True)
    if arguments[3] == "scp":
        shutil.copy(arguments[4], home)
    elif arguments[3] == "ssh":
        command = arguments[-1].removeprefix("--command=")
        environment = {**os.environ, "HOME": str(home)}
        sys.exit(subprocess.run(["bash", "-c", command], cwd=home, env=environment).returncode)
"""


class Desk:
    """A checkout with one commit, and a PATH on which gcloud is the stand-in."""

    def __init__(self, folder: pathlib.Path, checkout: pathlib.Path | None = None) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        unwanted = ("GIT_", "PALM_JAX_")  # the checks of this project may set the second
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        self.environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        (folder / "bin").mkdir()
        self.program("gcloud", f"#!{sys.executable} -SE\n{GCLOUD}")
        self.program("sleep", '#!/usr/bin/env bash\n[ "$1" = 15 ] || exec /bin/sleep "$1"\n')
        self.answer()
        if checkout:
            shutil.copytree(checkout, self.checkout)
            return
        for name in COPIED:
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.git("init", "--quiet", "--template=")
        self.git("add", ".")
        self.commit()

    def commit(self) -> None:
        self.git(
            *("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"),
            *("commit", "--quiet", "--allow-empty", "-m", "x"),
        )

    def without_gcloud(self) -> None:
        """Nor one that this machine may have."""
        (self.folder / "bin" / "gcloud").unlink()
        for tool in ("bash", "dirname", "env"):
            found = shutil.which(tool)
            assert found is not None
            (self.folder / "bin" / tool).symlink_to(found)
        self.environment["PATH"] = str(self.folder / "bin")

    def program(self, name: str, text: str) -> pathlib.Path:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.checkout, env=self.environment, check=True,
            capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    def answer(self, *states: str, failing: str = "") -> None:
        """The states that `describe` tells, the last for ever, and what gcloud cannot do."""
        (self.folder / "states").write_text(" ".join(states or ["ACTIVE"]))
        (self.folder / "failing").write_text(failing)
        (self.folder / "calls").write_text("")

    def calls(self) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [shlex.join(["gcloud", *json.loads(line)]) for line in lines]

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """Exit code and all output."""
        done = subprocess.run(
            [self.checkout / "scripts" / "tpu_vm", *arguments], cwd=self.folder, input=stdin,
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def dry(self, *arguments: str) -> list[str]:
        code, output = self.run(*arguments, "--dry-run")
        assert code == 0, output
        assert self.calls() == []
        return [line for line in output.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def first_desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture
def desk(tmp_path: pathlib.Path, first_desk: Desk) -> Desk:
    return Desk(tmp_path, first_desk.checkout)


def remote_command(line: str) -> str:
    return shlex.split(line)[-1].removeprefix("--command=")


def workers(desk: Desk) -> pathlib.Path:
    """Nodes that execute: Python only makes a folder, palm-jax waits there for SIGTERM."""
    if not shutil.which("flock"):
        pytest.skip("workers have Linux's flock")
    (desk.folder / "workers").mkdir()
    made = desk.program(
        "made-palm-jax",
        """#!/usr/bin/env bash
        [ "$1" = train ] || exit 0
        trap 'echo saved; exit 4' TERM
        echo "platforms $JAX_PLATFORMS"
        printf '%s\\0' "$@" >"$HOME/arguments"
        for ((i = 0; i < 400; i++)); do /bin/sleep 0.05; done
        """,
    )
    python = desk.program(
        "python-for-tests",
        f"""#!/usr/bin/env bash
        [ "$1" = -c ] && exit 0
        [ "$1" = - ] && echo stamp && exit 0
        [ "$1 $2" = "-m venv" ] || {{ echo "$*" >>"$HOME/installed"; exit 0; }}
        mkdir -p "$3/bin" && cp {made} "$3/bin/palm-jax" && cp "$0" "$3/bin/python"
        """,
    )
    desk.environment["PYTHON"] = str(python)
    return desk.folder / "workers"


# What would be run


def test_create_asks_for_one_slice_and_waits(desk):
    assert desk.dry(*POD) == [CREATE, DESCRIBE]


def test_create_asks_for_several_spot_slices(desk):
    lines = desk.dry(
        "create", "pod", "--zone=us-east5-a", "--accelerator-type=v5litepod-16", "--slices=2",
        "--spot", "--project=lab", "--service-account=a@b.c",
    )  # fmt: skip
    assert lines[0] == (
        "gcloud compute tpus queued-resources create pod --zone=us-east5-a --project=lab"
        " --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite"
        " --node-count=2 --node-prefix=pod --spot --service-account=a@b.c"
    )


@pytest.mark.parametrize(
    ("kind", "given", "runtime"),
    [
        ("v3-8", (), "tpu-ubuntu2204-base"),
        ("v5p-16", (), "v2-alpha-tpuv5"),
        ("v6e-8", (), "v2-alpha-tpuv6e"),
        ("v6e-8", ("--runtime-version", "mine"), "mine"),
    ],
)
def test_runtime_version_is_that_of_the_type_unless_given(desk, kind, given, runtime):
    lines = desk.dry(*POD[:-1], kind, *given)
    assert f" --runtime-version={runtime} " in lines[0]


def test_install_brings_a_bundle_to_every_node(desk):
    lines = desk.dry("install", "pod", ZONE, "--slices", "2", "--setup", "sudo mount a:/b /mnt/b")
    assert lines[:4] == [
        "mkdir -p runs/tpu_vm/pod",
        "git bundle create --quiet runs/tpu_vm/pod/palm_jax.bundle HEAD",
        f"{TPU_VM} scp runs/tpu_vm/pod/palm_jax.bundle pod-0: {ZONE} --worker=all",
        f"{TPU_VM} scp runs/tpu_vm/pod/palm_jax.bundle pod-1: {ZONE} --worker=all",
    ]
    assert [shlex.split(line)[:-1] for line in lines[4:]] == [
        shlex.split(f"{TPU_VM} ssh pod-{node} {ZONE} --worker=all") for node in (0, 1)
    ]
    assert remote_command(lines[4]).endswith(
        " && palm_jax/scripts/_tpu_worker install 'sudo mount a:/b /mnt/b'"
    )


def test_install_names_the_bucket_to_every_worker(desk):
    lines = desk.dry("install", "pod", ZONE, "--bucket", "palm-bucket")
    assert remote_command(lines[-1]).endswith("_tpu_worker install '' palm-bucket")


def test_run_status_tail_and_stop(desk):
    plain = ("run", "pod", "configs/tiny.yaml", "--run=/mnt/r", "steps=5", ZONE)
    ssh = f"{TPU_VM} ssh pod {ZONE} --worker=all '--command=palm_jax/scripts/_tpu_worker"
    assert desk.dry(*plain) == [f"{ssh} run configs/tiny.yaml --run /mnt/r steps=5'"]
    assert desk.dry("status", "pod", ZONE) == [DESCRIBE, f"{ssh} status'"]
    assert desk.dry("stop", "pod", ZONE) == [f"{ssh} stop'"]
    assert desk.dry("tail", "pod", ZONE) == [
        f"{TPU_VM} ssh pod {ZONE} --worker=0 '--command=tail -n 100 -F palm_jax_run/log'"
    ]


def test_delete_in_a_dry_run_does_not_ask(desk):
    assert desk.dry("delete", "pod", ZONE) == [RESOURCES.format("delete") + " --force --quiet"]


def test_dry_run_needs_no_gcloud_and_remembers_nothing(desk):
    desk.without_gcloud()
    desk.dry(*POD)
    assert not (desk.checkout / "runs").exists()


def test_awkward_settings_reach_palm_jax_as_they_were_given(desk):
    """Through a shell twice: as a person pastes the printed line, and as ssh's far end reads it."""
    _, output = desk.run(
        "run", "pod", "configs/tiny.yaml", "--run", "/mnt/a b", *AWKWARD, ZONE, "--dry-run"
    )
    program = 'gcloud() { local last=${*: -1}; bash -c "${last#--command=}"; }\n'
    worker = desk.folder / "palm_jax" / "scripts" / "_tpu_worker"
    worker.parent.mkdir(parents=True)
    worker.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    worker.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", program + output], cwd=desk.folder, capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == [
        "run", "configs/tiny.yaml", "--run", "/mnt/a b", *AWKWARD,
    ]  # fmt: skip


# With a stand-in for gcloud


def test_create_prints_each_state_once_until_active(desk):
    desk.answer("WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    code, output = desk.run(*POD)
    assert code == 0
    assert output.splitlines() == [
        "== pod is WAITING_FOR_RESOURCES",
        "== pod is PROVISIONING",
        "== pod is ACTIVE",
    ]
    assert desk.calls() == [CREATE, *[DESCRIBE] * 4]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_create_that_cannot_succeed_ends_with_what_gcloud_says(desk, state):
    desk.answer("PROVISIONING", state)
    code, output = desk.run(*POD)
    assert code == 3
    assert "no capacity in this zone" in output
    assert f"error: pod is {state}" in output


def test_refusal_of_gcloud_is_passed_on(desk):
    desk.answer(failing="create")
    code, output = desk.run(*POD)
    assert code == 3
    assert "ERROR: quota exceeded" in output
    desk.answer(failing="describe")
    code, output = desk.run("status", "pod")
    assert code == 3
    assert "ERROR: quota exceeded" in output


def test_name_is_enough_once_it_was_created_here(desk):
    desk.run("create", "pod", "--zone=us-east5-a", "--accelerator-type=v6e-8", "--slices=2")
    desk.answer()
    assert desk.run("stop", "pod")[0] == 0
    assert sorted(call.split()[5] for call in desk.calls()) == ["pod-0", "pod-1"]
    assert all("--zone=us-east5-a" in call for call in desk.calls())


def test_one_failing_slice_fails_the_command(desk):
    desk.answer(failing="pod-1")
    code, output = desk.run("stop", "pod", ZONE, "--slices=3")
    assert code == 3
    assert "not all workers of pod" in output
    assert len(desk.calls()) == 3


def test_status_of_what_is_gone_asks_no_worker(desk):
    desk.answer("GONE")
    code, output = desk.run("status", "pod", ZONE)
    assert (code, output) == (0, "== pod is GONE\n")
    assert len(desk.calls()) == 1


@pytest.mark.parametrize("change", ["edited", "new"])
def test_only_a_commit_can_be_installed(desk, change):
    name = {"edited": "configs/tiny.yaml", "new": "configs/mine.yaml"}[change]
    (desk.checkout / name).write_text("steps: 1\n")
    code, output = desk.run("install", "pod", ZONE)
    assert (code, desk.calls()) == (3, [])
    assert name in output


@pytest.mark.parametrize(
    ("answer", "code", "deleted"), [("y\n", 0, True), ("n\n", 2, False), ("", 2, False)]
)
def test_delete_asks_first(desk, answer, code, deleted):
    assert desk.run("delete", "pod", ZONE, stdin=answer)[0] == code
    assert bool(desk.calls()) is deleted


@pytest.mark.parametrize("before", ["SUSPENDED", "FAILED", "GONE"])
def test_resume_repeats_what_was_given(desk, before):
    run = ("run", "pod", "configs/tiny.yaml", "--run", "/mnt/a b", *AWKWARD)
    for arguments in (POD, ("install", "pod", "--setup", "mount 'it'"), run):
        assert desk.run(*arguments)[0] == 0
    first = desk.calls()
    commit = desk.git("rev-parse", "HEAD")
    desk.commit()
    desk.answer(before, "PROVISIONING", "ACTIVE")
    code, output = desk.run("resume", "pod")
    assert code == 0, output
    deletion = [RESOURCES.format("delete") + " --force --quiet"] * (before != "GONE")
    assert desk.calls() == [DESCRIBE, *deletion, CREATE, DESCRIBE, DESCRIBE, *first[2:]]
    # The commit of the first installation, not of now.
    heads = desk.git("bundle", "list-heads", "runs/tpu_vm/pod/palm_jax.bundle")
    assert heads == f"{commit} HEAD"


def test_resume_in_an_unclear_state_deletes_nothing(desk):
    for arguments in (
        POD, ("install", "pod"), ("run", "pod", "configs/tiny.yaml", "--run=/mnt/r"),
    ):  # fmt: skip
        desk.run(*arguments)
    desk.answer("SUSPENDING")
    code, output = desk.run("resume", "pod")
    assert code == 3
    assert "pod is SUSPENDING" in output
    assert not [call for call in desk.calls() if "delete" in call or " ssh " in call]


def test_resume_of_what_was_never_run_says_what_to_do(desk):
    desk.run(*POD)
    desk.answer("SUSPENDED")
    code, output = desk.run("resume", "pod")
    assert (code, desk.calls()) == (2, [])
    assert "create, install and run" in output


# On workers


def test_run_lives_from_run_to_stop_and_is_alone(desk):
    homes = workers(desk)
    desk.run(*POD, "--slices=2")
    code, output = desk.run("install", "pod", "--setup", "touch mounted")
    assert code == 0, output
    assert output.count("installed") == 2
    run = ("run", "pod", "configs/tiny.yaml", "--run=/mnt/r", *AWKWARD)
    code, output = desk.run(*run)
    assert code == 0, output
    assert desk.run("status", "pod")[1].count("the run is alive") == 2
    for again in (run, ("install", "pod")):
        code, output = desk.run(*again)
        assert code == 3
        assert output.count("a run is alive here") == 2
    code, output = desk.run("stop", "pod")
    assert code == 0, output
    assert output.count("the run has ended with exit code 4") == 2
    for home in (homes / "pod-0", homes / "pod-1"):
        assert (home / "mounted").exists()
        assert "-c constraints.txt -e .[tpu]" in (home / "installed").read_text()
        assert (home / "arguments").read_text().split("\0")[:-1] == [
            "train", "configs/tiny.yaml", "--run", "/mnt/r", *AWKWARD,
        ]  # fmt: skip
        assert (home / "palm_jax_run/log").read_text() == "platforms tpu,cpu\nsaved\n"
        commit = (home / "palm_jax/.git/HEAD").read_text().strip()
        assert commit == desk.git("rev-parse", "HEAD")
    # Stopping what has stopped, and running once more.
    assert desk.run("stop", "pod")[0] == 0
    assert desk.run(*run)[0] == 0
    assert desk.run("stop", "pod")[1].count("exit code 4") == 2


def bucket_tools(desk: Desk, gcsfuse: str | None) -> None:
    """Stand-ins for what mounts a bucket; a file of the worker says whether one is mounted."""
    desk.program("sudo", '#!/usr/bin/env bash\necho "sudo $*" >>"$HOME/mounting"\n')
    desk.program("mountpoint", '#!/usr/bin/env bash\n[ -e "$HOME/is_mounted" ]\n')
    if gcsfuse is not None:
        desk.program(
            "gcsfuse", f'#!/usr/bin/env bash\necho "gcsfuse $*" >>"$HOME/mounting"\n{gcsfuse}\n'
        )


def test_bucket_is_mounted_once_on_every_worker_so_that_a_run_can_live_there(desk):
    homes = workers(desk)
    bucket_tools(desk, 'touch "$HOME/is_mounted"')
    desk.run(*POD, "--slices=2")
    for _ in range(2):
        code, output = desk.run("install", "pod", "--bucket=palm-bucket")
        assert code == 0, output
    for home in (homes / "pod-0", homes / "pod-1"):
        commands = (home / "mounting").read_text().splitlines()
        assert commands[0] == "sudo mkdir -p /mnt/palm-bucket"
        assert commands[1] == f"sudo chown {os.getuid()}:{os.getgid()} /mnt/palm-bucket"
        mount, *more = commands[2:]
        assert more == []  # not again where it is mounted
        assert mount.startswith("gcsfuse --")
        assert mount.endswith(" palm-bucket /mnt/palm-bucket")
        # Without them fsync would save nothing of a file that is still open, and one worker
        # would not see what another wrote.
        for option in ("--enable-streaming-writes=false", "--metadata-cache-ttl-secs=0"):
            assert option in mount.split()


def test_bucket_that_cannot_be_mounted_ends_the_installation(desk):
    homes = workers(desk)
    bucket_tools(desk, "exit 1")
    desk.run(*POD)
    code, output = desk.run("install", "pod", "--bucket=palm-bucket")
    assert code == 3
    assert "did not mount palm-bucket" in output
    assert not (homes / "pod" / "installed").exists()


def test_missing_gcsfuse_is_said(desk):
    if shutil.which("gcsfuse"):
        pytest.skip("this machine has gcsfuse")
    workers(desk)
    bucket_tools(desk, None)
    desk.run(*POD)
    code, output = desk.run("install", "pod", "--bucket=palm-bucket")
    assert code == 3
    assert "needs gcsfuse" in output


def test_stop_that_is_repeated_signals_once(desk):
    """gcloud repeats a command whose connection broke; a second signal would skip the save."""
    home = workers(desk) / "pod"
    desk.run(*POD)
    desk.run("install", "pod")
    assert desk.run("run", "pod", "configs/tiny.yaml", "--run=/mnt/r")[0] == 0
    (home / "palm_jax_run/asked_to_stop").touch()
    process = int((home / "palm_jax_run/process").read_text())
    stopping = subprocess.Popen(
        [desk.checkout / "scripts/tpu_vm", "stop", "pod"], env=desk.environment,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with pytest.raises(subprocess.TimeoutExpired):
        stopping.wait(0.5)
    os.kill(process, signal.SIGTERM)
    assert stopping.wait(10) == 0
    assert (home / "palm_jax_run/log").read_text().count("saved") == 1


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "subcommand is missing"),
        (("destroy", "pod"), "no subcommand destroy"),
        (("stop",), "NAME"),
        (("stop", "Pod_1", ZONE), "NAME Pod_1"),
        (("stop", "pod"), "--zone is missing"),
        (("stop", "pod", "--zone"), "--zone needs a value"),
        (("stop", "pod", "--zone", "us central"), "--zone us central"),
        (("stop", "pod", ZONE, "now"), "stop does not take now"),
        (("stop", "pod", ZONE, "--spot"), "no option --spot"),
        (("stop", "pod", ZONE, "--slices=0"), "--slices 0"),
        (("stop", "pod", ZONE, "--project", "my project"), "--project my project"),
        (("create", "pod", ZONE), "--accelerator-type"),
        (("create", "pod", ZONE, "--accelerator-type=v4"), "--accelerator-type v4"),
        (("create", "pod", ZONE, "--accelerator-type=v3-8", "--slices=2"), "only one for v3-8"),
        (("create", "pod", ZONE, "--accelerator-type=v9-8"), "--runtime-version is missing"),
        (("install", "pod", ZONE, "--bucket=gs://palm"), "--bucket gs://palm"),
        (("run", "pod", ZONE), "CONFIG is missing"),
        (("run", "pod", ZONE, "configs/none.yaml"), "CONFIG configs/none.yaml"),
        (("run", "pod", ZONE, "configs/tiny.yaml"), "--run"),
        (("run", "pod", ZONE, "configs/tiny.yaml", "--run=runs/r"), "--run runs/r"),
        (("run", "pod", ZONE, "configs/tiny.yaml", "--run=/r", "5"), "the setting 5"),
        (("resume", "pod", ZONE), "no option --zone"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_done(desk, arguments, said):
    code, output = desk.run(*arguments)
    assert code == 2
    assert output.startswith("error: ")
    assert said in output
    assert desk.calls() == []
    assert not (desk.checkout / "runs").exists()


def test_missing_gcloud_is_said(desk):
    desk.without_gcloud()
    code, output = desk.run("stop", "pod", ZONE)
    assert code == 3
    assert output.startswith("error: gcloud is not on the PATH")


def test_help_names_every_subcommand(desk):
    code, output = desk.run("--help")
    assert code == 0
    for subcommand in ("create", "install", "run", "tail", "status", "resume", "stop", "delete"):
        assert f"  scripts/tpu_vm {subcommand} NAME" in output
    assert desk.run("create", "--help") == (code, output)
