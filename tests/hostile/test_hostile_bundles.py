"""Archives, rows and checkpoint records from somebody else: no byte outside, no endless one."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import tarfile
import tracemalloc
import zipfile

import hypothesis
import hypothesis.strategies as st
import mutations
import numpy as np
import pytest
from corpus import corpora

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import inventory
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.replay import archives
from palm_jax.replay.bundles import ROWS, BundledRows

# --- archives ---


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    found.size = len(content)
    for field, value in fields.items():
        setattr(found, field, value)
    return found, content


FOLDER = member("bundle", type=tarfile.DIRTYPE)
GOOD = (FOLDER, member("bundle/config.yaml", b"steps: 1\n"), member("bundle/a/b", b"x" * 700))


def packed(path: pathlib.Path, *members: tuple[tarfile.TarInfo, bytes]) -> pathlib.Path:
    """An archive that says of its members what `members` say; their content as it is."""
    content = b""
    for info, data in members:
        content += info.tobuf(format=tarfile.PAX_FORMAT) + data + b"\0" * (-len(data) % 512)
    path.write_bytes(gzip.compress(content + b"\0" * 1024, 1))
    return path


def unpack(archive: pathlib.Path) -> pathlib.Path | None:
    """Unpacked, or refused; and nothing beside the folder that it was to be unpacked into."""
    into = archive.with_name("into")
    into.mkdir()
    there = set(archive.parent.rglob("*"))
    found = mutations.answered(lambda: archives.unpacked(archive, into), archive)
    new = set(archive.parent.rglob("*")) - there
    assert all(into in path.parents and not path.is_symlink() for path in new)
    return found


def test_a_good_archive_is_unpacked(tmp_path):
    folder = unpack(packed(tmp_path / "a.tar.gz", *GOOD))
    assert (folder / "config.yaml").read_text() == "steps: 1\n"
    assert (folder / "a" / "b").read_bytes() == b"x" * 700


REFUSED = {
    "upwards": member("bundle/../../outside", b"x"),
    "absolute": member("/tmp/outside", b"x"),
    "link": member("bundle/link", type=tarfile.SYMTYPE, linkname="../../outside"),
    "link within": member("bundle/link", type=tarfile.SYMTYPE, linkname="config.yaml"),
    "hard link": member("bundle/link", type=tarfile.LNKTYPE, linkname="bundle/config.yaml"),
    "fifo": member("bundle/fifo", type=tarfile.FIFOTYPE),
    "device": member("bundle/zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "twice": member("bundle/config.yaml", b"steps: 2\n"),
    "twice, otherwise spelt": member("bundle//./config.yaml", b"steps: 2\n"),
    "below a file": member("bundle/config.yaml/x", b"x"),
    "beside the folder": member("x", b"x"),
    "another folder": member("other/x", b"x"),
    "no name": member("./", type=tarfile.DIRTYPE),
    "deep": member("bundle/" + "d/" * 2000 + "x", b"x"),
    "long": member("bundle/" + "n" * 5000, b"x"),
    "nul": member("bundle/n", b"x", pax_headers={"path": "bundle/a\0b"}),
    "a terabyte": member("bundle/large", b"x", size=2**40),
    "more than any disk": member("bundle/large", b"x", size=2**62),
    "negative": member("bundle/less", b"", size=-512 * 4),
    "holes": member(
        "bundle/holes",
        b"0\n",
        pax_headers={
            **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
            **{"GNU.sparse.name": "bundle/holes", "GNU.sparse.realsize": str(2**50)},
        },
    ),
    "a name of a terabyte": member("x", b"x" * 600, type=tarfile.GNUTYPE_LONGNAME, size=2**40),
    "a header of a terabyte": member("x", b"x" * 600, type=tarfile.XHDTYPE, size=2**40),
    "a header before its beginning": member("x", b"", type=tarfile.XHDTYPE, size=-1024),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_archive_of_more_than_a_folder_of_files_is_refused(tmp_path, kind):
    (tmp_path / "outside").write_text("kept")
    assert unpack(packed(tmp_path / "a.tar.gz", *GOOD, REFUSED[kind])) is None
    assert (tmp_path / "outside").read_text() == "kept"


@pytest.mark.parametrize("size", [10, 100, -1, -9])
def test_an_archive_that_is_cut_off_is_refused(tmp_path, size):
    path = packed(tmp_path / "a.tar.gz", *GOOD)
    path.write_bytes(path.read_bytes()[:size])
    assert unpack(path) is None


def test_a_header_that_unpacks_to_more_and_more_takes_no_memory(tmp_path):
    bomb = member("x", b"0" * 2**26, type=tarfile.XHDTYPE)
    path = packed(tmp_path / "a.tar.gz", *GOOD, bomb)
    tracemalloc.start()
    assert unpack(path) is None
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_what_follows_after_the_end_is_not_unpacked_without_end(tmp_path):
    path = packed(tmp_path / "a.tar.gz", *GOOD)
    with path.open("ab") as file:
        file.write(gzip.compress(b"\0" * 2**24))
    assert unpack(path) is None


@mutations.QUICK
@hypothesis.given(data=st.data(), within=st.booleans())
def test_any_damage_to_an_archive_is_unpacked_inside_or_refused(tmp_path_factory, data, within):
    path = packed(tmp_path_factory.mktemp("archive") / "a.tar.gz", *GOOD)
    content = path.read_bytes()
    if within:
        damaged = data.draw(mutations.byte_changes(gzip.decompress(content)))
        path.write_bytes(gzip.compress(damaged, 1))
    else:
        path.write_bytes(data.draw(mutations.byte_changes(content)))
    unpack(path)


@pytest.mark.slow
@mutations.THOROUGH
@hypothesis.given(data=st.data())
def test_much_damage_to_an_archive_is_unpacked_inside_or_refused(tmp_path_factory, data):
    path = packed(tmp_path_factory.mktemp("archive") / "a.tar.gz", *GOOD)
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(data.draw(mutations.byte_changes(content)), 1))
    unpack(path)


# --- rows ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    opened = corpora.with_sequences(tmp_path_factory.mktemp("rows"), 6)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def rows(corpus, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bundle") / ROWS
    tokens = corpus.read("train", [1, 4]).astype(np.uint16)
    np.savez(path, ids=np.array([1, 4]), tokens=tokens)
    return path


def read_rows(path: pathlib.Path, manifest) -> None:
    found = BundledRows(path, manifest)
    for sequence in range(6):
        row = mutations.answered(lambda n=sequence: found.read("train", [n]), path.parent)
        assert row is None or (row.shape == (1, 9) and row.min() >= 0 and row.max() < 257)


@mutations.QUICK
@hypothesis.given(st.data())
def test_any_damage_to_rows_is_refused_or_leaves_rows(rows, corpus, data):
    content = data.draw(mutations.byte_changes(rows.read_bytes()))
    with mutations.damaged(rows.parent, ROWS, content):
        mutations.answered(lambda: read_rows(rows, corpus.manifest), rows)


@pytest.mark.parametrize("kind", mutations.KINDS)
def test_rows_that_are_no_file_are_refused(rows, corpus, kind):
    with mutations.damaged(rows.parent, ROWS, kind), pytest.raises(CannotDo, match=r"rows\.npz"):
        BundledRows(rows, corpus.manifest)


IDS, TOKENS = np.array([1, 4]), np.zeros((2, 9), np.uint16)


@pytest.mark.parametrize(
    "arrays",
    [
        {"tokens": TOKENS},
        {"ids": IDS},
        {"ids": IDS[:1], "tokens": TOKENS},
        {"ids": IDS, "tokens": TOKENS[:, :5]},
        {"ids": IDS, "tokens": TOKENS + np.uint16(300)},
        {"ids": IDS, "tokens": TOKENS.astype(np.int16) - np.int16(1)},
        {"ids": IDS, "tokens": TOKENS.astype(np.float32)},
        {"ids": IDS + 5, "tokens": TOKENS},
        {"ids": -IDS, "tokens": TOKENS},
        {"ids": IDS.astype(str), "tokens": TOKENS},
        {"ids": np.array(3), "tokens": TOKENS},
        {"ids": IDS, "tokens": TOKENS, "held_out_ids": IDS},
        {"ids": np.array([1, {}], object), "tokens": TOKENS},
    ],
)
def test_arrays_that_are_no_rows_are_refused(corpus, tmp_path, arrays):
    np.savez(tmp_path / ROWS, **arrays)
    with pytest.raises(CannotDo, match=r"rows\.npz is damaged"):
        BundledRows(tmp_path / ROWS, corpus.manifest)


def test_compressed_rows_are_not_unpacked(corpus, tmp_path):
    np.savez_compressed(tmp_path / ROWS, ids=IDS, tokens=np.zeros((10**6, 9), np.uint16))
    with pytest.raises(CannotDo, match="not stored as it is"):
        BundledRows(tmp_path / ROWS, corpus.manifest)


@pytest.mark.parametrize(
    "shape", ["(99999999999, 9)", "(99999999999999999999, 9)", "(-2, 9)", "(("]
)
def test_rows_that_promise_more_than_there_is_are_refused(corpus, tmp_path, shape):
    plain = io.BytesIO()
    np.save(plain, TOKENS)
    header = plain.getvalue().replace(b"(2, 9)".ljust(30), shape.encode().ljust(30))
    ids = io.BytesIO()
    np.save(ids, IDS)
    with zipfile.ZipFile(tmp_path / ROWS, "w") as archive:
        archive.writestr("ids.npy", ids.getvalue())
        archive.writestr("tokens.npy", header.replace(b"(2, 9), }", f"{shape}, }}".encode()))
    with pytest.raises(CannotDo, match=r"rows\.npz is damaged"):
        BundledRows(tmp_path / ROWS, corpus.manifest)


# --- the record of a checkpoint ---

STORED = {
    "record": {"segment": 0},
    "step": 4,
    "held_out_loss": 2.5,
    "leaves": {"a": "float32[2]"},
    "digest": {"whole": "ab", "leaves": {"a": "cd"}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A folder with a checkpoint whose record is all that is read here."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    for mark in inventory._MARKS:
        path = folder / "4" / mark
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    signed(folder, STORED)
    return folder


METADATA = pathlib.Path("4", "record", "metadata")


def signed(folder: pathlib.Path, stored: dict) -> bytes:
    text = json.dumps({**stored, "checksum": inventory.checksum(stored)})
    (folder / METADATA).write_text(text)
    return text.encode()


def record_of(folder: pathlib.Path) -> None:
    with Checkpoints(folder, config.Checkpoint()) as opened:
        record = opened.record(4)
        assert record["step"] == 4
        assert isinstance(record["digest"]["whole"], str)
        opened._clean()  # ranks by what the records say
        opened.wait()


@mutations.QUICK
@hypothesis.given(data=st.data(), with_checksum=st.booleans())
def test_any_damage_to_a_record_is_read_or_refused(saved, data, with_checksum):
    if with_checksum:
        content = signed(saved, data.draw(mutations.value_changes(STORED).filter(is_plain)))
    else:
        content = data.draw(mutations.json_texts(signed(saved, STORED).decode()))
    with mutations.damaged(saved, str(METADATA), content):
        mutations.answered(lambda: record_of(saved), saved)


def is_plain(stored: object) -> bool:
    return isinstance(stored, dict)


@pytest.mark.parametrize("kind", ["folder", "fifo", "endless", "empty", "of spaces"])
def test_a_record_that_is_no_file_is_refused(saved, kind):
    with mutations.damaged(saved, str(METADATA), kind), pytest.raises(CannotDo, match="unreadable"):
        record_of(saved)


def test_a_checkpoint_of_another_step_is_refused(saved):
    signed(saved, {**STORED, "step": True})
    with pytest.raises((CannotDo, WrongInput), match="step"):
        record_of(saved)
