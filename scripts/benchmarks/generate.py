"""What cached keys and values are worth, and how near decoding comes to the memory's speed.

Three tables, of models with parameters of no special value:

- 256 tokens generated with a cache, and by a whole forward pass for each token (over a length
  rounded up to 64, so that few programs are compiled);
- a token's time against reading arrays as large as the parameters, in the fastest of some ways;
- one head of keys and values against one for each head, at equal width.

What is compared alternates, and each one's fastest round counts. Settings given as key=value hold
for all models, so that `model.num_layers=1` tries the benchmark out.
"""

from __future__ import annotations

import collections.abc
import sys
import time
from typing import Any, NamedTuple

import _command

from palm_jax import config, start

ROUNDS = 6
CONFIG, NUM_TOKENS, BUCKET = "configs/quickstart.yaml", 256, 64
# 122 million parameters, of which each token reads all.
WIDE = {"num_layers": 6, "width": 1024, "num_heads": 8, "head_size": 128}
WIDE |= {"vocabulary_size": 32000, "sequence_length": 512}
HEADS = {"num_layers": 4, "width": 512, "num_heads": 8, "head_size": 64, "sequence_length": 1024}
HEADS_ROWS = 8


def settings_of(model: dict[str, Any], overrides: list[str]) -> config.Config:
    switches = [f"model.{key}={value}" for key, value in model.items()]
    return config.load(CONFIG, [*switches, *overrides])


class Ready(NamedTuple):
    decoder: Any
    params: Any
    weights: Any
    num_bytes: int  # of the weights


def ready(settings: config.Config, microbatch: int = 1) -> Ready:
    import jax
    import numpy as np

    from palm_jax import model, sharding
    from palm_jax.use import decode

    mesh = sharding.make_mesh(settings.mesh)
    # No token is this one, so that no row ends early.
    decoder = decode.make_decoder(settings, mesh, -1, microbatch)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), settings.model))
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32) * 0.05, shapes)
    params = jax.device_put(params, sharding.shardings(mesh, params))
    weights = decoder.weights(params)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
    return Ready(decoder, params, weights, num_bytes)


def fastest(calls: dict[str, collections.abc.Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call; the first round compiles."""
    import jax

    seconds = dict.fromkeys(calls, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def greedy(one: Ready, prompts: list[Any], num_tokens: int) -> Any:
    import jax.numpy as jnp

    from palm_jax.use import sample

    decoder = one.decoder
    draw = sample.draw_of(sample.Sampling(temperature=0), decoder.settings.model.vocabulary_size)
    text = decoder.read(one.weights, decoder.rows(prompts, [num_tokens] * len(prompts)))
    most = jnp.int32(num_tokens)
    return decoder.advance(one.weights, text, draw, most, is_greedy=True, is_filtered=False)


def against_recomputing(overrides: list[str]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from palm_jax import loss, model, precision

    one = ready(settings_of({}, overrides))
    settings = one.decoder.settings
    m, dtype = settings.model, precision.compute_dtype(settings.precision)
    num_tokens = min(NUM_TOKENS, m.sequence_length)

    @jax.jit
    def next_token(params: Any, ids_BL: Any, last: Any) -> Any:
        hidden_BLD = model.hidden(params, ids_BL, settings=m, dtype=dtype)
        of_last = jax.lax.dynamic_slice_in_dim(hidden_BLD, last, 1, axis=1)
        table_VD = model.unembedding(params)
        scores = loss.logits(of_last, table_VD, m.vocabulary_size, scale=m.output_scale)
        return jnp.argmax(scores[0, 0])

    def recomputed() -> Any:
        tokens = np.zeros((1, num_tokens + 1), np.int32)
        for last in range(num_tokens):
            length = min(-(-(last + 1) // BUCKET) * BUCKET, num_tokens)
            tokens[0, last + 1] = next_token(one.params, tokens[:, :length], last)
        return tokens[0]

    def cached() -> Any:
        return greedy(one, [np.zeros(1, np.int32)], num_tokens).tokens_RS[0]

    seconds = fastest({"cached": cached, "recomputed": recomputed})
    same = int(np.sum(np.asarray(cached())[1 : num_tokens + 1] == recomputed()[1:]))
    print("| tokens | cached, s | recomputed, s | recomputed : cached | equal tokens |")
    print("|--|--|--|--|--|")
    ratio = seconds["recomputed"] / seconds["cached"]
    print(
        f"| {num_tokens} | {seconds['cached']:.3f} | {seconds['recomputed']:.3f} | {ratio:.1f} "
        f"| {same} |\n",
        flush=True,
    )


def against_the_memory(overrides: list[str]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    one = ready(settings_of(WIDE, overrides))
    num_tokens = 16
    rows = 1024
    table = jnp.ones((rows, one.num_bytes // 4 // rows))
    row, column = jnp.ones((1, rows)), jnp.ones((table.shape[1], 1))

    def read_by(function: Any, *arguments: Any) -> collections.abc.Callable[[], Any]:
        compiled = jax.jit(function)
        return lambda: compiled(*arguments)

    reads = {
        "sum": read_by(jnp.sum, table),
        "sums of rows": read_by(lambda x: jnp.sum(x, axis=1), table),
        "maximum": read_by(jnp.max, table),
        "row x table": read_by(jnp.matmul, row, table),
        "table x column": read_by(jnp.matmul, table, column),
    }

    def decode() -> Any:
        return greedy(one, [np.zeros(1, np.int32)], num_tokens).lengths_R

    seconds = fastest({"decode": decode, **reads})
    per_token = seconds.pop("decode") / num_tokens
    best = min(seconds, key=lambda name: seconds[name])
    print("| | GB/s |\n|--|--|")
    for name, time_of_one in seconds.items():
        print(f"| reading: {name} | {one.num_bytes / time_of_one / 1e9:.1f} |")
    print(f"| decoding {one.num_bytes / 1e6:.0f} MB | {one.num_bytes / per_token / 1e9:.1f} |")
    print(
        f"\n{one.num_bytes // 4:,} parameters; decoding : fastest read ({best}) = "
        f"{seconds[best] / per_token:.2f}\n",
        flush=True,
    )


def of_heads(overrides: list[str]) -> None:
    import numpy as np

    kinds = {"MQA": 1, "MHA": HEADS["num_heads"]}
    made = {
        kind: ready(settings_of(HEADS | {"num_key_value_heads": num}, overrides), HEADS_ROWS)
        for kind, num in kinds.items()
    }
    num_tokens = 32
    # Slots beyond a row's tokens are read like the others, so that any prompt does.
    prompts = [np.zeros(1, np.int32)] * HEADS_ROWS
    seconds = fastest(
        {
            kind: lambda one=one: greedy(one, prompts, num_tokens).lengths_R  # type: ignore[misc]
            for kind, one in made.items()
        }
    )
    print(f"| {HEADS_ROWS} rows | parameters | cache, MB | s a token |")
    print("|--|--|--|--|")
    for kind, one in made.items():
        print(
            f"| {kind} | {one.num_bytes // 4:,} | {one.decoder.cache_bytes / 1e6:.1f} "
            f"| {seconds[kind] / num_tokens:.4f} |"
        )
    print(f"\na token, MHA : MQA = {seconds['MHA'] / seconds['MQA']:.2f}")


def main() -> None:
    overrides = sys.argv[1:]
    start.start(settings_of({}, overrides))
    against_recomputing(overrides)
    against_the_memory(overrides)
    of_heads(overrides)


if __name__ == "__main__":
    _command.run(main)
