"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from palm_jax.config.fields import END, Fraction, NotNegative, PositiveFloat, PositiveInt, Section


class Model(Section):
    """The decoder. What is not said is PaLM's (PaLM, section 2)."""

    num_layers: PositiveInt
    width: PositiveInt
    num_heads: PositiveInt
    head_size: PositiveInt  # 256 in the paper's models
    # Keys and values, each shared by num_heads / num_key_value_heads heads. 1: multi-query
    # attention; num_heads: multi-head attention; between: grouped (Ainslie et al., 2023).
    num_key_value_heads: PositiveInt = 1
    feed_forward: PositiveInt | None = None  # default 4 x width, at full width for SwiGLU
    vocabulary_size: Annotated[int, pydantic.Field(ge=2, lt=END)]  # with the end-of-document id
    vocabulary_multiple: PositiveInt = 128  # the table is padded up to a multiple of this
    sequence_length: PositiveInt  # targets per sequence
    # "parallel": both branches from one norm. "serial": one after the other, a norm before
    # each. "deepnorm": a norm after each, the stream scaled up (Wang et al., 2022).
    block: Literal["parallel", "serial", "deepnorm"] = "parallel"
    norm: Literal["rms", "layernorm"] = "rms"  # "rms": no mean, scale stored around zero
    final_norm_scale: bool = False  # the norm before the logits learns a scale
    biases: bool = False  # of all products in layers, and of layer norms
    activation: Literal["swiglu", "geglu", "gelu", "relu"] = "swiglu"
    # "learned": a vector for each position. "alibi": scores fall with distance (Press et al.,
    # 2022). "none": the causal mask alone tells positions apart.
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    rope_base: PositiveFloat = 10000.0
    tied_embedding: bool = True
    embedding_norm: bool = False  # layer norm of the embedded tokens (BLOOM, section 3.2.3)
    embedding_scale: PositiveFloat = 1.0  # multiplies the embedded tokens
    logit_scale: PositiveFloat | None = None  # default 1/sqrt(width)
    qk_norm: bool = False
    # decoder/initial.py has the table.
    initialiser: Literal["palm", "gpt2", "bloom", "small", "wortsman", "deepnorm"] = "palm"
    initial_std: PositiveFloat | None = None  # instead of the initialiser's own
    embedding_std: PositiveFloat | None = None  # likewise, of the tables
    # Maximal update parametrisation (Yang et al., 2022): a rate tuned at one width holds at others.
    # With width = m x mup_base_width, layers' kernels learn at 1/m of the rate and begin with
    # variances that fall as 1/m, and logits are multiplied by 1/m. Null: rates are as given.
    mup_base_width: PositiveInt | None = None
    # Scores are multiplied by sqrt(this) / head_size; default head_size.
    mup_base_head_size: PositiveInt | None = None
    dropout: Fraction = 0.0  # of what each branch adds
    attention_dropout: Fraction = 0.0  # of the attention's weights
    embedding_dropout: Fraction = 0.0
    isolate_documents: bool = False  # PaLM mentions no masking between packed documents
    z_loss: NotNegative = 1e-4  # weight of (log Z)^2
    attention: Literal["xla", "splash"] = "xla"  # splash: a kernel for TPUs
    remat: Literal["none", "full", "dots", "attention"] = "none"

    @property
    def feed_forward_size(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def is_gated(self) -> bool:
        """Whether two kernels lead into the feed-forward."""
        return self.activation in ("swiglu", "geglu")

    @property
    def products(self) -> tuple[str, ...]:
        """A layer's large products, by their kernels' places.

        One key and one value that all heads share are a small part of the work, and not among them.
        """
        keys_and_values = ("key", "value") if self.num_key_value_heads > 1 else ()
        into = ("gate", "up") if self.is_gated else ("up",)
        return ("query", *keys_and_values, "attention", *into, "down")

    @property
    def padded_vocabulary_size(self) -> int:
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def base_width(self) -> int:
        """The width at which rates and scales hold as they are given."""
        return self.mup_base_width or self.width

    @property
    def width_multiple(self) -> float:
        """muP's m; 1 without."""
        return self.width / self.base_width

    @property
    def score_scale(self) -> float:
        """What attention's scores are multiplied by."""
        if self.mup_base_head_size is None:
            return float(self.head_size**-0.5)
        return float(self.mup_base_head_size**0.5 / self.head_size)

    @property
    def output_scale(self) -> float:
        """What logits are multiplied by."""
        base = self.base_width**-0.5 if self.logit_scale is None else self.logit_scale
        return float(base / self.width_multiple)

    @property
    def has_dropout(self) -> bool:
        return max(self.dropout, self.attention_dropout, self.embedding_dropout) > 0

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Model:
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"head_size={self.head_size}: rotary embedding turns pairs, so it must be even"
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_heads="
                f"{self.num_heads}: each key serves as many heads"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _pieces_fit(self) -> Model:
        if self.attention == "splash" and self.positions == "alibi":
            raise ValueError(
                "attention=splash: the kernel adds nothing to scores, as positions=alibi wants; "
                "set attention=xla"
            )
        if self.attention == "splash" and self.attention_dropout:
            raise ValueError(
                "attention=splash: the kernel drops no weights; set attention_dropout=0, or "
                "attention=xla"
            )
        if self.block == "deepnorm" and self.final_norm_scale:
            raise ValueError(
                "final_norm_scale=true: block=deepnorm ends in a norm that has one; set it to false"
            )
        if self.initialiser == "deepnorm" and self.block != "deepnorm":
            raise ValueError(
                f"initialiser=deepnorm belongs to block=deepnorm, and block={self.block}; change "
                "either"
            )
        if self.mup_base_head_size is not None and self.mup_base_width is None:
            raise ValueError(
                f"mup_base_head_size={self.mup_base_head_size} needs mup_base_width; set it, or "
                "leave this out"
            )
        if self.initial_std is not None and self.initialiser not in ("gpt2", "bloom", "small"):
            raise ValueError(
                f"initial_std={self.initial_std:g}: initialiser={self.initialiser} takes "
                "deviations from the sizes of kernels; set initialiser=gpt2, or leave it out"
            )
        return self
