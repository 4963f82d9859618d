"""Whole commands on files from somebody else: a message and exit code 2 or 3, or a result."""

from __future__ import annotations

import io
import json
import pathlib
import sys

import hypothesis
import hypothesis.strategies as st
import mutations
import pytest
import runs_of_others
from corpus import corpora
from report import books

from palm_jax import cli, config
from palm_jax.corpus import prepare
from palm_jax.errors import WrongInput
from palm_jax.tpu import topologies


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A run, its corpus (whose documents have names of any bytes), and a config."""
    folder = tmp_path_factory.mktemp("commands")
    run = runs_of_others.made(folder / "run")
    for number in range(6):
        name = folder / "text" / f"{number}\udcff\x1b.txt"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(corpora.document("train", 90 + number, salt=number))
    (folder / "text" / "held_out").write_bytes(corpora.document("held_out", 40))
    made = prepare.prepare(
        source=f"text:{folder}/text/*",
        out=folder / "corpus",
        sequence_length=8,
        held_out=corpora.HELD_OUT,
    )
    (run / "manifest.json").write_text(made.model_dump_json())
    settings = books.SETTINGS | {"data": {"corpus": str(folder / "corpus"), "ramp": {"sizes": [8]}}}
    (run / "config.yaml").write_text(config.to_yaml(config.from_dict(settings)))
    return folder


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, both of which take ASCII alone."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace") for _ in range(2))
    out.reconfigure(errors="strict")
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["palm-jax", *map(str, arguments)], out, err
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = 0 if end.code is None else int(end.code)
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    for stream in (out, err):
        stream.flush()
    said, complaint = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert "Traceback" not in complaint, complaint
    return code, said, complaint


COMMANDS = (
    ("data", "show", "RUN", "--step", "25"),
    ("data", "show", "RUN", "--step", "9" * 20, "--json"),
    ("data", "scan", "RUN", "--steps", "20:24", "--like", runs_of_others.ONSET, "--segment", "0"),
    ("logbook", "RUN"),
    ("logbook", "RUN", "--json"),
    ("report", "RUN", "--out", "OUT", "--json"),
    ("spikes", "list", "RUN", "--json"),
    ("spikes", "list", "RUN"),
    ("branch", "list", "RUN"),
    ("branch", "show", "RUN", "cure"),
    ("train", "RUN/config.yaml", "--dry-run"),
)


def arguments_of(command: tuple[object, ...], place: pathlib.Path) -> list[str]:
    run, out = str(place / "run"), str(place / "report.html")
    return [str(part).replace("RUN", run).replace("OUT", out) for part in command]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2])))
def test_commands_take_what_is_in_order(place, command):
    code, said, complaint = call(*arguments_of(command, place))
    assert code == 0, complaint
    if "--json" in command:
        json.loads(said)


FILES = (*runs_of_others.FILES, "manifest.json")


@st.composite
def damage(draw: st.DrawFn, place: pathlib.Path) -> tuple[str, bytes | str]:
    name = draw(st.sampled_from(FILES))
    kinds: st.SearchStrategy[bytes | str] = st.sampled_from(mutations.KINDS)
    suited = mutations.files((place / "run" / name).read_text(), name)
    return name, draw(suited if draw(st.integers(0, 2)) else kinds)


def check(place: pathlib.Path, data: st.DataObject) -> None:
    name, change = data.draw(damage(place))
    command = data.draw(st.sampled_from(COMMANDS))
    with mutations.damaged(place / "run", name, change):
        code, _, complaint = mutations.answered(lambda: call(*arguments_of(command, place)))
    assert code in (0, 2, 3), complaint
    named = (str(place), "segment ", "data.corpus")
    assert code == 0 or any(name in complaint for name in named), complaint


@mutations.QUICK
@hypothesis.given(st.data())
def test_a_damaged_run_never_gets_a_traceback(place, data):
    check(place, data)


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(st.data())
def test_a_damaged_run_still_never_gets_a_traceback(place, data):
    check(place, data)


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "scan", "RUN", "--steps", f"0:{'9' * 5000}"),
        ("data", "scan", "RUN", "--steps", "²:³"),
        ("replay", "RUN", "--steps", f"0:{10**12}"),
        ("data", "show", "RUN", "--step", "-1"),
        ("data", "show", "RUN", "--step", "9" * 5000),
        ("report", "RUN", "--segment", "9" * 300),
        ("intervene", "RUN", "--at", "9" * 30, "--reason", "x"),
        ("compile", "RUN/config.yaml", "--topology", f"v4:{'9' * 5000}x2x2"),
        ("train", "RUN/config.yaml", "\udcff=1", "--dry-run"),
        ("train", "RUN/config.yaml", "data.corpus=\udcff", "--dry-run"),
        ("train", f"RUN/{'x' * 5000}.yaml", "--dry-run"),
    ],
)
def test_arguments_of_any_size_are_refused(place, arguments):
    code, _, complaint = call(*arguments_of(arguments, place))
    assert code in (2, 3), complaint


def test_a_topology_of_thousands_of_digits_is_refused():
    with pytest.raises(WrongInput, match="is no TPU topology"):
        topologies.parse(f"v4:{'9' * 5000}x2x2")
