"""Damage to files that are in order: to their bytes, to the values in their JSON, to what they are.

Whatever is done to a folder, reading it must end in an object of the same kind, or in WrongInput
or CannotDo whose message says where. Nothing else may come of it: no other exception, no waiting.
"""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import json
import os
import pathlib
import shutil
import signal
from typing import Any

import hypothesis
import hypothesis.strategies as st

from palm_jax.errors import CannotDo, WrongInput

QUICK = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
THOROUGH = hypothesis.settings(max_examples=250, deadline=None, derandomize=True)
LONGEST = 60  # seconds; what takes longer waits for something

ODD = st.sampled_from(
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            1,
            2,
            2**31,
            2**63,
            -(2**63),
            10**18,
            10**400,
            0.5,
            1e308,
            -1e-9,
        ),
        *("", "nan", "inf", "-inf", "x", "../../x", "/etc/passwd", "a\0b", "\ud800", "é" * 300),
        *([], {}, [[]], [None], {"": 0}, [0] * 300, ["nan", -1]),
    ]
)


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@st.composite
def value_changes(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a JSON document with one to three parts of it replaced, gone or added."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        containers = [c for c in _containers(changed) if c]
        if not containers:
            return draw(ODD)
        place = draw(st.sampled_from(containers))
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(keys))
        match draw(st.sampled_from(["replace", "replace", "delete", "add", "nest"])):
            case "replace":
                place[key] = copy.deepcopy(draw(ODD))
            case "delete":
                del place[key]
            case "nest":
                place[key] = nested(draw(st.sampled_from([1, 40, 60, 300])))
            case "add" if isinstance(place, dict):
                place[draw(st.text(max_size=3))] = copy.deepcopy(draw(ODD))
            case _:
                place.append(copy.deepcopy(draw(ODD)))
    return changed


def _containers(value: Any, levels: int = 30) -> list[Any]:
    if levels == 0 or not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(c for one in inner for c in _containers(one, levels - 1))]


@st.composite
def byte_changes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes flipped, cut off, put in or doubled."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(st.sampled_from(["flip", "flip", "cut", "insert", "double", "replace"])):
        case "flip":
            flipped = bytes([content[at] ^ draw(st.integers(1, 255))]) if content else b"\0"
            return content[:at] + flipped + content[at + 1 :]
        case "cut":
            return content[:at]
        case "insert":
            piece = st.binary(min_size=1, max_size=9) | st.sampled_from(
                [b"[" * 100_000, b"\0" * 99]
            )
            return content[:at] + draw(piece) + content[at:]
        case "double":
            return content[:at] + content
        case _:
            return draw(st.binary(max_size=40))


@st.composite
def json_texts(draw: st.DrawFn, text: str) -> bytes:
    """A file of JSON with another value, twice the same key, or damaged bytes."""
    kind = draw(st.sampled_from(["value", "value", "value", "bytes", "twice"]))
    if kind == "bytes":
        return draw(byte_changes(text.encode()))
    changed = draw(value_changes(json.loads(text)))
    written = json.dumps(changed)
    if kind == "twice" and isinstance(changed, dict) and changed:
        key = draw(st.sampled_from(list(changed)))
        written = written[:-1] + f", {json.dumps(key)}: {json.dumps(draw(ODD))}}}"
    return written.encode()


@st.composite
def line_texts(draw: st.DrawFn, text: str) -> bytes:
    """A file of a JSON document a line, one of which is damaged."""
    lines = text.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    changed = draw(json_texts(lines[at])).replace(b"\n", b" ")
    before, after = lines[:at], lines[at + 1 :]
    return b"".join(
        line + b"\n" for line in (*map(str.encode, before), changed, *map(str.encode, after))
    )


def files(text: str, name: str) -> st.SearchStrategy[bytes]:
    """Damage that suits a file of this name."""
    if name.endswith(".jsonl"):
        return line_texts(text)
    return json_texts(text) if name.endswith(".json") else byte_changes(text.encode())


KINDS = ("folder", "fifo", "loop", "dangling", "endless", "gone", "empty", "of spaces")


def replace(path: pathlib.Path, kind: str) -> None:
    """Put something else in a file's place."""
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "endless":
            path.symlink_to("/dev/zero")
        case "empty":
            path.write_bytes(b"")
        case "of spaces":
            path.write_bytes(b" " * 1000 + b"\n")


@contextlib.contextmanager
def damaged(
    folder: pathlib.Path, name: str, change: bytes | str
) -> collections.abc.Iterator[pathlib.Path]:
    """A file of `folder` with other content (bytes), or replaced by a thing of KINDS (text)."""
    path, kept = folder / name, folder.parent / "kept"
    shutil.copy(path, kept)
    try:
        if isinstance(change, bytes):
            path.write_bytes(change)
        else:
            replace(path, change)
        yield folder
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        kept.replace(path)


def answered(action: collections.abc.Callable[[], Any], *names: object) -> Any:
    """What `action` gives; None if it refuses with a message that has one of `names`."""

    def too_long(number: int, frame: object) -> None:
        raise AssertionError(f"no answer in {LONGEST} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST)
    message = None
    try:
        return action()
    except (WrongInput, CannotDo) as error:
        message = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert any(str(name) in message for name in names), message
    return None
