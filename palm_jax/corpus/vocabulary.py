"""Train a SentencePiece vocabulary on a sample of the documents, the same on every machine.

The sample is the documents of the split train whose keys are the smallest, up to a number of
bytes: like the order of the corpus, it depends on the documents and the seed alone.
"""

from __future__ import annotations

import collections.abc
import heapq
import io

import sentencepiece

from palm_jax.corpus.manifest import Training
from palm_jax.corpus.sentencepieces import BLANK
from palm_jax.errors import WrongInput

SAMPLE_BYTES = 16 * 2**20
# All byte pieces, the unknown and the end; one more would be the first that is learnt.
SMALLEST = 256 + 2
THREADS = 1  # the expected counts of several would be added up in an order that varies

# It skips longer sentences. Characters have up to 4 bytes.
_SENTENCE_CHARACTERS = 2048
_SENTENCE_BYTES = 4 * _SENTENCE_CHARACTERS


class Sample:
    """The documents of the smallest keys, until their bytes reach `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        # A heap whose first is the largest key: keys as negative numbers.
        self._heap: list[tuple[int, bytes]] = []
        self._keys: set[int] = set()

    def offer(self, key: bytes, content: bytes) -> None:
        """Take a document for now; one of equal content is taken once."""
        number = -int.from_bytes(key, "big")
        if number in self._keys:
            return
        heapq.heappush(self._heap, (number, content))
        self._keys.add(number)
        self._num_bytes += len(content)
        while self._num_bytes - len(self._heap[0][1]) >= self._most_bytes:
            dropped, text = heapq.heappop(self._heap)
            self._keys.remove(dropped)
            self._num_bytes -= len(text)

    def documents(self) -> list[bytes]:
        """By rising key."""
        return [content for _, content in sorted(self._heap, reverse=True)]


def train(
    documents: collections.abc.Sequence[bytes], vocabulary_size: int
) -> tuple[bytes, Training]:
    """A unigram model of `vocabulary_size` ids, and what it was trained on.

    Whitespace and line ends are kept and may be pieces, every digit is one of its own, and
    what is rarer than one character in 2000 is left to the byte pieces.

    Raises:
      WrongInput: the documents cannot fill such a vocabulary, or it is too small.
    """
    if vocabulary_size <= SMALLEST:
        raise WrongInput(
            f"tokenizer=sentencepiece:train:{vocabulary_size} must be above {SMALLEST}, the "
            "bytes, the unknown and the end of document"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocabulary_size,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_SENTENCE_BYTES,
            num_threads=THREADS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise WrongInput(
            f"tokenizer=sentencepiece:train:{vocabulary_size}: SentencePiece cannot train on "
            f"{len(documents)} documents of {sum(map(len, documents)):,} bytes: "
            f"{str(error).rpartition('] ')[2]}"
        ) from None
    return model.getvalue(), Training(
        sentencepiece=sentencepiece.__version__,
        sample_bytes=sum(map(len, documents)),
        sample_documents=len(documents),
        threads=THREADS,
    )


def _sentences(documents: collections.abc.Iterable[bytes]) -> collections.abc.Iterator[str]:
    """Stretches of lines of all that SentencePiece takes."""
    for document in documents:
        text = document.decode("utf-8", "ignore").replace(BLANK, "").replace("\x00", "")
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARACTERS
            if stop < len(text) and (line := text.rfind("\n", start, stop)) > 0:
                stop = line + 1
            yield text[start:stop]
            start = stop
