"""The adapter for lm-eval, on a task of this file's own, against NumPy. Downloads nothing."""

from __future__ import annotations

import json
import types

import formulas
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with the extra `eval`")

from palm_jax import cli
from palm_jax.corpus.tokenizers import ByteTokenizer
from palm_jax.errors import WrongInput
from palm_jax.use import harness

END = 256
ITEMS = [
    {"question": "the ", "options": ["loss", "was", "a"], "label": 0},
    {"question": "a ", "options": ["and", "again"], "label": 1},
    {"question": "of ", "options": ["xyz", "the"], "label": 1},
]
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {items}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: options
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def lm(scorer, moment):
    return harness.PalmJax(scorer, moment.params, ByteTokenizer())


def asked(*requests):
    return [types.SimpleNamespace(args=request) for request in requests]


@pytest.fixture(scope="module")
def logs(params, moment):
    """Log-probabilities after each byte of a row that begins with an end of document."""

    def of(row):
        return formulas.log_probabilities(
            params, np.array([[*row, 0]]), moment.program.settings.model
        )[0]

    return of


def test_likelihoods_and_greedy_continuations_are_numpys(lm, logs):
    best = [int(logs([END, *b"the "])[-1].argmax())]
    best.append(int(logs([END, *b"the ", *best])[-1].argmax()))
    likely = bytes(best).decode("latin-1")
    assert max(best) < 128
    found = lm.loglikelihood(asked(("the ", likely), ("the ", "zq"), ("", "a")))
    for (nats, _), context, continuation in zip(
        found, ("the ", "the ", ""), (likely, "zq", "a"), strict=True
    ):
        row = [END, *(context + continuation).encode()]
        after = logs(row)
        first = len(context)
        wanted = sum(after[i, row[i + 1]] for i in range(first, len(row) - 1))
        assert nats == pytest.approx(wanted, rel=1e-4)
    assert [greedy for _, greedy in found][:2] == [True, False]


def test_rolling_likelihood_scores_every_token_once_the_last_window_whole(lm, logs):
    text = b"the model and the loss"  # 22 bytes: windows of 8, 8, and 6 after two known ones
    row = [END, *text]
    wanted = sum(logs(row[0:8])[i, row[i + 1]] for i in range(8))
    wanted += sum(logs(row[8:16])[i, row[8 + i + 1]] for i in range(8))
    wanted += sum(logs(row[14:22])[i, row[14 + i + 1]] for i in range(2, 8))
    (nats, empty) = lm.loglikelihood_rolling(asked((text.decode(),), ("",)))
    assert nats == pytest.approx(wanted, rel=1e-4)
    assert empty == 0


class Letters(ByteTokenizer):
    """Every byte that the model may choose reads as a letter."""

    def decode(self, tokens):
        return bytes(97 + token % 26 for token in np.asarray(tokens).tolist())


def test_generation_is_greedy_sees_the_last_tokens_and_ends_where_it_is_told(scorer, moment, logs):
    lm = harness.PalmJax(scorer, moment.params, Letters())
    row = [END, *b"the model"]
    for _ in range(6):
        row.append(int(logs(row[-8:])[-1].argmax()))
    tokens = row[10:]
    assert END not in tokens
    text = Letters().decode(tokens).decode()
    given = {"max_gen_toks": 6, "until": [], "do_sample": False}
    stop = text[2]
    told = {"max_gen_toks": 6, "until": [stop, "never seen"], "temperature": 0.0}
    assert lm.generate_until(asked(("the model", given), ("the model", told))) == [
        text,
        text[: text.index(stop)],
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [({"temperature": 0.7}, "greedy"), ({"do_sample": True}, "greedy"), ({"top_p": 1}, "top_p")],
)
def test_a_generation_that_is_not_greedy_is_refused(lm, given, named):
    with pytest.raises(WrongInput, match=named):
        lm.generate_until(asked(("a", given)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_lm_eval_finds_the_accuracy_that_the_items_have(run, lm, tmp_path, monkeypatch):
    monkeypatch.setattr("palm_jax.cli.evaluate.prepare_jax", lambda settings: None)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "tiny.yaml").write_text(TASK.format(items=tmp_path / "items.jsonl"))
    words = ["eval", str(run), "--tasks", "tiny_choice", "--tasks-folder", str(tasks), "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["evaluations"]
    right = 0
    for item in ITEMS:
        pairs = [(item["question"], option) for option in item["options"]]
        nats = [one for one, _ in lm.loglikelihood(asked(*pairs))]
        right += int(np.argmax(nats)) == item["label"]
    assert found["results"]["tiny_choice"]["acc,none"] == right / len(ITEMS)
    assert found["samples"]["tiny_choice"]["effective"] == len(ITEMS)


@pytest.mark.slow
def test_a_task_that_does_not_exist_is_refused_by_name(lm):
    with pytest.raises(WrongInput, match="no_such_task"):
        harness.results(lm, ["no_such_task"])
