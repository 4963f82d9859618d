"""The scripts, run with a stand-in for Python's `venv`, so that nothing is installed."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = [ROOT / "scripts" / "quickstart", ROOT / "scripts" / "test", ROOT / ".ci" / "run"]


class Sandbox:
    """A folder with a Python whose environments only write down what they are asked to do."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.log = folder / "log"
        self.failing = folder / "failing"  # a word: commands that hold it fail
        made = folder / "made-python"
        self._program(
            made,
            f"""
            [ "$1" = -c ] && exit 0
            echo "$*" >>{self.log}
            [ -e {self.failing} ] || exit 0
            case "$*" in *"$(cat {self.failing})"*) exit 1 ;; esac
            """,
        )
        self.python = folder / "python-for-tests"
        self._program(
            self.python,
            f"""
            [ "$1 $2" = "-m venv" ] || exec {shlex.quote(sys.executable)} "$@"
            echo "make $3" >>{self.log}
            mkdir -p "$3/bin" && cp {made} "$3/bin/python" && cp {made} "$3/bin/palm-jax"
            """,
        )

    @staticmethod
    def _program(path: pathlib.Path, body: str) -> None:
        path.write_text("#!/usr/bin/env bash\n" + body)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
        """Exit code, all output, and the lines logged by this call."""
        self.log.write_text("")
        done = subprocess.run(
            [ROOT / script, *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHON": str(self.python),
                "PALM_JAX_VENV": str(self.venv),
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, self.log.read_text().splitlines()


@pytest.fixture
def sandbox(tmp_path: pathlib.Path) -> Sandbox:
    return Sandbox(tmp_path)


def installs(lines: list[str]) -> list[str]:
    return [line.rpartition(" -e ")[2] for line in lines if line.startswith("-m pip install")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_first_call_makes_the_environment_and_the_second_reuses_it(sandbox):
    code, output, lines = sandbox.run("scripts/test")
    assert code == 0
    assert lines[0] == f"make {sandbox.venv}"
    assert "-c constraints.txt" in lines[1]
    assert installs(lines) == [".[dev]"]
    assert "Making" in output
    assert "Installing" in output
    code, output, lines = sandbox.run("scripts/test")
    assert code == 0
    assert not [line for line in lines if line.startswith("make")]
    assert installs(lines) == []
    assert "Installing" not in output


def test_checks_run_in_order_and_pytest_gets_the_arguments(sandbox):
    _, _, lines = sandbox.run("scripts/test", "-k", "one or two", "-x")
    assert lines[-4:] == [
        "-m ruff format --check",
        "-m ruff check",
        "-m mypy palm_jax",
        "-m pytest -n 2 --dist loadfile -k one or two -x",
    ]


def test_checks_stop_at_the_first_that_fails(sandbox):
    sandbox.failing.write_text("mypy")
    code, _, lines = sandbox.run("scripts/test")
    assert code == 1
    assert lines[-1] == "-m mypy palm_jax"


def test_tools_for_development_are_added_to_the_environment_of_the_quickstart(sandbox):
    assert installs(sandbox.run("scripts/quickstart")[2]) == ["."]
    lines = sandbox.run("scripts/test")[2]
    assert installs(lines) == [".[dev]"]
    assert not [line for line in lines if line.startswith("make")]
    assert installs(sandbox.run("scripts/quickstart")[2]) == []
    assert installs(sandbox.run("scripts/test")[2]) == []


def test_failed_installation_is_reported_and_redone(sandbox):
    sandbox.failing.write_text("pip")
    code, output, lines = sandbox.run("scripts/quickstart")
    assert code == 3
    assert "the installation into" in output
    assert "-m pip install" in lines[-1]
    sandbox.failing.unlink()
    code, _, lines = sandbox.run("scripts/quickstart")
    assert code == 0
    assert lines[0] == f"make {sandbox.venv}"
    assert installs(lines) == ["."]


def test_environment_for_other_versions_is_made_anew(sandbox):
    sandbox.run("scripts/quickstart")
    stamp = sandbox.venv / "palm_jax_stamp"
    stamp.write_text("0" * 64 + " \n")
    left_over = sandbox.venv / "left-over"
    left_over.touch()
    _, output, lines = sandbox.run("scripts/quickstart")
    assert lines[0] == f"make {sandbox.venv}"
    assert not left_over.exists()
    assert "Removing" in output


def test_environment_whose_python_is_gone_is_made_anew(sandbox):
    sandbox.run("scripts/quickstart")
    (sandbox.venv / "bin" / "python").unlink()
    assert sandbox.run("scripts/quickstart")[2][0] == f"make {sandbox.venv}"


def test_folder_that_the_scripts_did_not_make_is_left_alone(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.tex").write_text("irreplaceable")
    code, output, lines = sandbox.run("scripts/test")
    assert (code, lines) == (3, [])
    assert str(sandbox.venv) in output
    assert [path.name for path in sandbox.venv.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("script", ["scripts/test", "scripts/quickstart", ".ci/run"])
def test_chosen_python_that_does_not_run_is_an_error_and_not_replaced(sandbox, script):
    code, output, lines = sandbox.run(script, PYTHON="/nowhere/python")
    assert (code, lines) == (3, [])
    assert "PYTHON=/nowhere/python" in output
    assert not sandbox.venv.exists()


def found_python(path: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    return subprocess.run(
        ["bash", "-c", 'set -euo pipefail; source "$0"; find_python; echo "$python"',
         ROOT / "scripts" / "_environment.bash"],
        env={**environment, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_python_that_is_on_the_path_but_does_not_run_is_passed_over(sandbox):
    (sandbox.folder / "bin").mkdir()
    Sandbox._program(sandbox.folder / "bin" / "python3.13", "exit 127")
    # An older one under a newer name: runs, but says no to the check.
    Sandbox._program(sandbox.folder / "bin" / "python3.12", "exit 1")
    (sandbox.folder / "bin" / "python3.11").symlink_to(sandbox.python)
    assert found_python(f"{sandbox.folder / 'bin'}:{os.environ['PATH']}").stdout == "python3.11\n"


def test_no_python_at_all_is_an_error_that_says_what_to_do(sandbox):
    binaries = sandbox.folder / "bin"
    binaries.mkdir()
    for tool in ("bash", "dirname"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True)
        (binaries / tool).symlink_to(found.stdout.strip())
    done = found_python(str(binaries))
    assert done.returncode == 3
    assert "PYTHON=..." in done.stderr


def test_quickstart_prepares_trains_and_says_what_is_next(sandbox):
    code, output, lines = sandbox.run("scripts/quickstart", "steps=5")
    assert code == 0
    assert lines[-2].startswith("data prepare --source stdlib --held-out 0.05 ")
    assert lines[-2].endswith("--sequence-length 256 --out runs/corpus")
    assert lines[-1] == "train configs/quickstart.yaml steps=5 --run runs/quickstart"
    assert "runs/quickstart --step" in output


def test_quickstart_ends_by_replaying_its_own_steps(sandbox):
    code, output, lines = sandbox.run("scripts/quickstart")
    assert code == 0
    assert lines[-1] == "replay runs/quickstart --steps 160:180"
    assert "Done" in output


def test_quickstart_stops_where_a_command_fails(sandbox):
    sandbox.failing.write_text("data prepare")
    code, output, lines = sandbox.run("scripts/quickstart")
    assert code == 1
    assert lines[-1].startswith("data prepare")
    assert "Done" not in output


@pytest.mark.parametrize("script", ["scripts/test", "scripts/quickstart"])
def test_help_says_what_a_script_does_and_does_nothing(sandbox, script):
    code, output, lines = sandbox.run(script, "--help")
    assert (code, lines) == (0, [])
    assert f"  {script} [" in output
    assert "#" not in output
    assert "set -e" not in output


def test_ci_uses_a_new_environment_and_removes_it(sandbox):
    sandbox.run("scripts/test")
    code, _, lines = sandbox.run(".ci/run")
    assert code == 0
    made = pathlib.Path(lines[0].removeprefix("make "))
    assert made != sandbox.venv
    assert not made.exists()
    assert sandbox.venv.exists()
    quick, slow, apart = lines[-3:]
    assert quick == "-m pytest -n 2 --dist loadfile"
    # Every slow test once.
    assert slow.startswith("-m pytest -m slow ")
    assert slow.endswith(" --ignore=tests/supervise tests/tpu tests")
    assert apart.startswith("-m pytest -m slow ")
    assert apart.endswith(" tests/supervise")


def test_ci_fails_when_a_slow_test_does(sandbox):
    sandbox.failing.write_text("-m slow")
    assert sandbox.run(".ci/run")[0] == 1


# Versions


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pins_are_exact_and_name_no_package_twice_for_one_python():
    assert all(re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)) for pin in pins())
    for version in ("3.11", "3.12", "3.13"):
        environment = {"python_version": version}
        names = [
            canonicalize_name(pin.name)
            for pin in pins()
            if pin.marker is None or pin.marker.evaluate(environment)
        ]
        assert len(names) == len(set(names))
        assert names == sorted(names[: names.index("zipp") + 1]) + names[names.index("zipp") + 1 :]


def test_everything_that_gets_installed_is_pinned_to_what_is_installed():
    """Walks from pyproject.toml through what the installed packages say they need."""
    pinned = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins()
        if pin.marker is None or pin.marker.evaluate()
    }
    waiting = [
        Requirement(text)
        for text in project()["dependencies"] + project()["optional-dependencies"]["dev"]
    ]
    seen: set[tuple[str, str]] = set()
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        assert name in pinned, f"constraints.txt lacks {name}"
        try:
            assert importlib.metadata.version(name) == pinned[name]
        except importlib.metadata.PackageNotFoundError:
            continue  # a tool that an environment without `dev` lacks
        for extra in ("", *needed.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in importlib.metadata.requires(name) or []:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)


def test_libtpu_is_one_that_the_pinned_jax_asks_for():
    (asked,) = [
        Requirement(text)
        for text in importlib.metadata.requires("jax") or []
        if text.startswith("libtpu")
    ]
    (pin,) = [
        pin
        for pin in pins()
        if pin.name == "libtpu" and (pin.marker is None or pin.marker.evaluate())
    ]
    assert asked.specifier.contains(str(pin.specifier).removeprefix("=="))


def test_no_package_registry_is_named():
    for name in ("pyproject.toml", "constraints.txt", "scripts/_environment.bash"):
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text())


def test_version_is_read_without_importing_jax():
    program = "import sys, palm_jax; print(palm_jax.__version__); sys.exit('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)
