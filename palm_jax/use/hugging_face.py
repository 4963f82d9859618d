"""A model as Hugging Face's `transformers` has it: OPT, BLOOM or Llama, where the switches agree.

Linear layers there are [out, in], ours [in, out]. What they have no setting for is folded into
weights, so that the function stays what it was:

  norms       theirs multiply by w, ours by 1 + s; one without a scale gets w = 1
  logits      their scale, theirs being 1, goes into the last norm; so does what a tied embedding
              was multiplied by for the stream's sake
  scores      muP's scale goes into queries, as does what else is not 1/sqrt(K)
  OPT's eps   its layer norms have 1e-5, ours 1e-6. Layer norm of c x with eps c^2 is that of x with
              eps, so its whole residual stream is ours times sqrt(10).

Whatever has no counterpart is refused by the name of its switch. Letters as in model.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shutil
from typing import Any

import numpy as np

from palm_jax import config
from palm_jax.decoder.norms import EPSILON
from palm_jax.errors import WrongInput
from palm_jax.use import portable
from palm_jax.use.portable import CARD, WEIGHTS, Model, Weights

_OPT_EPSILON = 1e-5  # torch's default, which OPT's configuration cannot change
_OPT_OFFSET = 2  # rows of positions before the first that is used
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_new",  # by tanh
    "swiglu": "silu",
    "geglu": "gelu_new",
}
# By positions: the one architecture that has them.
_ARCHITECTURES = {"learned": "opt", "alibi": "bloom", "rotary": "llama"}


def architecture(m: config.Model) -> str:
    """Which of opt, bloom and llama equals a model.

    Raises:
      WrongInput: none does; the message names every switch that stands in the way.
    """
    name = _ARCHITECTURES.get(m.positions)
    if name is None:
        raise WrongInput(
            f"model.positions={m.positions} has no counterpart among OPT, BLOOM and Llama; export "
            "with --format safetensors"
        )
    wanted: dict[str, tuple[object, bool]] = {
        "block": (m.block, m.block == "serial"),
        "qk_norm": (m.qk_norm, not m.qk_norm),
        "isolate_documents": (m.isolate_documents, not m.isolate_documents),
        "norm": (m.norm, m.norm == ("rms" if name == "llama" else "layernorm")),
        "activation": (m.activation, m.is_gated == (name == "llama")),
        "embedding_norm": (m.embedding_norm, m.embedding_norm == (name == "bloom")),
        "num_heads": (m.num_heads, m.width % m.num_heads == 0),
    }
    if name != "llama":
        all_heads = m.num_key_value_heads == m.num_heads
        wanted["num_key_value_heads"] = m.num_key_value_heads, all_heads
        wanted["head_size"] = m.head_size, m.head_size * m.num_heads == m.width
    if name == "bloom":
        wanted["activation"] = m.activation, m.activation == "gelu"
        four_times = m.feed_forward_size == 4 * m.width
        wanted["feed_forward"] = m.feed_forward_size, four_times
    if wrong := [
        f"model.{key}={_plain(value)}" for key, (value, fits) in wanted.items() if not fits
    ]:
        raise WrongInput(
            f"{', '.join(wrong)}: no counterpart in {_TITLES[name]}, which model.positions="
            f"{m.positions} points to; export with --format safetensors"
        )
    return name


_TITLES = {"opt": "OPT", "bloom": "BLOOM", "llama": "Llama"}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclasses.dataclass(frozen=True)
class _Layers:
    """A model's parameters by layer, in float32, as far as all three architectures agree."""

    m: config.Model
    weights: Weights

    def top(self, name: str) -> np.ndarray:
        return self.weights[name].astype(np.float32)

    def table(self, name: str) -> np.ndarray:
        """A table over the vocabulary, without its padding."""
        return self.top(name)[: self.m.vocabulary_size]

    def of(self, layer: int, name: str) -> np.ndarray:
        return self.weights[f"layers/{name}"][layer].astype(np.float32)

    def norm(self, layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """What a norm multiplies by, and adds."""
        scale_D = 1 + self.of(layer, f"{name}_scale_D")
        bias = f"{name}_bias_D"
        has = f"layers/{bias}" in self.weights
        return scale_D, self.of(layer, bias) if has else np.zeros_like(scale_D)

    def final_norm(self, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """Of the norm before the logits, both times `factor`."""
        scale_D = np.ones(self.m.width, np.float32)
        bias_D = np.zeros_like(scale_D)
        if self.m.final_norm_scale:
            scale_D = 1 + self.top("final_norm_scale_D")
            if "final_norm_bias_D" in self.weights:
                bias_D = self.top("final_norm_bias_D")
        return _times(scale_D, factor), _times(bias_D, factor)

    @property
    def score_factor(self) -> float:
        """What queries are multiplied by, so that 1/sqrt(K) does the rest."""
        return self.m.score_scale * math.sqrt(self.m.head_size)

    def attention(self, layer: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Kernels [out, in] and biases of q, k, v and o."""
        D = self.m.width
        shared = "" if self.m.num_key_value_heads == 1 else "G"
        found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        for short, name, axes, bias in (
            ("q", "query", "DHK", "HK"),
            ("k", "key", f"D{shared}K", f"{shared}K"),
            ("v", "value", f"D{shared}K", f"{shared}K"),
        ):
            factor = self.score_factor if short == "q" else 1.0
            kernel = _times(self.of(layer, f"w_{name}_{axes}").reshape(D, -1).T, factor)
            added = None
            if self.m.biases:
                added = _times(self.of(layer, f"{name}_bias_{bias}").reshape(-1), factor)
            found[short] = kernel, added
        out = self.of(layer, "w_attention_HKD").reshape(-1, D).T
        found["o"] = out, self.of(layer, "attention_bias_D") if self.m.biases else None
        return found

    def feed_forward(self, layer: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Kernels [out, in] and biases of gate, up and down, as far as they are there."""
        found = {}
        for name, axes in (("gate", "DF"), ("up", "DF"), ("down", "FD")):
            if name != "gate" or self.m.is_gated:
                bias = self.of(layer, f"{name}_bias_{axes[1]}") if self.m.biases else None
                found[name] = self.of(layer, f"w_{name}_{axes}").T, bias
        return found


def _times(x: np.ndarray, factor: float) -> np.ndarray:
    """In float32, rounded once."""
    return x if factor == 1 else (x.astype(np.float64) * factor).astype(np.float32)


def _put(into: Weights, name: str, kernel: np.ndarray, bias: np.ndarray | None) -> None:
    into[f"{name}.weight"] = kernel
    if bias is not None:
        into[f"{name}.bias"] = bias


def converted(model: Model) -> tuple[dict[str, Any], Weights]:
    """The content of config.json, and weights by their names there, float32.

    Raises:
      WrongInput: as `architecture`.
    """
    m = model.settings.model
    name = architecture(m)
    of_each = {"opt": _opt, "bloom": _bloom, "llama": _llama}[name]
    settings, weights = of_each(m, _Layers(m, model.weights))
    return {
        "architectures": [
            {"opt": "OPTForCausalLM", "bloom": "BloomForCausalLM", "llama": "LlamaForCausalLM"}[
                name
            ]
        ],
        "model_type": name,
        "vocab_size": m.vocabulary_size,
        "hidden_size": m.width,
        "tie_word_embeddings": m.tied_embedding,
        "torch_dtype": "float32",
        # A text begins with the end of a document.
        "bos_token_id": model.contents.end_of_document,
        "eos_token_id": model.contents.end_of_document,
        "pad_token_id": None,
        **settings,
    }, weights


def _unembedding(m: config.Model, layers: _Layers, stream: float) -> tuple[Weights, float]:
    """The table of an untied model; what the last norm is multiplied by.

    Args:
      stream: what the embedding is multiplied by.
    """
    if m.tied_embedding:
        return {}, m.output_scale / stream
    return {"lm_head.weight": layers.table("unembedding_VD")}, m.output_scale


def _llama(m: config.Model, layers: _Layers) -> tuple[dict[str, Any], Weights]:
    found, last = _unembedding(m, layers, m.embedding_scale)
    found["model.embed_tokens.weight"] = _times(layers.table("embedding_VD"), m.embedding_scale)
    for n in range(m.num_layers):
        place = f"model.layers.{n}"
        found[f"{place}.input_layernorm.weight"] = layers.norm(n, "attention_norm")[0]
        found[f"{place}.post_attention_layernorm.weight"] = layers.norm(n, "feed_forward_norm")[0]
        for short, both in layers.attention(n).items():
            _put(found, f"{place}.self_attn.{short}_proj", *both)
        for kernel, both in layers.feed_forward(n).items():
            _put(found, f"{place}.mlp.{kernel}_proj", *both)
    found["model.norm.weight"] = layers.final_norm(last)[0]
    return {
        "intermediate_size": m.feed_forward_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_key_value_heads,
        "head_dim": m.head_size,
        "hidden_act": _ACTIVATIONS[m.activation],
        "max_position_embeddings": m.sequence_length,
        "rms_norm_eps": EPSILON,
        "rope_theta": m.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_base},
        "attention_bias": m.biases,
        "mlp_bias": m.biases,
    }, found


def _opt(m: config.Model, layers: _Layers) -> tuple[dict[str, Any], Weights]:
    wider = math.sqrt(_OPT_EPSILON / EPSILON)
    stream = wider * m.embedding_scale
    found, last = _unembedding(m, layers, stream)
    place = "model.decoder"
    found[f"{place}.embed_tokens.weight"] = _times(layers.table("embedding_VD"), stream)
    rows_LD = _times(layers.top("position_embedding_LD"), wider)
    unused = np.zeros((_OPT_OFFSET, m.width), np.float32)
    found[f"{place}.embed_positions.weight"] = np.concatenate([unused, rows_LD])
    for n in range(m.num_layers):
        layer = f"{place}.layers.{n}"
        for theirs, ours in (
            ("self_attn_layer_norm", "attention_norm"),
            ("final_layer_norm", "feed_forward_norm"),
        ):
            _put(found, f"{layer}.{theirs}", *layers.norm(n, ours))
        attention = layers.attention(n)
        for short in "qkv":
            _put(found, f"{layer}.self_attn.{short}_proj", *attention[short])
        feed_forward = layers.feed_forward(n)
        _put(found, f"{layer}.fc1", *feed_forward["up"])
        for theirs, (kernel, bias) in (
            ("self_attn.out_proj", attention["o"]),
            ("fc2", feed_forward["down"]),
        ):
            wide = None if bias is None else _times(bias, wider)
            _put(found, f"{layer}.{theirs}", _times(kernel, wider), wide)
    _put(found, f"{place}.final_layer_norm", *layers.final_norm(last))
    return {
        "ffn_dim": m.feed_forward_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "activation_function": _ACTIVATIONS[m.activation],
        "max_position_embeddings": m.sequence_length,
        "word_embed_proj_dim": m.width,
        "do_layer_norm_before": True,
        "enable_bias": m.biases,
        "dropout": m.dropout,
        "attention_dropout": m.attention_dropout,
    }, found


def _bloom(m: config.Model, layers: _Layers) -> tuple[dict[str, Any], Weights]:
    found, last = _unembedding(m, layers, m.embedding_scale)
    D, H, K = m.width, m.num_heads, m.head_size
    table_VD = _times(layers.table("embedding_VD"), m.embedding_scale)
    found["transformer.word_embeddings.weight"] = table_VD
    scale_D = 1 + layers.top("embedding_norm_scale_D")
    bias_D = layers.top("embedding_norm_bias_D")
    _put(found, "transformer.word_embeddings_layernorm", scale_D, bias_D)
    for n in range(m.num_layers):
        place = f"transformer.h.{n}"
        _put(found, f"{place}.input_layernorm", *layers.norm(n, "attention_norm"))
        _put(found, f"{place}.post_attention_layernorm", *layers.norm(n, "feed_forward_norm"))
        attention, feed_forward = layers.attention(n), layers.feed_forward(n)
        # One kernel whose outputs are [head, query or key or value, K].
        kernels = np.stack([attention[short][0].reshape(H, K, D) for short in "qkv"], axis=1)
        biases = [_or_zeros(attention[short][1], H * K).reshape(H, K) for short in "qkv"]
        _put(
            found,
            f"{place}.self_attention.query_key_value",
            kernels.reshape(3 * H * K, D),
            np.stack(biases, axis=1).reshape(-1),
        )
        for theirs, (kernel, bias) in (
            ("self_attention.dense", attention["o"]),
            ("mlp.dense_h_to_4h", feed_forward["up"]),
            ("mlp.dense_4h_to_h", feed_forward["down"]),
        ):
            _put(found, f"{place}.{theirs}", kernel, _or_zeros(bias, kernel.shape[0]))
    _put(found, "transformer.ln_f", *layers.final_norm(last))
    return {
        "n_layer": m.num_layers,
        "n_head": m.num_heads,
        "layer_norm_epsilon": EPSILON,
        "seq_length": m.sequence_length,
        "hidden_dropout": m.dropout,
        "attention_dropout": m.attention_dropout,
    }, found


def _or_zeros(bias: np.ndarray | None, size: int) -> np.ndarray:
    return np.zeros(size, np.float32) if bias is None else bias


def write(model: Model, out: pathlib.Path, card: str) -> None:
    """Write a folder that transformers' `from_pretrained` takes.

    Raises:
      WrongInput: the model has no counterpart, or the folder exists.
      CannotDo: it cannot be written.
    """
    settings, weights = converted(model)
    with portable.new_folder(out) as place:
        portable.save_weights(place / WEIGHTS, weights, "pt")
        (place / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (place / CARD).write_text(card, encoding="utf-8")
        if model.tokenizer is not None:
            shutil.copyfile(model.tokenizer, place / model.tokenizer.name)
