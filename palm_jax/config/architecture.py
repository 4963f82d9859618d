"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from palm_jax.config.fields import END, NotNegative, PositiveFloat, PositiveInt, Section


class Model(Section):
    """The decoder (PaLM, section 2)."""

    num_layers: PositiveInt
    width: PositiveInt
    num_heads: PositiveInt
    head_size: PositiveInt  # 256 in the paper's models
    feed_forward: PositiveInt | None = None  # default 4 x width, at full width for SwiGLU
    vocabulary_size: Annotated[int, pydantic.Field(ge=2, lt=END)]  # with the end-of-document id
    vocabulary_multiple: PositiveInt = 128  # the table is padded up to a multiple of this
    sequence_length: PositiveInt  # targets per sequence
    norm: Literal["rms", "layernorm"] = "rms"  # "rms": no mean, scale stored around zero
    rope_base: PositiveFloat = 10000.0
    tied_embedding: bool = True
    qk_norm: bool = False
    isolate_documents: bool = False  # PaLM mentions no masking between packed documents
    z_loss: NotNegative = 1e-4  # weight of (log Z)^2
    attention: Literal["xla", "splash"] = "xla"  # splash: a kernel for TPUs
    remat: Literal["none", "full", "dots", "attention"] = "none"

    @property
    def feed_forward_size(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def padded_vocabulary_size(self) -> int:
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @pydantic.model_validator(mode="after")
    def _head_size_is_even(self) -> Model:
        if self.head_size % 2:
            raise ValueError(
                f"head_size={self.head_size}: rotary embedding turns pairs, so it must be even"
            )
        return self
