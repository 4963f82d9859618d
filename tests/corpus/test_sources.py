"""Sources: which documents, in which order, under which names."""

from __future__ import annotations

import glob
import io
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax.corpus import sources
from palm_jax.errors import WrongInput


@given(
    st.binary(max_size=40).map(lambda b: bytes(x % 3 + 97 for x in b)),
    st.sampled_from([b"a", b"aa", b"ab", b"aba"]),
    st.integers(1, 7),
)
def test_splitting_chunk_by_chunk_equals_splitting_the_whole(content, separator, chunk_bytes):
    pieces = sources.split_stream(io.BytesIO(content), separator, chunk_bytes)
    assert list(pieces) == content.split(separator)


def test_stdlib_is_the_running_pythons_own_sources_in_order_of_name():
    documents = list(sources.open_source("stdlib").documents())
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    by_name = {document.name: document.content for document in documents}
    assert by_name["json/__init__.py"] == pathlib.Path(json.__file__).read_bytes()
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(name.startswith("/") or "sysconfigdata" in name for name in names)


def test_names_begin_where_the_wildcards_do(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/é.txt", "note.md"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    source = sources.open_source(f"text:{tmp_path}/texts/**/*.txt")
    assert [d.name for d in source.documents()] == ["a/b/é.txt", "a/z.txt", "b.txt"]
    assert [d.content for d in source.documents()] == [d.name.encode() for d in source.documents()]
    one = sources.open_source(f"text:{tmp_path}/texts/note.md")
    assert [d.name for d in one.documents()] == ["note.md"]


def test_a_relative_pattern_works(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert list(sources.open_source("text:*.txt").documents()) == [sources.Document("a.txt", b"x")]


def test_the_order_of_the_file_system_does_not_matter(tmp_path, monkeypatch):
    for name in ("c", "a", "b"):
        (tmp_path / name).write_text(name)
    straight = list(sources.open_source(f"text:{tmp_path}/*").documents())
    listing = list(glob.iglob(f"{tmp_path}/*"))
    for order in (sorted(listing), sorted(listing, reverse=True)):
        monkeypatch.setattr(glob, "iglob", lambda *a, order=order, **k: iter(order))
        assert list(sources.open_source(f"text:{tmp_path}/*").documents()) == straight


def test_documents_joined_by_the_separator_are_the_file_again(tmp_path):
    content = b"one\n%%\n\n%%\ntwo\xff\n%%\n"
    (tmp_path / "a.txt").write_bytes(content)
    source = sources.open_source(f"text:{tmp_path}/a.txt", "\n%%\n")
    documents = list(source.documents())
    assert b"\n%%\n".join(d.content for d in documents) == content
    assert [d.name for d in documents] == ["a.txt#0", "a.txt#1", "a.txt#2", "a.txt#3"]


@pytest.mark.parametrize(
    ("source", "separator", "words"),
    [
        ("wikipedia", None, ["wikipedia", "stdlib", "text:GLOB"]),
        ("text:", None, ["stdlib", "text:GLOB"]),
        ("stdlib:x", None, ["stdlib", "text:GLOB"]),
        ("stdlib", "%%", ["document_separator", "stdlib"]),
        ("text:/nowhere/*.txt", None, ["/nowhere/*.txt", "matches no file"]),
        ("text:*", "", ["document_separator is empty"]),
        ("text:gs://bucket/*.txt", None, ["gs://bucket/*.txt", "URL"]),
    ],
)
def test_an_impossible_source_is_refused_by_name(source, separator, words):
    with pytest.raises(WrongInput) as refusal:
        sources.open_source(source, separator)
    assert all(word in str(refusal.value) for word in words)


def test_a_file_that_goes_missing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    source = sources.open_source(f"text:{tmp_path}/*.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(WrongInput, match=r"a\.txt"):
        list(source.documents())
