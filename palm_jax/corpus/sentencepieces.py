"""SentencePiece made lossless: what it would change travels as byte pieces.

SentencePiece alone loses U+2581, which it writes for a blank, bytes that are no UTF-8, and
null characters; what its normalizer rewrites it loses as well. Here the text between such
bytes is encoded by it, and they themselves as one byte piece each, which is what it does with
unknown characters. Blanks at the beginning and at the end stay, and none is put before the
text (PaLM, section 4).
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from palm_jax import files
from palm_jax.errors import WrongInput

Tokens = npt.NDArray[np.integer]

FILE_NAME = "tokenizer.model"
BLANK = "\u2581"

# Lone surrogates are how Python spells bytes that are no UTF-8.
_NOT_FOR_IT = re.compile(f"([\udc80-\udcff{BLANK}\x00]+)")
_MOST_MODEL_BYTES = 256 * 2**20
# Encoded at a time. It adds up the scores of a text in float32: much further on, rounding would
# decide between pieces that are nearly as likely.
_MOST_CHARACTERS = 2**14
# Generated when it is imported, so that no type checker knows what is in it.
_ModelProto: Any = vars(sentencepiece_model_pb2)["ModelProto"]
_TYPES = _ModelProto.SentencePiece


class SentencePieces:
    """A SentencePiece model of any kind that has a piece for each byte.

    Args:
      content: of a model file.
    Raises:
      ValueError: it is none, or one that cannot give every text back.
    """

    def __init__(self, content: bytes) -> None:
        model = _ModelProto()
        try:
            model.ParseFromString(content)
        except DecodeError as error:
            raise ValueError(f"it is no SentencePiece model ({error})") from None
        _check_is_lossless(model)
        model.normalizer_spec.add_dummy_prefix = False
        model.normalizer_spec.remove_extra_whitespaces = False
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model.SerializeToString())
        except RuntimeError as error:
            raise ValueError(f"SentencePiece refuses it: {error}") from None
        texts = [_text(piece) for piece in model.pieces]
        ends = [i for i, piece in enumerate(model.pieces) if piece.piece == "</s>"]
        controls = [i for i in ends if model.pieces[i].type == _TYPES.CONTROL]
        self.end_of_document = controls[0] if controls else len(model.pieces)
        texts += [b""] * (self.end_of_document + 1 - len(texts))
        self._texts = texts
        self.vocabulary_size = len(texts)
        self._bytes = np.frombuffer(b"".join(texts), np.uint8)
        self._sizes = np.array([len(text) for text in texts], np.int64)  # 0: stands for no text
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._dtype = np.dtype("<u2" if self.vocabulary_size <= 2**16 else "<u4")
        byte_pieces = [i for i, p in enumerate(model.pieces) if p.type == _TYPES.BYTE]
        self._of_byte = {int(model.pieces[i].piece[1:-1], 16): i for i in byte_pieces}

    def encode(self, content: bytes) -> Tokens:
        """Bytes to ids.

        Raises:
          ValueError: the model would not give them back.
        """
        ids: list[int] = []
        # Odd parts are what is not for it.
        for number, part in enumerate(_parts(content)):
            if number % 2:
                ids += [self._of_byte[byte] for byte in part.encode("utf-8", "surrogateescape")]
            else:
                for piece in _cut(part):
                    ids += self._processor.encode(piece)
        texts = self._texts
        if b"".join([texts[token] for token in ids]) != content:
            raise ValueError("the SentencePiece model does not give it back as it was")
        return np.fromiter(ids, self._dtype, len(ids))

    def _joined(self, tokens: Tokens) -> npt.NDArray[np.uint8]:
        """The texts of `tokens` one after the other, without a look at each."""
        sizes = self._sizes[tokens]
        behind = np.cumsum(sizes)
        # Byte k of a token is byte k of its text: its place here, moved to where the text lies.
        moved = np.repeat(self._starts[tokens] - (behind - sizes), sizes)
        return self._bytes[moved + np.arange(moved.size)]

    def decode(self, tokens: Tokens) -> bytes:
        tokens = np.asarray(tokens)
        strange = tokens[(tokens < 0) | (tokens >= self.vocabulary_size)]
        if not strange.size:
            strange = tokens[self._sizes[tokens] == 0]
        if strange.size:
            raise ValueError(f"token {strange[0]} stands for no text")
        return self._joined(tokens).tobytes()

    def num_bytes(self, tokens: Tokens) -> int:
        return int(self._sizes[np.asarray(tokens)].sum())


def _parts(content: bytes) -> list[str]:
    """Text for SentencePiece, and between each two what is not, its bytes as surrogates."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return _NOT_FOR_IT.split(content.decode("utf-8", "surrogateescape"))
    # Looking for each is many times faster than the pattern.
    return _NOT_FOR_IT.split(text) if BLANK in text or "\x00" in text else [text]


def _cut(text: str) -> list[str]:
    """Long text in parts that end before a blank, where there is one."""
    parts = []
    start = 0
    while start < len(text):
        stop = start + _MOST_CHARACTERS
        if stop < len(text) and (blank := text.rfind(" ", start + 1, stop)) > 0:
            stop = blank
        parts.append(text[start:stop])
        start = stop
    return parts


def _check_is_lossless(model: Any) -> None:
    missing = set(range(256)) - {
        int(piece.piece[1:-1], 16) for piece in model.pieces if piece.type == _TYPES.BYTE
    }
    if missing:
        raise ValueError(
            f"it has no pieces for {len(missing)} of the 256 bytes, so that it loses what it "
            "does not know; train it with --byte_fallback=true"
        )
    if model.trainer_spec.model_type == model.trainer_spec.WORD:
        raise ValueError("it knows whole words alone; train one with --model_type=unigram or bpe")
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap:
        raise ValueError(
            f"its normalization rule {normalizer.name!r} rewrites text; train it with "
            "--normalization_rule_name=identity"
        )
    if not normalizer.escape_whitespaces:
        raise ValueError("it does not escape blanks; train it without --escape_whitespaces=false")


def _text(piece: Any) -> bytes:
    if piece.type == _TYPES.BYTE:
        return bytes([int(piece.piece[1:-1], 16)])
    if piece.type in (_TYPES.NORMAL, _TYPES.USER_DEFINED):
        return piece.piece.replace(BLANK, " ").encode()
    return b""


def read(path: pathlib.Path, sha256: str | None = None) -> SentencePieces:
    """The model in a file.

    Raises:
      WrongInput: it is missing, is not the one of that digest, or cannot be used.
    """
    content = _content(path, sha256)
    try:
        return SentencePieces(content)
    except ValueError as error:
        raise WrongInput(f"the tokenizer {path} cannot be used: {error}") from None


def _content(path: pathlib.Path, sha256: str | None) -> bytes:
    try:
        with files.opened(path) as file:
            content = file.read(_MOST_MODEL_BYTES + 1)
    except OSError as error:
        raise WrongInput(f"cannot read the tokenizer {path}: {error}") from error
    if len(content) > _MOST_MODEL_BYTES:
        raise WrongInput(f"the tokenizer {path} has more than {_MOST_MODEL_BYTES:,} bytes")
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise WrongInput(
            f"{path} is not the tokenizer that the corpus was made with: its SHA-256 is {found}, "
            f"the manifest's {sha256}"
        )
    return content
