"""Cached decoding against whole forward passes, and what a row may depend on.

Letters as in model.py and use/decode.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from palm_jax import attention, config, loss, model, precision, sharding
from palm_jax.corpus.tokenizers import ByteTokenizer
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.use import decode, generate, sample

# All sizes differ, so that no two axes can be taken for one another.
SIZES = {
    "num_layers": 2,
    "width": 24,
    "num_heads": 6,
    "head_size": 4,
    "feed_forward": 28,
    "vocabulary_size": 37,
    "vocabulary_multiple": 8,
    "sequence_length": 14,
}
# Together they have every switch.
OPTIONS: dict[str, dict[str, Any]] = {
    "palm": {},
    "gpt": {
        "block": "serial",
        "norm": "layernorm",
        "final_norm_scale": True,
        "biases": True,
        "num_key_value_heads": 6,
        "activation": "relu",
        "positions": "learned",
        "logit_scale": 0.3,
        "tied_embedding": False,
        "attention_dropout": 0.1,  # of training alone
    },
    "grouped": {
        "num_key_value_heads": 3,
        "positions": "alibi",
        "activation": "gelu",
        "embedding_norm": True,
        "embedding_scale": 0.5,
        "isolate_documents": True,
        "biases": True,
        "norm": "layernorm",
    },
    "deepnorm": {
        "block": "deepnorm",
        "num_key_value_heads": 2,
        "activation": "geglu",
        "qk_norm": True,
        "positions": "none",
        "mup_base_width": 10,
        "mup_base_head_size": 3,
    },
    "qk_norm": {"qk_norm": True, "isolate_documents": True, "rope_base": 50.0},
}
NEW = 6
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Compiles in half the time. For results that are compared within tolerances.
QUICK = {"xla_backend_optimization_level": 0}


def model_of(**switches: Any) -> config.Model:
    return config.Model.model_validate(SIZES | switches)


def random_params(m: config.Model) -> model.Params:
    """Parameters of no special value: initial norm scales are zero and would hide faults."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, shape: Any) -> jax.Array:
        spread = 1.0 if "embedding" in path[-1].key else 0.3
        return jnp.asarray(rng.normal(size=shape.shape) * spread, jnp.float32)

    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), m))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def expected_logits(params: Any, text: list[int], m: config.Model, end: int) -> np.ndarray:
    """Of every position of a text, by a forward pass in NumPy: f64[L, V]."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    ids_BL = np.asarray([text])
    documents_BL = formulas.documents(ids_BL, end) if m.isolate_documents else None
    return formulas.logits(formulas.hidden(wide, ids_BL, m, documents_BL), wide, m)[0]


# --- the model's part ---------------------------------------------------------------------


def continued_logits(m: config.Model, end: int) -> Any:
    """(params, ids [B, L], kept, first_B, texts [B, S]) -> (logits [B, L, V], kept)."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def call(params, ids_BL, kept, first_B, texts_BS):
        num_layers = m.num_layers
        layers = tuple(
            {name: x[i] for name, x in params["layers"].items()} for i in range(num_layers)
        )
        hidden_BLD, kept = model.continued(
            {**params, "layers": layers},
            ids_BL,
            kept,
            first_B,
            settings=m,
            dtype=jnp.float32,
            documents_BS=attention.document_numbers(texts_BS, end) if m.isolate_documents else None,
        )
        table_VD = model.unembedding(params)
        return loss.logits(hidden_BLD, table_VD, m.vocabulary_size, scale=m.output_scale), kept

    return call


@pytest.mark.parametrize("options", OPTIONS)
def test_cached_logits_are_those_of_a_whole_forward_pass(options):
    """A prompt of 5 tokens and one of 4 beside it; 6 new ones, the likeliest by the formulas.

    Three tokens are read at a time, of which all beyond a row's own are padding.
    """
    m = model_of(**OPTIONS[options])
    params = random_params(m)
    texts = [[3, 9, 30, 9, 12], [5, 9, 21, 33]]
    end, chunk, num_slots = 9, 3, 15
    call = continued_logits(m, end)
    kept = model.nothing_kept(m, jnp.float32, len(texts), num_slots)
    groups = m.num_key_value_heads
    assert {x.shape for x in jax.tree.leaves(kept)} == {(2, groups, num_slots, 4)}

    def padded(texts: list[list[int]]) -> np.ndarray:
        return np.asarray([text + [31] * (num_slots - len(text)) for text in texts], np.int32)

    for first in range(0, 6, chunk):
        ids_BL = padded(texts)[:, first : first + chunk]
        logits_BLV, kept = call(params, ids_BL, kept, np.full(2, first), padded(texts))
        for row, text in enumerate(texts):
            whole_LV = expected_logits(params, text, m, end)[first : first + chunk]
            # As in test_model: float32 is good to 6e-8, and two layers lose a factor of ten.
            np.testing.assert_allclose(
                logits_BLV[row, : len(whole_LV), : m.vocabulary_size], whole_LV, rtol=0, atol=1e-5
            )
    for _ in range(NEW):
        lasts_B = np.asarray([len(text) - 1 for text in texts])
        ids_BL = np.stack(
            [padded(texts)[row, last : last + chunk] for row, last in enumerate(lasts_B)]
        )
        logits_BLV, kept = call(params, ids_BL, kept, lasts_B, padded(texts))
        for row, text in enumerate(texts):
            whole_V = expected_logits(params, text, m, end)[-1]
            found_V = logits_BLV[row, 0, : m.vocabulary_size]
            np.testing.assert_allclose(found_V, whole_V, rtol=0, atol=1e-5)
            assert int(np.argmax(found_V)) == int(np.argmax(whole_V))
            text.append(int(np.argmax(whole_V)))


# --- whole rows ---------------------------------------------------------------------------

END = 36


def settings_of(
    microbatch: int = 2, mesh: tuple[int, int, int] = (1, 1, 1), **switches: Any
) -> Any:
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    return config.from_dict(
        {
            "steps": 1,
            "model": SIZES | switches,
            "data": {"corpus": "none", "ramp": {"sizes": [16]}},
            "mesh": sizes,
            "numerics": {"microbatch": microbatch, "lanes": 8},
        }
    )


class Words(ByteTokenizer):
    """Some bytes alone, and an end."""

    vocabulary_size = END + 1
    end_of_document = END


@dataclasses.dataclass
class Ready:
    decoder: decode.Decoder
    weights: decode.Weights

    def __call__(
        self,
        *prompts: list[int],
        temperature: float = 1.0,
        max_tokens: int | None = NEW,
        **more: Any,
    ) -> list[generate.Row]:
        sampling = sample.Sampling(temperature, more.pop("top_k", None), more.pop("top_p", 1.0), 5)
        arrays = [np.asarray(prompt, np.int32) for prompt in prompts]
        given = self.decoder, self.weights, Words(), arrays, sampling, max_tokens
        return generate.generate(*given, **more).rows


def ready(settings: config.Config, end: int = END) -> Ready:
    mesh = sharding.make_mesh(settings.mesh)
    params = random_params(settings.model)
    shards = sharding.shardings(mesh, params)
    decoder = decode.make_decoder(settings, mesh, end)
    return Ready(decoder, decoder.weights(jax.device_put(params, shards)))


@pytest.fixture(scope="module")
def chunks():
    """Prompts are read four tokens at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "CHUNK", 4)
        yield


SWITCHES = {"num_key_value_heads": 2, "isolate_documents": True}


@pytest.fixture(scope="module")
def pairs(chunks):
    """A decoder of two rows at a time."""
    return ready(settings_of(**SWITCHES))


A, B, C = [36, 1, 2, 3, 4, 5, 6, 7], [36, 8], [36, 3, 36, 4, 11]


def as_bytes(row: generate.Row) -> bytes:
    return np.asarray(row.tokens).tobytes() + np.asarray(row.logprobs).tobytes()


def test_log_probabilities_and_greedy_tokens_are_those_of_the_formulas(pairs):
    m = pairs.decoder.settings.model
    params = random_params(m)
    for prompt, row in zip((A, B, C), pairs(A, B, C, temperature=0), strict=True):
        logits_LV = expected_logits(params, prompt + row.tokens, m, END)[len(prompt) - 1 : -1]
        assert row.tokens == logits_LV.argmax(axis=-1).tolist()
        log_z_L = np.log(np.exp(logits_LV).sum(axis=-1))
        np.testing.assert_allclose(
            row.logprobs, logits_LV.max(axis=-1) - log_z_L, rtol=0, atol=1e-5
        )


def test_log_probabilities_are_the_models_own_whatever_is_drawn_from(pairs):
    m = pairs.decoder.settings.model
    (row,) = pairs(A, temperature=3.0)
    logits_LV = expected_logits(random_params(m), A + row.tokens, m, END)[len(A) - 1 : -1]
    chosen_L = logits_LV[np.arange(len(row.tokens)), row.tokens]
    expected_L = chosen_L - np.log(np.exp(logits_LV).sum(axis=-1))
    np.testing.assert_allclose(row.logprobs, expected_L, rtol=0, atol=1e-5)


def test_a_row_has_the_same_bytes_whatever_its_neighbours_and_their_number(pairs):
    alone = pairs(B)
    for others in ([A], [C, A], [C, A, B, C]):
        found = pairs(B, *others)
        assert as_bytes(found[0]) == as_bytes(alone[0])
    second = [pairs(first, A)[1] for first in (B, C, A)]
    assert len({as_bytes(row) for row in second}) == 1
    assert second[0].tokens != pairs(A)[0].tokens  # another row, other noise


def test_what_fills_up_a_row_changes_nothing(pairs, monkeypatch):
    wanted = pairs(B, A)
    rows = pairs.decoder.rows

    def with_rubbish(self, *arguments):
        made = rows(*arguments)
        rubbish = np.random.default_rng(0).integers(0, 37, made.tokens_RS.shape)
        is_prompt = np.arange(made.tokens_RS.shape[1]) < np.asarray(made.lengths_R)[:, None]
        tokens = np.where(is_prompt, made.tokens_RS, rubbish).astype(np.int32)
        return made._replace(tokens_RS=jax.device_put(tokens, made.tokens_RS.sharding))

    monkeypatch.setattr(decode.Decoder, "rows", with_rubbish)
    assert list(map(as_bytes, pairs(B, A))) == list(map(as_bytes, wanted))


def test_tokens_are_told_as_they_are_made_and_are_the_same(pairs, monkeypatch):
    monkeypatch.setattr(generate, "AT_ONCE", 2)
    pieces: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    ends: dict[int, list[bool]] = {0: [], 1: [], 2: []}

    def tell(row: int, tokens: list[int], is_last: bool) -> None:
        pieces[row].append(tokens)
        ends[row].append(is_last)

    told = pairs(A, B, C, tell=tell)
    assert list(map(as_bytes, told)) == list(map(as_bytes, pairs(A, B, C)))
    for number, row in enumerate(told):
        assert list(itertools.chain(*pieces[number])) == row.tokens
        assert max(map(len, pieces[number])) <= 2
        assert ends[number] == [False] * (len(ends[number]) - 1) + [True]


def test_rows_end_at_the_context_where_nobody_says_how_many(pairs):
    rows = pairs(A, [36, *range(13)], max_tokens=None)
    assert [row.ended for row in rows] == ["context", "context"]
    # A context of 14 is read, and one token more is said.
    assert [len(row.tokens) for row in rows] == [7, 1]


def test_a_row_ends_with_its_document_and_the_others_go_on(pairs):
    """Of 37 words one is the end, so that among some rows some end before their six tokens."""
    prompts = [A, B, C] * 8
    rows = pairs(*prompts)
    ends = [row.tokens.index(END) for row in rows if END in row.tokens]
    assert ends
    assert max(ends) > 0
    for row in rows:
        is_whole = row.tokens[-1] == END
        assert row.ended == ("end_of_document" if is_whole else "max_tokens")
        assert len(row.tokens) == NEW or is_whole
        assert END not in row.tokens[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 8, 1)])
def test_a_row_has_the_same_bytes_on_any_data_parallel_mesh(chunks, pairs, mesh):
    wanted = pairs(A, B, C, B, A)
    found = ready(settings_of(2, mesh, **SWITCHES))(A, B, C, B, A)
    assert list(map(as_bytes, found)) == list(map(as_bytes, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["palm", "gpt"])
def test_heads_and_vocabulary_may_be_split_over_tensor(chunks, options):
    switches = OPTIONS[options] | {"vocabulary_multiple": 2}
    one, two = (ready(settings_of(2, mesh, **switches))(A, B, C) for mesh in ((1, 1, 1), (1, 2, 2)))
    for wanted, found in zip(one, two, strict=True):
        assert found.tokens == wanted.tokens
        # Other orders of sums, in float32.
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bfloat16_pure", "float8"])
def test_narrow_formats_generate(chunks, policy):
    settings = settings_of().model_copy(update={"precision": config.Precision(policy=policy)})
    compute = precision.compute_dtype(settings.precision)
    rows = ready(settings)(A, B, temperature=0)
    m = settings.model
    for prompt, row in zip((A, B), rows, strict=True):
        ids_BL = jnp.asarray([prompt + row.tokens[:-1]])
        hidden_BLD = model.hidden(
            jax.tree.map(lambda x: x.astype(compute), random_params(m)),
            ids_BL,
            settings=m,
            dtype=compute,
        )
        table_VD = random_params(m)["embedding_VD"].astype(compute)
        logits_LV = loss.logits(hidden_BLD, table_VD, m.vocabulary_size, scale=m.output_scale)[0]
        wanted = jax.nn.log_softmax(logits_LV)[len(prompt) - 1 :]
        found = wanted[np.arange(len(row.tokens)), np.asarray(row.tokens)]
        # Eight bits of a hidden state of size 1, in a logit of size 4.
        np.testing.assert_allclose(row.logprobs, found, rtol=0, atol=0.1)


# --- what is refused, and how much is kept ------------------------------------------------


def test_prompts_that_leave_no_room_are_refused_with_numbers():
    prompt = bytes(range(14))
    with pytest.raises(WrongInput, match=r"--prompt has 15 tokens.*model\.sequence_length=14"):
        generate.prompt_tokens(Words(), prompt, 14, None, "--prompt")
    with pytest.raises(WrongInput, match=r"--max-tokens 3 after the 13 tokens.*ask for 2 at most"):
        generate.prompt_tokens(Words(), prompt[:12], 14, 3, "--prompt")
    assert generate.prompt_tokens(Words(), prompt[:12], 14, 2, "--prompt").tolist() == [
        END,
        *range(12),
    ]


def test_a_model_without_finite_scores_is_refused(pairs):
    layers = pairs.weights["layers"]
    broken = {**layers[0], "w_down_FD": layers[0]["w_down_FD"] * np.float32(np.nan)}
    weights = {**pairs.weights, "layers": (broken, *layers[1:])}
    with pytest.raises(CannotDo, match="not finite"):
        dataclasses.replace(pairs, weights=weights)(A)


@pytest.mark.parametrize(
    ("groups", "bytes_per_token"), [(48, 5_799_936), (8, 966_656), (1, 120_832)]
)
def test_the_cache_of_palm_540b_has_the_bytes_of_its_keys_and_values(groups, bytes_per_token):
    """118 layers, heads of 256, bfloat16, as the facts sheet has them."""
    switches = [f"model.num_key_value_heads={groups}", "mesh={data: 1, fsdp: 1, tensor: 1}"]
    settings = config.load(CONFIGS / "palm_540b.yaml", switches)
    decoder = decode.make_decoder(settings, sharding.make_mesh(settings.mesh), 0, microbatch=1)
    assert 2048 < decoder.num_slots <= 2048 + 64
    assert decoder.cache_bytes == decoder.num_slots * bytes_per_token


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 6])
def test_a_token_copies_nothing_of_what_is_kept(groups):
    """A copy would cost as much as reading it; XLA:CPU makes some where an update is used twice."""
    one = ready(settings_of(1, num_key_value_heads=groups))
    text = one.decoder.read(one.weights, one.decoder.rows([], []))
    draw, flags = sample.draw_of(sample.Sampling(), 37), {"is_greedy": True, "is_filtered": False}
    lowered = one.decoder.advance.lower(one.weights, text, draw, jnp.int32(1), **flags)
    module = lowered.compile().as_text()
    kept = f"f32[1,{groups},{one.decoder.num_slots},4]"
    assert kept in module
    made = [line for line in module.splitlines() if f"= {kept}" in line]
    assert not [line for line in made if " copy(" in line]


def test_reading_a_prompt_goes_on_from_any_length(pairs):
    """All prompts from one token to the whole context, through every number of chunks."""
    m = pairs.decoder.settings.model
    prompts = [[36, *range(length)] for length in range(14)]
    params = random_params(m)
    whole_LV = expected_logits(params, prompts[-1], m, END)
    for row, prompt in zip(pairs(*prompts, temperature=0, max_tokens=1), prompts, strict=True):
        wanted_V = whole_LV[len(prompt) - 1]
        assert row.tokens == [int(wanted_V.argmax())]
        log_z = np.log(np.exp(wanted_V).sum())
        assert row.logprobs[0] == pytest.approx(wanted_V.max() - log_z, abs=1e-5)
