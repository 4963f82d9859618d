"""The decoder's formulas as the papers print them, in NumPy float64, with loops.

Letters as in model.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from palm_jax import config


def norm(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def scaled_norm(x: np.ndarray, kind: str, w: Any, name: str) -> np.ndarray:
    return norm(x, kind) * (1 + w[f"{name}_scale_D"]) + w.get(f"{name}_bias_D", 0)


def rotary(x: np.ndarray, base: float) -> np.ndarray:
    """Pair (j, j + K/2) is a complex number turned by position x base^(-2j/K) radians."""
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for position in range(x.shape[1]):
        for j in range(half):
            turn = np.exp(1j * position * base ** (-2 * j / x.shape[-1]))
            pair = (x[:, position, ..., j] + 1j * x[:, position, ..., j + half]) * turn
            turned[:, position, ..., j] = pair.real
            turned[:, position, ..., j + half] = pair.imag
    return turned


def slopes(num_heads: int) -> list[float]:
    """ALiBi's, as its authors' code has them."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(num_heads).is_integer():
        return of_power(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return of_power(closest) + of_power(2 * closest)[0::2][: num_heads - closest]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(
    normed_BLD: np.ndarray, w: Any, m: config.Model, documents_BL: np.ndarray | None
) -> np.ndarray:
    def biased(x: np.ndarray, name: str, letters: str) -> np.ndarray:
        return x + w.get(f"{name}_bias_{letters}", 0)

    query_BLHK = biased(np.einsum("bld,dhk->blhk", normed_BLD, w["w_query_DHK"]), "query", "HK")
    if m.num_key_value_heads == 1:
        key, value = (
            biased(np.einsum("bsd,dk->bsk", normed_BLD, w[f"w_{name}_DK"]), name, "K")[:, :, None]
            for name in ("key", "value")
        )
    else:
        key, value = (
            biased(np.einsum("bsd,dgk->bsgk", normed_BLD, w[f"w_{name}_DGK"]), name, "GK")
            for name in ("key", "value")
        )
    if m.qk_norm:
        query_BLHK = norm(query_BLHK, "layernorm") * (1 + w["query_norm_scale_K"])
        key = norm(key, "layernorm") * (1 + w["key_norm_scale_K"])
    if m.positions == "rotary":
        query_BLHK, key = rotary(query_BLHK, m.rope_base), rotary(key, m.rope_base)
    per_key = m.num_heads // m.num_key_value_heads
    base = m.head_size if m.mup_base_head_size is None else m.mup_base_head_size
    heads_BLHK = np.zeros_like(query_BLHK)
    for b, t, h in np.ndindex(query_BLHK.shape[:3]):
        seen = [
            s
            for s in range(t + 1)
            if documents_BL is None or documents_BL[b, s] == documents_BL[b, t]
        ]
        scores = key[b, seen, h // per_key] @ query_BLHK[b, t, h]
        scores = scores * math.sqrt(base) / m.head_size
        if m.positions == "alibi":
            scores = scores - slopes(m.num_heads)[h] * (t - np.asarray(seen))
        weights = np.exp(scores - scores.max())
        heads_BLHK[b, t, h] = (weights / weights.sum()) @ value[b, seen, h // per_key]
    attention_BLD = np.einsum("blhk,hkd->bld", heads_BLHK, w["w_attention_HKD"])
    return attention_BLD + w.get("attention_bias_D", 0)


def feed_forward(normed_BLD: np.ndarray, w: Any, m: config.Model) -> np.ndarray:
    up_BLF = normed_BLD @ w["w_up_DF"] + w.get("up_bias_F", 0)
    if m.activation in ("swiglu", "geglu"):
        gate_BLF = normed_BLD @ w["w_gate_DF"] + w.get("gate_bias_F", 0)
        swish = gate_BLF / (1 + np.exp(-gate_BLF))
        inner_BLF = (swish if m.activation == "swiglu" else gelu(gate_BLF)) * up_BLF
    else:
        inner_BLF = np.maximum(up_BLF, 0) if m.activation == "relu" else gelu(up_BLF)
    return inner_BLF @ w["w_down_FD"] + w.get("down_bias_D", 0)


def hidden(
    params: Any, ids_BL: np.ndarray, m: config.Model, documents_BL: np.ndarray | None = None
) -> np.ndarray:
    x_BLD = params["embedding_VD"][ids_BL] * m.embedding_scale
    if m.positions == "learned":
        x_BLD = x_BLD + params["position_embedding_LD"][: ids_BL.shape[1]]
    if m.embedding_norm:
        x_BLD = scaled_norm(x_BLD, "layernorm", params, "embedding_norm")
    for number in range(m.num_layers):
        w = {name: leaf[number] for name, leaf in params["layers"].items()}
        if m.block == "parallel":
            normed_BLD = scaled_norm(x_BLD, m.norm, w, "norm")
            x_BLD = x_BLD + feed_forward(normed_BLD, w, m)
            x_BLD = x_BLD + attention(normed_BLD, w, m, documents_BL)
        elif m.block == "serial":
            normed_BLD = scaled_norm(x_BLD, m.norm, w, "attention_norm")
            x_BLD = x_BLD + attention(normed_BLD, w, m, documents_BL)
            normed_BLD = scaled_norm(x_BLD, m.norm, w, "feed_forward_norm")
            x_BLD = x_BLD + feed_forward(normed_BLD, w, m)
        else:
            alpha = (2 * m.num_layers) ** (1 / 4)
            x_BLD = alpha * x_BLD + attention(x_BLD, w, m, documents_BL)
            x_BLD = scaled_norm(x_BLD, m.norm, w, "attention_norm")
            x_BLD = alpha * x_BLD + feed_forward(x_BLD, w, m)
            x_BLD = scaled_norm(x_BLD, m.norm, w, "feed_forward_norm")
    if m.block == "deepnorm":
        return x_BLD
    if m.final_norm_scale:
        return scaled_norm(x_BLD, m.norm, params, "final_norm")
    return norm(x_BLD, m.norm)


def logits(hidden_BLD: np.ndarray, params: Any, m: config.Model) -> np.ndarray:
    table_VD = params["embedding_VD" if m.tied_embedding else "unembedding_VD"]
    base = m.width if m.mup_base_width is None else m.mup_base_width
    scale = 1 / math.sqrt(base) if m.logit_scale is None else m.logit_scale
    scale = scale * base / m.width
    return hidden_BLD @ table_VD[: m.vocabulary_size].T * scale


def log_probabilities(params: Any, tokens_BL: np.ndarray, m: config.Model) -> np.ndarray:
    """Of every token after each of a row's, [B, L, V]; the row's last token is only a target."""
    logits_BLV = logits(hidden(params, tokens_BL[:, :-1], m), params, m)
    return logits_BLV - np.log(np.exp(logits_BLV).sum(axis=-1, keepdims=True))


def documents(ids_BL: np.ndarray, end: int) -> np.ndarray:
    numbers_BL = np.zeros(ids_BL.shape, np.int64)
    for b, t in np.ndindex(ids_BL.shape):
        numbers_BL[b, t] = list(ids_BL[b, :t]).count(end)
    return numbers_BL


def objective(
    params: Any, tokens_BL: np.ndarray, m: config.Model, end: int, z_weight: float
) -> float:
    """Sum of cross-entropy and z-loss over the targets of `tokens_BL`."""
    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
    documents_BL = documents(inputs_BL, end) if m.isolate_documents else None
    logits_BLV = logits(hidden(params, inputs_BL, m, documents_BL), params, m)
    log_z_BL = np.log(np.exp(logits_BLV).sum(axis=-1))
    target_BL = np.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return float((log_z_BL - target_BL + z_weight * log_z_BL**2).sum())
