"""The memorisation probe, against loops over the batches and the bytes of the corpus."""

from __future__ import annotations

import json
import types

import formulas
import numpy as np
import pytest
from typer.testing import CliRunner

from palm_jax import cli, data
from palm_jax.errors import WrongInput
from palm_jax.record import segments
from palm_jax.use import memorisation, scoring

END = 256


@pytest.fixture
def in_process(monkeypatch):
    """The command, without the start of a process of its own."""
    monkeypatch.setattr("palm_jax.cli.memorisation.prepare_jax", lambda settings: None)
    return lambda *words: CliRunner().invoke(cli.app, ["memorisation", *map(str, words)])


def passage(text):
    return memorisation.Passage(0, 0, tuple(text))


def test_sequences_are_those_of_the_batches_in_their_order(found):
    base = found.course.base
    source = data.BatchSource(found.corpus, base.seed, base.data.ramp, 8)
    wanted = [int(x) for step in range(5) for x in source[step].sequence_ids]
    total, sequence_id = memorisation.trained_on(found, 5)
    assert [sequence_id(number) for number in range(total)] == wanted


def test_sequences_of_a_rolled_back_run_are_those_that_led_to_its_state(found, tmp_path):
    """Segment 1 departs before step 3, leaves out a batch, and has a ramp's later sizes."""
    base = found.course.base.model_copy(
        update={
            "data": found.course.base.data.model_copy(
                update={"ramp": data.Ramp(starts=(0, 4), sizes=(8, 16))}
            )
        }
    )
    first = segments.Segment()
    second = segments.Segment(
        segment=1,
        parent=segments.Departure(segment=0, step=3),
        start_step=3,
        exclusions=((24, 32),),
    )
    run = types.SimpleNamespace(segment=lambda number: tmp_path / segments.name_of(number))
    for one in (first, second):
        place = run.segment(one.segment)
        place.mkdir()
        (place / segments.FILE_NAME).write_text(one.model_dump_json())
    course = types.SimpleNamespace(base=base, segment=second)
    rolled_back = types.SimpleNamespace(course=course, corpus=found.corpus, run=run)
    wanted = []
    for steps, exclusions in ((range(3), ()), (range(3, 6), second.exclusions)):
        source = data.BatchSource(found.corpus, base.seed, base.data.ramp, 6, exclusions)
        wanted += [int(x) for step in steps for x in source[step].sequence_ids]
    total, sequence_id = memorisation.trained_on(rolled_back, 6)
    assert [sequence_id(number) for number in range(total)] == wanted


def test_passages_lie_in_one_document_of_their_sequence_and_follow_from_the_seed(found):
    def draw(seed):
        given = found.corpus, "train", 200, lambda number: number + 7
        return memorisation.draw(*given, 200, 6, seed)

    assert (found.corpus.read("train", np.arange(7, 207)) == END).any()
    passages = draw(0)
    assert len({one.sequence for one in passages}) == len(passages)
    for one in passages:
        (row,) = found.corpus.read("train", [one.sequence])
        assert tuple(row[one.start : one.start + 6].tolist()) == one.tokens
        assert END not in one.tokens
        assert 7 <= one.sequence < 207
    assert {one.start for one in passages} == {0, 1, 2, 3}  # of 9 tokens
    assert draw(0) == passages != draw(1)


def test_occurrences_are_those_of_a_loop_over_the_split(found, monkeypatch):
    monkeypatch.setattr(memorisation, "_AT_ONCE", 5)  # so that passages lie across the parts read
    corpus = found.corpus
    rows = corpus.read("train", np.arange(corpus.num_sequences("train")))
    stream = [*rows[:, :-1].reshape(-1).tolist(), int(rows[-1, -1])]
    passages = [passage(b"the m"), passage(b"zzzzz"), passage(b"gain "), passage(b"the m")]
    passages += [passage(stream[k : k + 5]) for k in (0, 36, 38, 40, len(stream) - 5)]
    wanted = [
        sum(tuple(stream[k : k + 5]) == one.tokens for k in range(len(stream))) for one in passages
    ]
    assert memorisation.count_occurrences(corpus, passages) == wanted
    assert wanted[1] == 0 < wanted[0] == wanted[3]


def test_a_passage_counts_if_all_of_it_comes_out():
    """A model that knows that b follows a, c follows b, and so on."""

    def next_letter(params, num_sequences, read):
        tokens = read(np.arange(num_sequences))[:, :-1]
        yield range(num_sequences), scoring.Scores(tokens, tokens, tokens + 1, tokens)

    model = types.SimpleNamespace(sequence_length=8)
    settings = types.SimpleNamespace(model=model)

    class Knows:
        program = types.SimpleNamespace(settings=settings)
        __call__ = staticmethod(next_letter)

    passages = [passage(b"abcdef"), passage(b"abcdxx"), passage(b"abcxef"), passage(b"abcdex")]
    recitals = memorisation.recite(Knows(), None, passages, 3, [1, 2, 3, 4])
    assert [one.right for one in recitals] == [3, 1, 0, 2]
    assert [memorisation.is_memorised(one, 3) for one in recitals] == [True, False, False, False]
    assert memorisation.by_occurrences(recitals, 3) == [
        (range(1, 2), 1, 1),
        (range(2, 4), 2, 0),
        (range(4, 8), 1, 0),
    ]


def test_the_command_recites_as_numpy_does(run, found, moment, params, in_process):
    words = ["--sequences", 12, "--prompt", 2, "--continuation", 2, "--json"]
    done = in_process(run, *words)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["step"] == 8
    assert answer["passages"] == len(answer["recitals"]) == 12
    assert sum(row["passages"] for row in answer["by_occurrences"]) == 12
    settings = moment.program.settings.model
    for one in answer["recitals"]:
        (row,) = found.corpus.read("train", [one["sequence"]])
        tokens = row[one["column"] : one["column"] + 4].tolist()
        right = 0
        while right < 2:
            given = np.array([[*tokens[: 2 + right], 0]])
            logs = formulas.log_probabilities(params, given, settings)
            if int(logs[0, -1].argmax()) != tokens[2 + right]:
                break
            right += 1
        assert one["right"] == right
        assert one["occurrences"] >= 1
    assert answer["memorised"] == sum(one["right"] == 2 for one in answer["recitals"])
    done = in_process(run, *words[:-1], "--split", "held_out", "--no-occurrences")
    assert done.exit_code == 0, done.output
    assert "split held_out: after 2 tokens the next 2 come out in" in done.stdout


def test_passages_longer_than_the_sequences_are_refused(run, in_process):
    done = in_process(run)
    assert isinstance(done.exception, WrongInput)
    assert "100 tokens of prompt and continuation do not fit into sequences of 8" in str(
        done.exception
    )
