"""`palm-jax eval`, against the logbook, NumPy, and loops over tokens."""

from __future__ import annotations

import contextlib
import json
import math
import sys

import formulas
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, sharding, step
from palm_jax.corpus import prepare, tokenizers
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.corpus.tokenizers import ByteTokenizer
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import logbook
from palm_jax.record.folder import RunFolder
from palm_jax.use import breakdown, choices, material, scoring, trained

END = 256


@pytest.fixture
def in_process(monkeypatch):
    """The command, without the start of a process of its own."""
    monkeypatch.setattr("palm_jax.cli.evaluate.prepare_jax", lambda settings: None)
    return lambda *words: CliRunner().invoke(cli.app, ["eval", *map(str, words)])


def answer_of(done):
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# --- tokens ---


def test_losses_and_greedy_tokens_are_those_of_numpy(found, moment, scorer, params):
    settings = moment.program.settings
    ids = np.arange(scorer.at_once + 3)  # the last batch is partial
    tokens_BL = found.corpus.read("held_out", ids)
    logs_BLV = formulas.log_probabilities(params, tokens_BL, settings.model)
    seen = 0
    for own, scores in scorer(moment.params, len(ids), lambda ids: tokens_BL[ids]):
        rows = slice(own.start, own.stop)
        np.testing.assert_array_equal(scores.targets_BL, tokens_BL[rows, 1:])
        wanted = -np.take_along_axis(logs_BLV[rows], tokens_BL[rows, 1:, None], -1)[..., 0]
        # float32 with a residual stream of a few units: some 1e-6 of the logits.
        np.testing.assert_allclose(scores.nats_BL, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scores.nats_B, wanted.sum(-1), rtol=1e-5)
        np.testing.assert_array_equal(scores.greedy_BL, logs_BLV[rows].argmax(-1))
        seen += len(own)
    assert seen == len(ids)


@pytest.mark.slow
def test_chunks_and_tensor_parallel_devices_change_no_score(small, found):
    """Sums are `Program.losses`'s bits on the same mesh; greedy tokens are the same everywhere."""
    settings = small(**{"mesh": {"fsdp": 2, "tensor": 2}, "numerics": {"loss_chunk": 4}})
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), END)
    params = program.init_params()
    scorer = scoring.make_scorer(program, END)
    tokens = found.corpus.read("held_out", np.arange(scorer.at_once))
    ((_, scores),) = scorer(params, len(tokens), lambda ids: tokens[ids])
    counted = np.ones(len(tokens), np.bool_)
    sums = program.losses(params, program.put(tokens), program.put(counted))
    assert scores.nats_B.tobytes() == np.asarray(sums.cross_entropy).reshape(-1).tobytes()
    on_host = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    logs_BLV = formulas.log_probabilities(on_host, tokens, settings.model)
    np.testing.assert_array_equal(scores.greedy_BL, logs_BLV.argmax(-1))
    wanted = -np.take_along_axis(logs_BLV, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(scores.nats_BL, wanted, rtol=1e-4, atol=1e-5)


# --- a run and its logbook ---


def test_losses_have_the_bits_that_the_logbook_recorded_also_between_checkpoints(run, in_process):
    done = in_process(run, *(word for s in (8, 2, 4, 6) for word in ("--step", s)), "--json")
    recorded = {r["step"]: r for r in logbook.read(run).records if r["event"] == "evaluation"}
    rows = answer_of(done)["evaluations"]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    for row in rows:
        for field in ("loss", "perplexity", "bits_per_byte", "sequences", "targets"):
            assert row[field] == recorded[row["step"]][field]
        assert row["recorded_loss"] == row["loss"]
    assert "steps 4:6 were executed again" in done.stderr


def test_a_person_is_told_of_documents_positions_and_the_logbook(run, in_process):
    done = in_process(run)
    assert done.exit_code == 0, done.output
    for words in ("the same", "by position in the sequence, step 8", "4 to 7", "5 best of"):
        assert words in done.stdout


def test_an_evaluation_changes_nothing_in_the_run(run, in_process):
    def content():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = content()
    answer_of(in_process(run, "--step", 6, "--json"))
    assert content() == before


# --- by document and by position ---


def test_documents_and_positions_add_up_as_in_a_loop_over_tokens(found, moment, scorer):
    """Documents are told apart by their ends in the tokens, not by the index."""
    corpus = found.corpus
    parts = breakdown.break_down(
        scorer, moment.params, material.of_split(corpus, "held_out"), corpus
    )
    tokens_BL = corpus.read("held_out", np.arange(corpus.num_sequences("held_out")))
    losses: dict[int, list[float]] = {}
    hits: dict[int, int] = {}
    sizes: dict[int, int] = {}
    by_position = [[] for _ in range(8)]
    document = 0
    for own, scores in scorer(moment.params, len(tokens_BL), lambda ids: tokens_BL[ids]):
        for row, sequence in enumerate(own):
            for position in range(8):
                target = int(tokens_BL[sequence, position + 1])
                loss = float(scores.nats_BL[row, position])
                losses.setdefault(document, []).append(loss)
                hit = scores.greedy_BL[row, position] == target
                hits[document] = hits.get(document, 0) + hit
                sizes[document] = sizes.get(document, 0) + (target != END)
                by_position[position].append(loss)
                document += target == END
    order = parts.by_loss()
    assert sorted(order) == sorted(losses)
    for number in order:
        one = parts.document(number)
        total = math.fsum(losses[number])
        assert one.targets == len(losses[number])
        assert one.loss == pytest.approx(total / one.targets, rel=1e-12)
        assert one.bits_per_byte == pytest.approx(total / math.log(2) / sizes[number], rel=1e-12)
        assert one.accuracy == hits[number] / one.targets
        assert one.bytes == sizes[number]
    means = [parts.document(number).loss for number in order]
    assert means == sorted(means, reverse=True)
    np.testing.assert_allclose(
        parts.positions.losses(), [math.fsum(x) / len(x) for x in by_position], rtol=1e-12
    )
    assert parts.accuracy == sum(hits.values()) / parts.evaluation.targets
    assert parts.bytes == corpus.manifest.splits["held_out"].target_bytes
    buckets = parts.position_buckets()
    assert [own for own, _, _ in buckets] == [range(1), range(1, 2), range(2, 4), range(4, 8)]
    last = by_position[4] + by_position[5] + by_position[6] + by_position[7]
    assert buckets[-1][1] == pytest.approx(math.fsum(last) / len(last), rel=1e-12)


def test_documents_of_a_mixture_are_told_apart_by_their_corpus(corpus_folder):
    with Corpora.open({"a": str(corpus_folder), "b": str(corpus_folder)}) as both:
        what = material.of_split(both, "held_out")
        first, second = what.streams
        assert first.ids.stop == second.ids.start
        names = [what.name(number) for number in range(what.num_documents)]
    half = len(names) // 2
    assert [name.removeprefix("a: ") for name in names[:half]] == [
        name.removeprefix("b: ") for name in names[half:]
    ]


# --- texts ---


def by_fake_scores(what, nats=2.0):
    """A breakdown of made-up scores: each target costs as much, none is foreseen."""

    def score(params, num_sequences, read):
        tokens = read(np.arange(num_sequences))
        shape = num_sequences, what.sequence_length
        nats_BL = np.full(shape, nats, np.float32)
        yield (
            range(num_sequences),
            scoring.Scores(tokens[:, 1:], nats_BL, np.full(shape, -1), nats_BL.sum(-1)),
        )

    return breakdown.break_down(score, None, what)


def test_bits_per_byte_of_a_text_count_its_own_bytes(tmp_path, corpus_folder):
    texts = {"one.txt": "über alles\n" * 5, "two.txt": "abc"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    prepare.prepare(
        source=f"text:{corpus_folder.parent}/*.txt",
        out=tmp_path / "corpus",
        sequence_length=8,
        held_out=0.2,
        tokenizer="sentencepiece:train:280",
    )
    with Corpus.open(tmp_path / "corpus") as corpus:
        pieces = corpus.tokenizer
    for tokenizer in (ByteTokenizer(), pieces):
        what = material.of_texts([tmp_path / name for name in texts], tokenizer, 8)
        parts = by_fake_scores(what)
        sizes = [len(content.encode()) for content in texts.values()]
        tokens = [len(tokenizer.encode(content.encode())) + 1 for content in texts.values()]
        assert [parts.document(n).bytes for n in range(2)] == sizes
        assert [parts.document(n).targets for n in range(2)] == tokens
        assert parts.evaluation.targets == sum(tokens)  # none is left out at the end
        wanted = 2.0 * sum(tokens) / math.log(2) / sum(sizes)
        assert parts.evaluation.bits_per_byte == pytest.approx(wanted, rel=1e-12)


def test_a_text_costs_what_numpy_says(run, moment, params, in_process, tmp_path):
    (tmp_path / "a.txt").write_text("the model and the loss")  # 22 bytes: 3 sequences of 8
    answer = answer_of(in_process(run, "--text", tmp_path / "a.txt", "--json"))
    stream = [END, *b"the model and the loss", END]
    total = 0.0
    for start in (0, 8, 16):
        row = np.array([stream[start : start + 9]])
        logs = formulas.log_probabilities(params, row, moment.program.settings.model)[0]
        total -= sum(logs[i, target] for i, target in enumerate(row[0, 1:]))
    (found,) = answer["evaluations"]
    assert found["targets"] == 23
    assert found["loss"] * 23 == pytest.approx(total, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / 22, rel=1e-5)
    assert answer["also_trained_on"] is None


# --- another corpus ---


def test_documents_that_were_trained_on_as_well_are_counted(run, in_process, tmp_path, found):
    known = found.corpus.index("train")
    source = found.run.path.parent / "mixed"
    source.mkdir()
    originals = found.corpus.folder.parent
    trained_on = {known.name(n).rpartition("/")[2] for n in range(len(known.starts) - 1)}
    for name in trained_on:
        (source / f"copy-{name}").write_bytes((originals / name).read_bytes())
    for number in range(25):
        (source / f"{number}.txt").write_text(f"something else, number {number}, and again")
    prepare.prepare(
        source=f"text:{source}/*.txt", out=tmp_path / "other", sequence_length=8, held_out=0.5
    )
    with Corpus.open(tmp_path / "other") as other:
        names = other.index("held_out")
        wanted = sum("copy-" in names.name(number) for number in range(len(names.starts) - 1))
    assert wanted > 0
    answer = answer_of(in_process(run, "--corpus", tmp_path / "other", "--json"))
    assert answer["also_trained_on"] == wanted
    assert answer["evaluations"][0]["recorded_loss"] is None


def test_a_corpus_of_another_length_is_refused(run, in_process, tmp_path, corpus_folder):
    prepare.prepare(
        source=f"text:{corpus_folder.parent}/*.txt",
        out=tmp_path / "other",
        sequence_length=16,
        held_out=0.2,
    )
    done = in_process(run, "--corpus", tmp_path / "other")
    assert isinstance(done.exception, WrongInput)
    assert "sequence_length=16" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", 9], "has made 8 steps"),
        (["--split", "validation"], "validation"),
        (["--segment", 3], "there is no segment 003"),
        (["--text", "nowhere"], "--text nowhere cannot be read"),
        (["--text", "a", "--choices", "b"], "give one"),
        (["--limit", 3], "name some with --tasks"),
        (["model.z_loss=0"], "model.z_loss"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(run, in_process, words, told):
    done = in_process(run, *words)
    assert isinstance(done.exception, WrongInput), done.output
    assert told in str(done.exception)


def test_tasks_without_lm_eval_are_refused_with_what_to_install(run, in_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "palm_jax.use.harness", raising=False)
    monkeypatch.delattr("palm_jax.use.harness", raising=False)
    done = in_process(run, "--tasks", "arc_easy")
    assert isinstance(done.exception, CannotDo)
    assert "palm-jax[eval]" in str(done.exception)


def test_without_its_corpus_a_run_evaluates_texts_at_its_checkpoints(run, tmp_path, monkeypatch):
    there = RunFolder(run)
    settings = there.config()
    gone = settings.model_copy(
        update={"data": settings.data.model_copy(update={"corpus": str(tmp_path / "gone")})}
    )
    with trained.opened(there, gone) as found:
        assert found.tokenizer().encode(b"a").tolist() == [97]
        assert found.at(4).from_checkpoint == 4
        with pytest.raises(WrongInput, match="no checkpoint at that step"):
            found.at(6)
        with contextlib.ExitStack() as stack, pytest.raises(WrongInput, match="is not there"):
            trained.corpus_to_evaluate(found, None, stack)


# --- choices ---


def test_choices_are_scored_as_numpy_scores_them(run, moment, params, in_process, tmp_path):
    lines = [
        {"context": "the ", "choices": ["loss", "was", "a"], "answer": 0},
        {"context": "", "choices": ["and", "the"], "answer": 1},
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    answer = answer_of(in_process(run, "--choices", path, "--json"))
    (found,) = answer["evaluations"]
    right = right_per_byte = 0
    for line, item in zip(lines, found["items"], strict=True):
        wanted = []
        for choice in line["choices"]:
            text = [END, *(line["context"] + choice).encode()]
            row = np.array([(text + [END] * 9)[:9]])
            (logs,) = formulas.log_probabilities(params, row, moment.program.settings.model)
            first = len(line["context"])
            wanted.append(sum(logs[i, text[i + 1]] for i in range(first, len(text) - 1)))
        assert item["log_likelihoods"] == pytest.approx(wanted, rel=1e-4)
        right += int(np.argmax(wanted)) == line["answer"]
        per_byte = [nats / len(c) for nats, c in zip(wanted, line["choices"], strict=True)]
        right_per_byte += int(np.argmax(per_byte)) == line["answer"]
    assert (found["accuracy"], found["accuracy_per_byte"]) == (right / 2, right_per_byte / 2)
    assert (found["spans"], found["truncated"]) == (0, 0)


def test_a_context_that_is_too_long_loses_its_beginning(scorer, moment, params):
    item = choices.Item(context="again the step ", choices=["loss", "a"], answer=0)
    (found,) = choices.answer(scorer, moment.params, [item], ByteTokenizer())
    assert found.truncated
    row = np.array([list(b"step loss")])
    (logs,) = formulas.log_probabilities(params, row, moment.program.settings.model)
    wanted = sum(logs[i, row[0, i + 1]] for i in range(4, 8))
    assert found.log_likelihoods[0] == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(WrongInput, match=r"9 tokens .* have 8"):
        choices.answer(
            scorer,
            moment.params,
            [choices.Item(context="a", choices=["nine byte", "b"], answer=0)],
            ByteTokenizer(),
        )


class Pairs:
    """Takes two neighbouring letters as one token where it can, from the left."""

    end_of_document = 0
    vocabulary_size = 2**16

    def encode(self, content):
        pairs = [content[i : i + 2] for i in range(0, len(content), 2)]
        return np.array([int.from_bytes(pair, "big") for pair in pairs])


def test_all_choices_are_scored_from_the_place_where_their_tokens_part():
    """The context "abc" is (ab)(c); with a choice behind it, c is part of a longer token."""
    found, spans = choices.passages("abc", ["d", "ef"], Pairs())
    assert spans
    assert [p.scored for p in found] == [1, 2]  # (cd); (ce)(f)
    assert [len(p.tokens) for p in found] == [3, 4]
    found, spans = choices.passages("ab", ["c", "de"], Pairs())
    assert not spans
    assert [p.scored for p in found] == [1, 1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer=2"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "choices"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "empty choice"),
        ('{"context": "a"}', "line 1"),
        ("[", "line 1"),
        ("", "has no lines"),
    ],
)
def test_lines_that_are_no_items_are_refused_by_number(tmp_path, line, told):
    (tmp_path / "items.jsonl").write_text(line + "\n")
    with pytest.raises(WrongInput, match=told):
        choices.read(tmp_path / "items.jsonl")


def test_ids_stand_for_the_bytes_that_they_decode_to():
    sizes = material.bytes_of_ids(ByteTokenizer())
    assert sizes.tolist() == [1] * 256 + [0]
    assert tokenizers.ByteTokenizer().decode(np.arange(256)) == bytes(range(256))
