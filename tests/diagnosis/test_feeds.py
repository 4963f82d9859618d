"""What each arm is fed, by sequence ids, against the run's own data function."""

from __future__ import annotations

import types

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from palm_jax import data, stream
from palm_jax.diagnosis import arms
from palm_jax.diagnosis.arms import Treatment
from palm_jax.diagnosis.experiment import Probe
from palm_jax.diagnosis.feeds import ArmSource
from palm_jax.record.segments import Segment
from palm_jax.stream import Stream

NUM_SEQUENCES = 900
EXCLUDED = ((40, 56),)  # by the run itself, before
TREATMENTS = (Treatment("exclude", feed="excluded"),)


class Numbers:
    """A corpus whose sequence i is [i, i]."""

    def num_sequences(self, split):
        return NUM_SEQUENCES

    def read(self, split, ids):
        return np.stack([np.asarray(ids, np.int32)] * 2, axis=1)


def plan_of(onset=30, fork=24, window_stop=34, stop=40, pinned=True):
    return arms.planned(
        asked=(onset - fork, stop - onset, pinned),
        segment=0,
        onset=onset,
        fork=fork,
        window_stop=window_stop,
        stop=stop,
        start=0,
        earlier=[20, 10, 0],
        healthy=10,
        budget=1000,
        seconds_per_step=None,
        treatments=TREATMENTS,
    )


def source_of(small, name, plan=None, seed=0):
    plan = plan or plan_of()
    base = small(seed=seed, **{"data.ramp": {"starts": [0, 27], "sizes": [8, 16]}})
    return ArmSource(
        Numbers(), base, Segment(exclusions=EXCLUDED), plan, plan.arm(name), rows=np.arange
    )


def fed(source):
    return {
        step: source[step].sequence_ids.tolist() for step in range(source.arm.first, len(source))
    }


def own(source, steps):
    base = source.base
    return {
        step: data.batch(Numbers(), base.seed, step, base.data.ramp, EXCLUDED).sequence_ids.tolist()
        for step in steps
    }


def together(batches, steps):
    return sorted(i for step in steps for i in batches[step])


def test_a_replay_is_fed_what_the_run_was(small):
    for name in ("A1", "A2"):
        source = source_of(small, name)
        assert fed(source) == own(source, range(24, 40))
        batch = data.batch(Numbers(), 0, 30, source.base.data.ramp, EXCLUDED)
        assert source[30].digest == batch.digest
        assert source[30].first_position == batch.first_position
        assert (source[30].tokens == batch.tokens).all()
    before = source_of(small, "H")
    assert fed(before) == own(before, range(before.arm.first, 24))


@hypothesis.settings(
    max_examples=20, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(replicate=st.integers(0, 7), seed=st.integers(0, 99))
def test_a_placebo_has_the_same_sequences_at_most_elsewhere(small, replicate, seed):
    source = source_of(small, f"N{replicate}", seed=seed)
    found, before = fed(source), own(source, range(24, 40))
    for part in (range(24, 30), range(30, 34), *([step] for step in range(34, 40))):
        assert together(found, part) == together(before, part)
    assert [len(found[s]) for s in found] == [len(before[s]) for s in before]
    assert found != before


def test_placebos_differ(small):
    orders = [fed(source_of(small, f"N{r}")) for r in range(arms.NUM_REPLICATES)]
    assert all(a != b for n, a in enumerate(orders) for b in orders[:n])


def test_other_data_hold_no_suspect_and_what_follows_is_unmoved(small):
    suspects = set(together(own(source_of(small, "A1"), range(24, 34)), range(24, 34)))
    drawn = []
    for r in range(arms.NUM_REPLICATES):
        source = source_of(small, f"C{r}")
        found, before = fed(source), own(source, range(24, 40))
        window = together(found, range(24, 34))
        assert not suspects & set(window)
        assert len(set(window)) == len(window)
        assert {s: found[s] for s in range(34, 40)} == {s: before[s] for s in range(34, 40)}
        drawn.append(tuple(window))
    assert len(set(drawn)) == len(drawn)


def test_the_windows_data_come_again_after_a_c_arm(small):
    source = source_of(small, "B3")
    found, before = fed(source), own(source, range(24, 40))
    assert [found[s] for s in range(24, 40)] == list(fed(source_of(small, "C3")).values())
    again = {step - 16: ids for step, ids in found.items() if step >= 40}
    assert together(again, range(30, 34)) == together(before, range(30, 34))
    assert sorted(again[35]) == sorted(before[35])


def test_an_earlier_state_is_fed_the_windows_data_under_either_clock(small):
    before = own(source_of(small, "A1"), range(24, 40))
    for pinned, first in ((True, 24), (False, 20)):
        source = source_of(small, "B0", plan_of(pinned=pinned))
        found = fed(source)
        assert list(found) == list(range(first, first + 16))
        moved = {step - first + 24: ids for step, ids in found.items()}
        assert together(moved, range(24, 30)) == together(before, range(24, 30))
        assert [len(ids) for ids in found.values()] == [len(ids) for ids in before.values()]


def test_all_new_data_hold_no_suspect_past_half_the_distance(small):
    suspects = set(together(own(source_of(small, "A1"), range(24, 34)), range(24, 34)))
    source = source_of(small, "E0")
    assert source.arm.num_steps == (30 - 10) * 3 // 2
    assert not suspects & set(together(fed(source), fed(source)))
    assert fed(source_of(small, "half rate 0")) == fed(source)


def test_an_exclusion_moves_up_what_follows(small):
    source = source_of(small, "D exclude 0")
    ramp = source.base.data.ramp
    excluded = stream.normalized([*EXCLUDED, *Stream(ramp, None, EXCLUDED).intervals(24, 34)])
    wanted = {
        step: data.batch(Numbers(), 0, step, ramp, excluded).sequence_ids.tolist()
        for step in range(24, 40)
    }
    assert fed(source) == wanted
    permuted = fed(source_of(small, "D exclude 1"))
    assert permuted != wanted
    assert {s: sorted(ids) for s, ids in permuted.items()} == {
        s: sorted(ids) for s, ids in wanted.items()
    }


@pytest.mark.parametrize("name", ["A1", "N2", "C1", "B0", "B3", "E1", "D exclude 1"])
def test_processes_share_a_batch(small, name):
    whole = source_of(small, name)
    parts = [
        ArmSource(
            whole.corpus,
            whole.base,
            whole.segment,
            whole.plan,
            whole.arm,
            rows=lambda size, half=half: np.arange(size)[half::2],
        )
        for half in (0, 1)
    ]
    step = whole.arm.first + 7
    assert data.add_digests(part[step].digest for part in parts) == whole[step].digest


# Of a mixture

SIZES = {"books": 600, "code": 300}


def mixed_source_of(small, name):
    source = source_of(small, name)
    numbers = Numbers()
    splits = {k: {"train": types.SimpleNamespace(sequences=n)} for k, n in SIZES.items()}
    numbers.manifest = types.SimpleNamespace(
        corpora={k: types.SimpleNamespace(splits=split) for k, split in splits.items()}
    )
    mixture = {
        "corpora": {"books": "b", "code": "c"},
        "starts": [0, 29],
        "weights": [{"books": 3, "code": 1}, {"books": 1, "code": 2}],
    }
    base = small(
        **{
            "data.corpus": None,
            "data.mixture": mixture,
            "data.ramp": {"starts": [0, 27], "sizes": [8, 16]},
        }
    )
    segment = Segment(exclusions=((40, 56, "books"),))
    return ArmSource(numbers, base, segment, source.plan, source.arm, rows=np.arange)


def corpora_of(batches):
    return {step: ["books" if i < 600 else "code" for i in ids] for step, ids in batches.items()}


def test_a_replay_of_a_mixture_is_fed_what_the_run_was(small):
    source = mixed_source_of(small, "A1")
    base = source.base
    for step, ids in fed(source).items():
        exclusions, mixture = source.segment.exclusions, base.data.mixture
        batch = data.batch(source.corpus, 0, step, base.data.ramp, exclusions, mixture=mixture)
        assert batch.sequence_ids.tolist() == ids
        assert batch.digest == source[step].digest
        assert batch.first_position == source[step].first_position


def test_other_data_are_of_the_corpus_that_they_stand_for(small):
    before = fed(mixed_source_of(small, "A1"))
    suspects = set(together(before, range(24, 34)))
    found = fed(mixed_source_of(small, "C0"))
    assert corpora_of(found) == corpora_of(before)
    window = together(found, range(24, 34))
    assert not suspects & set(window)
    assert len(set(window)) == len(window)
    earlier = fed(mixed_source_of(small, "E0"))
    assert not suspects & {i for ids in earlier.values() for i in ids}
    code = {step: ids.count("code") for step, ids in corpora_of(earlier).items()}
    assert all(n == (2 if step < 27 else 4) for step, n in code.items() if step < 29)


def test_the_probe_of_a_mixture_has_held_out_sequences_of_each_corpus(small):
    source = mixed_source_of(small, "A1")
    source.corpus.read = lambda split, ids: np.zeros((len(ids), 9), np.int32)
    for described, size in zip(source.corpus.manifest.corpora.values(), (100, 3), strict=True):
        described.splits["held_out"] = types.SimpleNamespace(sequences=size)
    probe = Probe.read(source.corpus, source.base)
    assert probe.ids == [0, 100, 1, 101, 2, 102, *range(3, 29)]
    assert probe.counted.all()


def test_an_exclusion_in_a_mixture_moves_up_what_follows_in_each_corpus(small):
    source = mixed_source_of(small, "D exclude 0")
    fed_to_run = source.segment.stream_of(source.base)
    left_out = stream.normalized([*source.segment.exclusions, *fed_to_run.intervals(24, 34)])
    after = Stream.of(source.base.data, left_out)
    ids = data.id_ranges(source.corpus, mixture=source.base.data.mixture)
    wanted = {s: data.ids_at(0, after.places(s), ids).tolist() for s in range(24, 40)}
    assert fed(source) == wanted
    permuted = fed(mixed_source_of(small, "D exclude 1"))
    assert {s: sorted(i) for s, i in permuted.items()} == {s: sorted(i) for s, i in wanted.items()}


def test_clean_steps_are_looked_at_where_the_run_has_them():
    plan = plan_of()
    assert plan.arm("H").first == 0  # too few steps for three arms: all there are
    assert plan.arm("W") is not None or plan.fork - plan.arm("H").first >= plan.horizon
    late = arms.planned(
        **{
            **{"segment": 1, "onset": 210, "fork": 200, "window_stop": 215, "stop": 230},
            **{"start": 190, "earlier": [190, 150, 100, 0], "healthy": 100, "budget": 1},
            **{"seconds_per_step": None, "treatments": (), "asked": (10, 20, True)},
        }
    )
    # The segment itself is compared with its record; rises are looked at in its parents' steps.
    assert (late.arm("H").first, late.arm("H").stop) == (190, 200)
    assert (late.arm("W").first, late.arm("W").stop) == (100, 190)
