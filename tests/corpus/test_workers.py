"""Documents tokenised by several processes."""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from palm_jax.corpus import manifest, sources, tokenising, vocabulary, workers
from palm_jax.corpus.workers import Place
from palm_jax.errors import CannotDo, WrongInput

TEXTS = [f"def number_{i}(): return {i} * 7\n".encode() * (1 + i % 3) for i in range(60)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, manifest.Tokenizer]:
    """A folder with a SentencePiece model, and what the manifest says of it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    content, _ = vocabulary.train(TEXTS, 284)
    path = folder / "tokenizer.model"
    path.write_bytes(content)
    described = manifest.Tokenizer(
        kind="sentencepiece",
        vocabulary_size=284,
        end_of_document=1,
        model=manifest.IndexFile(file=path.name, sha256=manifest.file_sha256(path)),
    )
    return folder, described


def places(texts: list[bytes]) -> list[Place]:
    return [
        Place(0, number, sources.Document(f"{number}.txt", text), number)
        for number, text in enumerate(texts)
    ]


def groups_of(texts: list[bytes], size: int) -> list[list[Place]]:
    found = places(texts)
    return [found[i : i + size] for i in range(0, len(found), size)]


def test_processes_give_what_one_gives_in_the_same_order(trained):
    folder, described = trained
    made = [
        [
            done
            for group in workers.tokenised(groups_of(TEXTS, 7), folder, described, n)
            for done in group
        ]
        for n in (1, 2)
    ]
    assert len(made[0]) == len(TEXTS)
    for one, other in zip(*made, strict=True):
        assert one._replace(tokens=None) == other._replace(tokens=None)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert one.tokens.dtype == other.tokens.dtype


def test_a_document_that_would_not_come_back_is_named_whoever_tokenises(trained, monkeypatch):
    folder, described = trained
    texts = [b"fine", b"\xff\x00 odd", b"fine again"]
    assert len(list(workers.tokenised(groups_of(texts, 1), folder, described, 1))) == 3

    def refuses(self, content):
        raise ValueError("it does not give it back as it was")

    monkeypatch.setattr("palm_jax.corpus.sentencepieces.SentencePieces.encode", refuses)
    with pytest.raises(WrongInput, match=r"document 0\.txt: it does not give it back"):
        list(workers.tokenised(groups_of(texts, 1), folder, described, 1))


def test_a_refusal_travels_between_processes():
    error = pickle.loads(pickle.dumps(WrongInput("document 7: it is odd")))
    assert type(error) is WrongInput
    assert str(error) == "document 7: it is odd"


PARENT = """
import pathlib, sys, time
sys.path.insert(0, {tests!r})
from palm_jax.corpus import manifest, sources, workers
from test_workers import groups_of, TEXTS

described = manifest.Tokenizer.model_validate_json({described!r})

def slowly():
    yield from groups_of(TEXTS, 7)
    print("now", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    list(workers.tokenised(slowly(), pathlib.Path({folder!r}), described, 2))
"""


def children_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def is_there(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
def test_processes_end_with_a_parent_that_is_killed(trained, tmp_path):
    folder, described = trained
    program = tmp_path / "parent.py"
    program.write_text(
        PARENT.format(
            tests=str(pathlib.Path(__file__).parent),
            described=described.model_dump_json(),
            folder=str(folder),
        )
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"now\n"
        children = children_of(process.pid)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_there, children)):
        assert time.monotonic() < deadline, "processes without a parent go on"
        time.sleep(0.05)


def test_a_process_that_dies_is_said_with_the_way_on(trained):
    folder, described = trained

    def groups():
        for number, group in enumerate(groups_of(TEXTS * 20, 1)):
            if number == 40:
                for child in multiprocessing.active_children():
                    child.kill()
            yield group

    with pytest.raises(CannotDo, match="the same command goes on from what is done"):
        list(workers.tokenised(groups(), folder, described, 2))


def test_bytes_are_not_sent_anywhere(monkeypatch, tmp_path):
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", None)
    described = tokenising.tokenizers.BYTES
    found = list(workers.tokenised(groups_of(TEXTS, 9), tmp_path, described, 4))
    assert [done.tokens.tobytes()[::2] for group in found for done in group] == TEXTS
