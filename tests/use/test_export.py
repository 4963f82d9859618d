"""Exported models: their bits, their card, runs that begin with them, Hugging Face's own code."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from palm_jax import cli, config, loss, model, train
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import digests, logbook
from palm_jax.record.folder import RunFolder
from palm_jax.use import breakdown, hugging_face, material, portable, trained


@pytest.fixture(scope="module")
def in_process():
    """The commands, without the start of a process of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palm_jax.cli.export.prepare_one_cpu", lambda settings: None)
        yield lambda *words: CliRunner().invoke(cli.app, list(map(str, words)))


@pytest.fixture(scope="module")
def exported(run, in_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "model"
    done = in_process("export", run, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 8
    return out


@pytest.fixture(scope="module")
def imported(exported, in_process, tmp_path_factory):
    path = tmp_path_factory.mktemp("import") / "run"
    done = in_process("import", exported, "--run", path, "--json")
    assert done.exit_code == 0, done.output
    return path


# --- bits ---


def test_a_checkpoints_parameters_are_in_the_file_with_their_bits(exported, moment):
    there = safetensors.numpy.load_file(exported / "model.safetensors")
    wanted = digests.named_leaves(moment.params)
    assert there.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert there[path].dtype == leaf.dtype
        assert there[path].tobytes() == np.asarray(leaf).tobytes()


def test_bfloat16_and_transposed_arrays_keep_their_bits(tmp_path):
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    weights = {"a": bits.view(jax.numpy.bfloat16), "b": np.float32(bits).T}
    portable.save_weights(tmp_path / "w.safetensors", weights, "palm_jax")
    there = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert there["a"].dtype == jax.numpy.bfloat16
    assert there["a"].tobytes() == bits.tobytes()
    np.testing.assert_array_equal(there["b"], weights["b"])


def test_an_imported_run_has_equal_bits_and_evaluates_alike(imported, found, moment, scorer):
    there = RunFolder(imported)
    with trained.opened(there, there.config()) as again:
        assert again.newest_step() == 8
        copy = again.at(8)
        assert int(again.course.segment.start_step) == 8
    for one, other in zip(
        jax.tree.leaves(copy.params), jax.tree.leaves(moment.params), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    held_out = material.of_split(found.corpus, "held_out")
    evaluations = [
        breakdown.break_down(scorer, params, held_out, found.corpus).evaluation
        for params in (copy.params, moment.params)
    ]
    assert evaluations[0] == evaluations[1]


def test_an_imported_run_trains_on_with_a_fresh_optimizer_and_the_schedule_it_had(imported):
    settings = config.load(imported / "config.yaml")
    outcome = train.train(settings.model_copy(update={"steps": 10}), imported)
    assert outcome.step == 10
    steps = [r for r in logbook.read(imported).records if r["event"] == "step"]
    assert [r["step"] for r in steps] == [8, 9]
    assert [r["computed"]["schedule_step"] for r in steps] == [8, 9]
    # PaLM's beta2 = 1 - k^-0.8 begins again with k = 1.
    assert steps[0]["computed"]["beta2"] == 0


def test_an_imported_run_is_exported_as_it_came(imported, exported, in_process, tmp_path):
    done = in_process("export", imported, "--step", 8, "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()


# --- the card ---


def test_the_card_says_what_the_records_say_and_what_they_do_not(exported, found):
    text = (exported / "README.md").read_text()
    splits = found.contents.splits
    for words in (
        found.contents.digest,
        f"{splits['train'].tokens:,} tokens",
        "target tokens up to step 8: 512",  # 8 steps of 8 sequences of 8
        "| `optimizer.name` | adafactor |",
        "incidents: none recorded",
        "| held_out |",
        "energy and emissions: unknown",
        "Licence",
    ):
        assert words in text
    recorded = trained.recorded_losses(found, found.corpus, "held_out")[8]
    assert f"| held_out | {recorded:.4f} |" in text


def test_the_card_of_an_older_checkpoint_knows_nothing_of_later_steps(run, in_process, tmp_path):
    done = in_process("export", run, "--step", 4, "--out", tmp_path / "older")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "older" / "README.md").read_text()
    assert "target tokens up to step 4: 256" in text
    assert "4 steps are in the logbook" in text


# --- refusals ---


def test_only_checkpoints_into_new_folders_are_exported(run, in_process, tmp_path, exported):
    done = in_process("export", run, "--step", 6, "--out", tmp_path / "x")
    assert isinstance(done.exception, WrongInput)
    assert "has: 4, 8" in str(done.exception)
    done = in_process("export", run, "--out", exported)
    assert isinstance(done.exception, WrongInput)
    assert not (tmp_path / "x").exists()


def test_a_changed_bit_and_a_missing_file_are_found(exported, tmp_path, in_process):
    damaged = shutil.copytree(exported, tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    done = in_process("import", damaged, "--run", tmp_path / "run")
    assert isinstance(done.exception, CannotDo)
    assert "other bits" in str(done.exception)
    (damaged / "model.safetensors").unlink()
    done = in_process("import", damaged, "--run", tmp_path / "run")
    assert isinstance(done.exception, CannotDo)
    assert not (tmp_path / "run").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongInput, match="no exported model"):
        portable.read(tmp_path / "empty")


def test_a_damaged_checkpoint_is_not_exported(run, in_process, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    state = copy / "segments" / "000" / "checkpoints" / "8" / "state"
    files = [path for path in state.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(len(content) // 4, len(content), len(content) // 4):
        content[place] ^= 1
    largest.write_bytes(content)
    done = in_process("export", copy, "--out", tmp_path / "out")
    assert isinstance(done.exception, CannotDo)
    assert "checkpoint 8" in str(done.exception)
    assert "use step 4 instead" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_settings_of_another_model_are_refused_by_the_array(exported, in_process, tmp_path):
    done = in_process("import", exported, "--run", tmp_path / "run", "model.width=32")
    assert isinstance(done.exception, WrongInput)
    assert "embedding_VD" in str(done.exception)


# --- Hugging Face ---

SIZES = {
    "num_layers": 2,
    "width": 24,
    "num_heads": 3,  # no power of two: ALiBi's slopes
    "head_size": 8,
    "num_key_value_heads": 3,
    "feed_forward": 40,
    "vocabulary_size": 61,
    "sequence_length": 12,
    "block": "serial",
    "final_norm_scale": True,
}
OPT = {**SIZES, "positions": "learned", "norm": "layernorm", "biases": True, "activation": "relu"}
BLOOM = {
    **SIZES,
    "positions": "alibi",
    "norm": "layernorm",
    "biases": True,
    "activation": "gelu",
    "embedding_norm": True,
    "feed_forward": 96,
}
LLAMA = {**SIZES, "tied_embedding": False}
MUP = {"mup_base_width": 12, "mup_base_head_size": 4}
MODELS = {
    "opt": {**OPT, "logit_scale": 1.0},
    "opt, tied, PaLM's scales": {**OPT, "embedding_scale": 3.0},
    "opt, untied, no biases, gelu": {
        **OPT,
        "tied_embedding": False,
        "biases": False,
        "activation": "gelu",
        "final_norm_scale": False,
    },
    "bloom": {**BLOOM, "logit_scale": 1.0},
    "bloom, untied, muP": {**BLOOM, **MUP, "tied_embedding": False},
    "bloom, no biases": {**BLOOM, "biases": False, "embedding_scale": 0.5},
    "llama": {**LLAMA, "logit_scale": 1.0},
    "llama, grouped queries": {**LLAMA, "num_heads": 4, "num_key_value_heads": 2, "head_size": 10},
    "llama, one key, tied, another base": {
        **LLAMA,
        "num_key_value_heads": 1,
        "tied_embedding": True,
        "rope_base": 500.0,
        "embedding_scale": 2.0,
    },
    "llama, biases, geglu, muP, no last scale": {
        **LLAMA,
        **MUP,
        "biases": True,
        "activation": "geglu",
        "final_norm_scale": False,
    },
}


def made_up(settings: config.Model) -> model.Params:
    """Parameters of which none is what a forgotten one would be: no zeros, no ones."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), settings))
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("switches", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_computes_the_same_logits(switches, found, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed; the extra `export` is it")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed; it comes with the extra `export`"
    )
    settings = config.Model.model_validate(switches)
    params = made_up(settings)
    whole = found.course.base.model_copy(update={"model": settings})
    origin = portable.Origin(
        step=0,
        schedule_step=0,
        fingerprint="",
        corpus_digest="",
        state_digest="",
        digest="",
        leaves={},
    )
    leaves = digests.named_leaves(params)
    given = portable.Model(origin, whole, found.contents, leaves, None)
    hugging_face.write(given, tmp_path / "hf", "a card")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], report
    ids_BL = np.random.default_rng(1).integers(0, settings.vocabulary_size, (3, 12))
    with torch.no_grad():
        their_logits = theirs.eval()(torch.tensor(ids_BL)).logits.numpy()
    hidden_BLD = model.hidden(params, ids_BL, settings=settings, dtype=jax.numpy.float32)
    ours = loss.logits(
        hidden_BLD,
        model.unembedding(params),
        settings.vocabulary_size,
        scale=settings.output_scale,
    )
    ours = np.asarray(ours)[..., : settings.vocabulary_size]
    assert np.abs(ours).max() > 0.3  # so that 1e-4 says something
    # Two programs' float32: some 1e-6 of what is added up, through two layers.
    np.testing.assert_allclose(their_logits, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({**LLAMA, "block": "parallel"}, "model.block=parallel"),
        ({**LLAMA, "qk_norm": True}, "model.qk_norm=true"),
        ({**LLAMA, "norm": "layernorm"}, "model.norm=layernorm"),
        ({**LLAMA, "activation": "relu"}, "model.activation=relu"),
        ({**LLAMA, "embedding_norm": True}, "model.embedding_norm=true"),
        ({**LLAMA, "isolate_documents": True}, "model.isolate_documents=true"),
        ({**LLAMA, "width": 25}, "model.num_heads=3"),
        ({**LLAMA, "positions": "none"}, "model.positions=none"),
        ({**OPT, "norm": "rms"}, "model.norm=rms"),
        ({**OPT, "num_key_value_heads": 1}, "model.num_key_value_heads=1"),
        ({**OPT, "head_size": 16}, "model.head_size=16"),
        ({**OPT, "activation": "swiglu"}, "model.activation=swiglu"),
        ({**BLOOM, "activation": "relu"}, "model.activation=relu"),
        ({**BLOOM, "feed_forward": 40}, "model.feed_forward=40"),
        ({**BLOOM, "embedding_norm": False}, "model.embedding_norm=false"),
        ({**OPT, "block": "deepnorm", "final_norm_scale": False}, "model.block=deepnorm"),
    ],
)
def test_a_switch_without_counterpart_is_refused_by_name(switches, named):
    with pytest.raises(WrongInput, match=named):
        hugging_face.architecture(config.Model.model_validate(switches))


def test_palms_own_model_is_refused_and_leaves_no_folder(run, in_process, tmp_path):
    done = in_process("export", run, "--format", "hf", "--out", tmp_path / "hf")
    assert isinstance(done.exception, WrongInput)
    assert "model.block=parallel" in str(done.exception)
    assert not list(tmp_path.iterdir())
