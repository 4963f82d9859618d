"""A model's parameters: their axes by group, and how many there are. Letters as in model.py."""

from __future__ import annotations

import math

from palm_jax import config


def sizes(m: config.Model) -> dict[str, int]:
    """Size of each logical axis of the parameters; one key and value for all heads have no G."""
    groups = {} if m.num_key_value_heads == 1 else {"G": m.num_key_value_heads}
    return {
        "N": m.num_layers,
        "D": m.width,
        "H": m.num_heads,
        **groups,
        "K": m.head_size,
        "F": m.feed_forward_size,
        "L": m.sequence_length,
        "V": m.padded_vocabulary_size,
    }


def axes_by_group(m: config.Model) -> dict[str, tuple[str, ...]]:
    """Axes of every parameter, by group: embedding, attention, feed_forward, norms."""
    key = "K" if m.num_key_value_heads == 1 else "GK"
    tables = ["VD"] if m.tied_embedding else ["VD", "VD"]
    tables += ["LD"] if m.positions == "learned" else []
    attention = ["NDHK", f"ND{key}", f"ND{key}", "NHKD"]  # queries, keys, values, output
    feed_forward = ["NDF", "NDF", "NFD"] if m.is_gated else ["NDF", "NFD"]
    num_norms = 1 if m.block == "parallel" else 2  # of each layer
    per_norm = 2 if m.biases and m.norm == "layernorm" else 1
    norms = ["ND"] * num_norms * per_norm
    norms += ["NK", "NK"] if m.qk_norm else []  # shared by heads
    norms += ["D", "D"] if m.embedding_norm else []
    norms += ["D"] * per_norm if m.final_norm_scale else []  # PaLM's has no scale
    if m.biases:
        attention += ["NHK", f"N{key}", f"N{key}", "ND"]
        feed_forward += ["NF"] * (2 if m.is_gated else 1) + ["ND"]
    return {
        "embedding": tuple(tables),
        "attention": tuple(attention),
        "feed_forward": tuple(feed_forward),
        "norms": tuple(norms),
    }


def number(m: config.Model, padded: bool = False) -> int:
    """N, as the paper counts; `padded` adds the rows that only pad the vocabulary.

    Source: PaLM, section 2; its table 1 prints 8.63, 62.50 and 540.35 billion.
    """
    extents = sizes(m)
    if not padded:
        extents["V"] = m.vocabulary_size
    return sum(
        math.prod(extents[letter] for letter in axes)
        for leaves in axes_by_group(m).values()
        for axes in leaves
    )
