"""The batch as a function: the same sequences for every start, host, thread and exclusion."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pathlib
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from corpus.corpora import with_sequences
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import data, stream
from palm_jax.config import Ramp
from palm_jax.corpus.reader import Corpus
from palm_jax.errors import WrongInput
from palm_jax.stream import Stream

TWOS = Ramp(sizes=(2,))
RAMP = Ramp(starts=(0, 3, 5), sizes=(2, 4, 8))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return with_sequences(tmp_path_factory.mktemp("ten"), 10, shard_bytes=60)  # 4 shards


def positions(step, ramp, exclusions=()) -> list[int]:
    return [position for _, position in Stream(ramp, None, exclusions).places(step)]


def first_position(step, ramp, exclusions=()) -> int:
    return Stream(ramp, None, exclusions).first_position(step)


def ids_of(batches) -> list[list[int]]:
    return [batch.sequence_ids.tolist() for batch in batches]


def read(source, start, stop, threads=2, prefetch=3) -> list[data.StepBatch]:
    return list(data.batches(source, start, stop, threads=threads, prefetch=prefetch))


# Epochs and starts


def test_steps_have_the_same_sequences_from_wherever_reading_starts(corpus):
    source = data.BatchSource(corpus, seed=0, ramp=TWOS, num_steps=12)
    straight = read(source, 0, 12)
    for start in range(12):
        again = read(source, start, 12)
        assert ids_of(again) == ids_of(straight[start:])
        assert [b.digest for b in again] == [b.digest for b in straight[start:]]
        assert [b.step for b in again] == list(range(start, 12))


def test_each_epoch_has_every_sequence_once_in_an_order_of_its_own(corpus):
    source = data.BatchSource(corpus, seed=0, ramp=TWOS, num_steps=20)
    ids = [i for batch in ids_of(read(source, 0, 20)) for i in batch]
    epochs = [ids[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_a_batch_runs_on_into_the_next_epoch(corpus):
    fours = Ramp(sizes=(4,))
    source = data.BatchSource(corpus, seed=0, ramp=fours, num_steps=5)
    ids = [i for batch in ids_of(read(source, 0, 5)) for i in batch]
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    # Also a batch that is larger than the corpus.
    whole = data.batch(corpus, 0, 0, Ramp(sizes=(25,)))
    assert whole.sequence_ids.tolist()[:20] == ids


def test_seed_one_does_not_repeat_the_second_epoch_of_seed_zero():
    orders = {
        tuple(data.sequence_ids(seed, range(epoch * 100, epoch * 100 + 100), 100).tolist())
        for seed, epoch in itertools.product(range(5), range(5))
    }
    assert len(orders) == 25


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 17, 255, 256, 257, 1025])
def test_an_epoch_is_a_permutation_for_any_number_of_sequences(num_sequences):
    for epoch in (0, 1, 1000):
        first = epoch * num_sequences
        ids = data.sequence_ids(7, range(first, first + num_sequences), num_sequences)
        assert sorted(ids.tolist()) == list(range(num_sequences))


def test_an_epoch_is_a_permutation_where_grains_shuffle_alone_is_not():
    num_sequences = 2**16 + 1
    ids = data.sequence_ids(7, range(num_sequences), num_sequences)
    assert (np.bincount(ids, minlength=num_sequences) == 1).all()


def test_the_order_is_pinned():
    # A change here would change the data of every run there is.
    assert data.sequence_ids(0, range(10), 10).tolist() == [7, 1, 9, 4, 3, 5, 8, 2, 6, 0]
    assert data.sequence_ids(3, [2**40, 2**40 + 1], 46393).tolist() == [7949, 21043]


# The ramp


def test_the_ramp_of_2_2_2_4_4_8_starts_where_it_should():
    assert [stream.batch_size(RAMP, step) for step in range(7)] == [2, 2, 2, 4, 4, 8, 8]
    assert [stream.sequences_before(RAMP, step) for step in range(7)] == [0, 2, 4, 6, 10, 14, 22]
    assert positions(4, RAMP) == [10, 11, 12, 13]


def test_palms_own_ramp_sees_its_published_number_of_tokens():
    ramp = Ramp(starts=(0, 50_000, 115_000), sizes=(512, 1024, 2048))
    assert stream.sequences_before(ramp, 255_000) * 2048 == 775_946_240_000


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_ramp_arithmetic_equals_adding_up_steps(stages, step):
    starts = tuple(itertools.accumulate((length for length, _ in stages[:-1]), initial=0))
    ramp = Ramp(starts=starts, sizes=tuple(size for _, size in stages))
    sizes = [size for length, size in stages[:-1] for _ in range(length)] + [stages[-1][1]] * 31
    assert stream.batch_size(ramp, step) == sizes[step]
    assert stream.sequences_before(ramp, step) == sum(sizes[:step])


def test_positions_beyond_the_counters_of_32_bits_and_floats_are_exact():
    for far in (2**24, 2**31, 2**40):
        assert stream.sequences_before(Ramp(sizes=(1,)), far + 1) == far + 1
        assert first_position(far // 4096, Ramp(sizes=(4096,))) == far
        assert stream.absolute_position(far - 1, [(0, 2)]) == far + 1
        epoch, index = divmod(far + 1, 1000)
        in_order = data.sequence_ids(5, range(epoch * 1000, epoch * 1000 + 1000), 1000)
        assert data.sequence_ids(5, [far + 1], 1000)[0] == in_order[index]
    # NumPy integers must not bring their overflow along.
    assert stream.sequences_before(Ramp(sizes=(4096,)), np.int32(2**20)) == 2**32
    excluded = [(np.int32(5), np.int32(6))]
    found = positions(np.int32(2**20), Ramp(sizes=(4096,)), excluded)
    assert found == list(range(2**32 + 1, 2**32 + 4097))


def test_a_step_before_the_first_is_an_error():
    for use in (stream.batch_size, stream.sequences_before):
        with pytest.raises(ValueError, match="step=-1"):
            use(RAMP, -1)
    with pytest.raises(ValueError, match="step=-1"):
        positions(-1, RAMP)
    with pytest.raises(ValueError, match="index=-1"):
        stream.absolute_position(-1)


# Exclusions

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 15)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=5,
)


@given(intervals)
def test_batches_are_the_stream_without_what_is_excluded(exclusions):
    excluded = {p for start, stop in exclusions for p in range(start, stop)}
    allowed = [p for p in range(400) if p not in excluded]
    for step in range(9):
        first = stream.sequences_before(RAMP, step)
        size = stream.batch_size(RAMP, step)
        assert positions(step, RAMP, exclusions) == allowed[first : first + size]
        assert first_position(step, RAMP, exclusions) == allowed[first]
        assert stream.absolute_position(first, exclusions) == allowed[first]
        assert all(stream.stretch(first, size, exclusions)), "no empty range"


@given(intervals, st.randoms(use_true_random=False))
def test_the_order_overlap_and_division_of_exclusions_do_not_matter(exclusions, random):
    shuffled = [(s, m) for a, b in exclusions for s, m in ((a, a + 1), (a, b))]
    random.shuffle(shuffled)
    assert stream.normalized(shuffled) == stream.normalized(exclusions)
    assert stream.normalized(stream.normalized(exclusions)) == stream.normalized(exclusions)


@given(intervals, st.integers(0, 60), st.integers(1, 15))
def test_a_later_exclusion_leaves_everything_before_it_alone(exclusions, start, length):
    for step in range(9):
        before = positions(step, RAMP, exclusions)
        if before[-1] < start:
            assert positions(step, RAMP, [*exclusions, (start, start + length)]) == before


def test_skipping_batches_4_and_5_during_the_ramp(corpus):
    # Of the unskipped stream, steps 4 and 5 are positions 10:22.
    excluded = ((10, 22),)
    firsts = [first_position(step, RAMP, excluded) for step in range(8)]
    assert firsts == [0, 2, 4, 6, 22, 26, 34, 42]
    source = data.BatchSource(corpus, 0, RAMP, 8, excluded)
    straight = read(source, 0, 8)
    for start in (3, 5, 7):
        assert [b.digest for b in read(source, start, 8)] == [b.digest for b in straight[start:]]
    for step, batch in enumerate(straight):
        shown = data.batch(corpus, 0, step, RAMP, excluded)
        assert shown.digest == batch.digest
        assert (shown.tokens == batch.tokens).all()
        drawn = positions(step, RAMP, excluded)
        assert not set(drawn) & set(range(10, 22))
        assert batch.sequence_ids.tolist() == data.sequence_ids(0, drawn, 10).tolist()


@pytest.mark.parametrize("interval", [(5, 5), (6, 5), (-1, 3), (-5, -2)])
def test_an_empty_or_negative_exclusion_is_refused_by_name(interval):
    with pytest.raises(WrongInput, match=f"exclusion {interval[0]}:{interval[1]} is empty or neg"):
        positions(0, RAMP, [interval])


# Hosts and threads


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_any_hosts_and_threads_read_the_same_global_batch(corpus, hosts, threads):
    ramp, width, microbatch = Ramp(starts=(0, 2), sizes=(8, 16)), 4, 2
    whole = [data.batch(corpus, 1, step, ramp) for step in range(5)]
    slots = np.arange(width).reshape(hosts, -1)
    parts = []
    for host in range(hosts):

        def rows(size, host=host):
            return data.rows_of(size, microbatch, width, slots[host].tolist())

        source = data.BatchSource(corpus, 1, ramp, 5, rows=rows)
        parts.append(read(source, 0, 5, threads=threads))
    for step in range(5):
        size = stream.batch_size(ramp, step)
        tokens = np.full((size, 9), -1, np.int32)
        ids = np.full(size, -1)
        for part in parts:
            tokens[part[step].rows] = part[step].tokens
            ids[part[step].rows] = part[step].sequence_ids
        assert (tokens == whole[step].tokens).all()
        assert ids.tolist() == whole[step].sequence_ids.tolist()
        assert data.add_digests(part[step].digest for part in parts) == whole[step].digest
        assert {part[step].first_position for part in parts} == {whole[step].first_position}


def test_rows_go_to_devices_microbatch_by_microbatch():
    # Microbatches 0..5 of rows (0 1)(2 3)(4 5)(6 7)(8 9)(10 11), dealt to slots 0 1 2 0 1 2.
    assert data.rows_of(12, 2, 3, [0]).tolist() == [0, 1, 6, 7]
    assert data.rows_of(12, 2, 3, [1, 2]).tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert data.rows_of(12, 2, 3, [2, 1]).tolist() == [4, 5, 2, 3, 10, 11, 8, 9]
    assert data.rows_of(12, 2, 3, [0, 1, 2]).tolist() == list(range(12))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_rows_of_follow_the_rule_row_by_row(microbatch, width, passes, draw):
    size = microbatch * width * passes
    devices = draw.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=width))
    expected = [row for row in range(size) if (row // microbatch) % width in devices]
    assert sorted(data.rows_of(size, microbatch, width, devices).tolist()) == expected
    assert data.rows_of(size, microbatch, width, sorted(devices)).tolist() == expected


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"batch size 10 is not a multiple of .* 2 x 4"):
        data.rows_of(10, 2, 4, [0])
    for devices in ([4], [-1], [1, 1]):
        with pytest.raises(ValueError, match="distinct slots of 0 to 3"):
            data.rows_of(8, 2, 4, devices)


def test_a_digest_is_the_sum_of_one_hash_a_row():
    rows, ids = np.array([0, 3]), np.array([7, 5])
    tokens = np.array([[1, 2, 3], [4, 5, 256]], np.int32)
    total = 0
    for row, number, sequence in ((0, 7, (1, 2, 3)), (3, 5, (4, 5, 256))):
        content = struct.pack("<qq3i", row, number, *sequence)
        total += int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    assert data.batch_digest(rows, ids, tokens) == f"{total % 2**64:016x}"
    assert data.add_digests(["ffffffffffffffff", "0000000000000002"]) == "0000000000000001"


def test_a_digest_tells_order_ids_and_tokens_apart():
    rows, ids = np.arange(2), np.array([7, 5])
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    changed = tokens.copy()
    changed[1, 2] = 7
    digests = {
        data.batch_digest(rows, ids, tokens),
        data.batch_digest(rows[::-1], ids, tokens),
        data.batch_digest(rows, ids[::-1], tokens),
        data.batch_digest(rows, ids, changed),
    }
    assert len(digests) == 4


# Reading ahead


def grain_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def wait_for_threads_to_end() -> None:
    deadline = time.monotonic() + 10
    while grain_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not grain_threads()


def test_leaving_early_ends_the_threads(corpus):
    source = data.BatchSource(corpus, 0, TWOS, 10**9)
    with contextlib.closing(data.batches(source, 10**8, 10**9, threads=2, prefetch=4)) as batches:
        assert next(batches).step == 10**8
        assert grain_threads()
    wait_for_threads_to_end()
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_while_reading_comes_out_at_its_step_and_ends_the_threads(corpus):
    def rows(size):
        if size == 4:
            raise WrongInput("a damaged shard")
        return np.arange(size)

    source = data.BatchSource(corpus, 0, RAMP, 8, rows=rows)
    batches = data.batches(source, 0, 8, threads=2, prefetch=8)
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(WrongInput, match="a damaged shard"):
        next(batches)
    with pytest.raises(StopIteration):  # and never step 5 in the place of step 3
        next(batches)
    wait_for_threads_to_end()


def test_steps_outside_the_source_are_an_error_at_once(corpus):
    source = data.BatchSource(corpus, 0, TWOS, 5)
    assert read(source, 5, 5) == []
    for start, stop in ((0, 6), (-1, 2), (4, 3)):
        with pytest.raises(ValueError, match=f"{start}:{stop} are not within 0:5"):
            data.batches(source, start, stop, threads=1, prefetch=1)
    for step in (-1, 5):
        with pytest.raises(IndexError, match=f"step {step} "):
            source[step]


def test_another_split_can_be_read_but_only_by_its_name(corpus):
    held_out = data.batch(corpus, 0, 0, Ramp(sizes=(1,)), split="held_out")
    assert (held_out.tokens == corpus.read("held_out", [0])).all()
    with pytest.raises(WrongInput, match="validation"):
        data.batch(corpus, 0, 0, TWOS, split="validation")


def test_importing_touches_no_device():
    program = (
        "import sys, palm_jax.data; xla = sys.modules.get('jax._src.xla_bridge'); "
        "sys.exit(bool(xla and xla._backends))"
    )
    root = pathlib.Path(data.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
