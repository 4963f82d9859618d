"""Keys and values that decoding keeps, against the weights that it reads for each token."""

from __future__ import annotations

import dataclasses

from palm_jax import config
from palm_jax.plan import parameters

BFLOAT16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Cache:
    """Of one kind of attention; `tokens` are those in the cache, of all sequences together."""

    kind: str
    heads_of_keys: int
    bytes_per_token: int
    tokens: int
    weight_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.bytes_per_token * self.tokens

    @property
    def tokens_like_weights(self) -> float:
        """Cached tokens at which a step of decoding reads as much cache as weights."""
        return self.weight_bytes / self.bytes_per_token


def bytes_per_token(
    num_layers: int, heads_of_keys: int, head_size: int, element_bytes: int = BFLOAT16_BYTES
) -> int:
    """A key and a value of every layer and of every head that has its own.

    Source: Shazeer, 2019, section 3; PaLM, section 2.
    """
    return 2 * num_layers * heads_of_keys * head_size * element_bytes


def kinds(model: config.Model) -> dict[str, int]:
    """Heads of keys under each kind of attention, the configured one among them."""
    found = {"multi-head": model.num_heads}
    grouped = model.num_key_value_heads if 1 < model.num_key_value_heads < model.num_heads else 8
    if 1 < grouped < model.num_heads and model.num_heads % grouped == 0:
        found[f"grouped, {grouped}"] = grouped
    return found | {"multi-query": 1}


def caches(
    model: config.Model, tokens: int, element_bytes: int = BFLOAT16_BYTES
) -> dict[str, Cache]:
    """The cache of `tokens` tokens under each kind of attention.

    The weights are this model's as it is configured; another kind has other projections too.
    """
    weights = parameters.number(model) * element_bytes
    return {
        kind: Cache(
            kind,
            heads,
            bytes_per_token(model.num_layers, heads, model.head_size, element_bytes),
            tokens,
            weights,
        )
        for kind, heads in kinds(model).items()
    }
