"""How fast a corpus is made and read, beside the libraries that do the work.

Writes documents as compressed JSON lines, trains a vocabulary, and then, in turns: encodes all of
them by SentencePiece alone, from memory, with two threads; does the same from the file, and writes
the ids, as a plain loop; and prepares the corpus with two workers, from the file to the finished
folder. Then reads random batches from it, and by a bare ArrayRecord reader that only fetches the
same records.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
import pyarrow
import sentencepiece
from array_record.python import array_record_module

from palm_jax.corpus import sources, vocabulary
from palm_jax.corpus.prepare import prepare
from palm_jax.corpus.reader import READER_OPTIONS, Corpus

WORKERS = 2
BATCH = 256  # sequences
ROUNDS = 3
BATCHES = 200


def made_up(megabytes: int) -> list[str]:
    """Python's own sources cut into documents of some 4 kB, again and again, none like another."""
    texts = [d.content.decode("utf-8", "ignore") for d in sources.open_source("stdlib").documents()]
    found: list[str] = []
    size = 0
    while size < megabytes * 10**6:
        for text in texts:
            for first in range(0, len(text), 4000):
                found.append(f"{len(found)} {text[first : first + 4000]}")
                size += len(found[-1])
    return found


def write(path: pathlib.Path, texts: list[str]) -> None:
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    path.write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))


def plain_loop(path: pathlib.Path, model: bytes, out: pathlib.Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    with pyarrow.input_stream(str(path), compression="zstd") as stream, out.open("wb") as file:
        lines = iter(io.BufferedReader(stream, 2**20))
        while texts := [json.loads(line)["text"] for line in itertools.islice(lines, 256)]:
            for ids in processor.encode(texts, num_threads=WORKERS):
                file.write(np.array(ids, np.uint16).tobytes())


class Stages:
    """When each stage of a preparation began and was last heard of."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.times.setdefault(stage, [time.perf_counter()])[1:] = [time.perf_counter()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--vocabulary", type=int, default=8192)
    given = parser.parse_args()
    texts = made_up(given.megabytes)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder / "texts.jsonl.zst", texts)
        began = time.perf_counter()
        sample = [text.encode() for text in texts[:: max(1, len(texts) // 1500)]]
        model, training = vocabulary.train(sample, given.vocabulary)
        (folder / "tokenizer.model").write_bytes(model)
        print(
            f"training {given.vocabulary} ids on {training.sample_bytes / 1e6:.1f} MB, one thread: "
            f"{time.perf_counter() - began:.0f} s"
        )
        alone, plain, reading, whole = [], [], [], []
        for turn in range(ROUNDS):
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            began = time.perf_counter()
            ids = processor.encode(texts, num_threads=WORKERS)
            alone.append(time.perf_counter() - began)
            del ids
            began = time.perf_counter()
            plain_loop(folder / "texts.jsonl.zst", model, folder / "ids")
            plain.append(time.perf_counter() - began)
            stages = Stages()
            began = time.perf_counter()
            prepare(
                source=f"jsonl:{folder}/texts.jsonl.zst",
                out=folder / f"corpus{turn}",
                tokenizer=f"sentencepiece:{folder}/tokenizer.model",
                sequence_length=256,
                workers=WORKERS,
                progress=stages,
            )
            whole.append(time.perf_counter() - began)
            # From its first word, the room it needs, so that opening the file counts, too.
            reading.append(stages.times["reading"][-1] - stages.times["room"][0])
        print(
            f"{megabytes:.0f} MB of {len(texts):,} documents, {WORKERS} workers; best of {ROUNDS}"
        )
        print("| | MB/s of text | of SentencePiece alone | of the plain loop |")
        print("|--|--|--|--|")
        for what, seconds in (
            ("SentencePiece alone, from memory", alone),
            ("a plain loop: decompress, parse, SentencePiece, write", plain),
            ("`data prepare`: decompress, parse, tokenise, check, spool", reading),
            ("`data prepare` in all: sort, join, cut and write besides", whole),
        ):
            best = min(seconds)
            ratios = f"{min(alone) / best:.2f} | {min(plain) / best:.2f}"
            print(f"| {what} | {megabytes / best:.1f} | {ratios} |")
        ratios = measure_reading(folder / "corpus0")
        print(
            f"reading batches of {BATCH} at random: {statistics.median(ratios):.2f} of the rate of "
            f"a bare ArrayRecord reader ({min(ratios):.2f} to {max(ratios):.2f} in {ROUNDS} turns)"
        )


def measure_reading(folder: pathlib.Path) -> list[float]:
    """Rate of `Corpus.read` over that of fetching the records, turn by turn."""
    rng = np.random.default_rng(0)
    with Corpus.open(folder) as corpus:
        split = corpus.manifest.splits["train"]
        assert len(split.shards) == 1, "the bare reader has one file"
        reader = array_record_module.ArrayRecordReader(
            str(folder / split.shards[0].file), READER_OPTIONS
        )
        ratios = []
        for turn in range(ROUNDS + 1):
            batches = rng.integers(0, split.sequences, (BATCHES, BATCH))
            bare = ours = 0.0
            for ids in batches:
                began = time.perf_counter()
                reader.read(ids.tolist())
                between = time.perf_counter()
                corpus.read("train", ids)
                bare += between - began
                ours += time.perf_counter() - between
            if turn > 0:  # the first one brings the file into memory
                ratios.append(bare / ours)
        reader.close()
    return ratios


if __name__ == "__main__":
    main()
