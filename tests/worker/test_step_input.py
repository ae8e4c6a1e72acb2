"""Packing: what the device reads is what the plan said, in at most eight sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import SamplingParams
from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec, pages_for
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import SampledToken
from jpaged.sampling.row_params import NUM_WORDS, SequenceSampling
from jpaged.worker.step_input import (
    LAST_TOKEN,
    StepPacker,
    StepShape,
    bucket_for,
    pack_nothing,
    sample_buckets,
    token_buckets,
    unpack,
)

ROWS, BUDGET, PAGE_SIZE, LONGEST = 3, 10, 4, 40


@given(st.integers(1, 2**14), st.integers(1, 1024))
def test_buckets_are_few_and_reach_the_limits(budget: int, rows: int) -> None:
    rows = min(rows, budget)
    buckets = token_buckets(budget, rows)
    assert len(buckets) <= 8
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == budget and buckets[0] == 1
    assert rows in buckets
    for count in range(1, min(budget, 300) + 1):
        smallest = bucket_for(count, buckets)
        assert count <= smallest
        assert not any(count <= other < smallest for other in buckets)
    samples = sample_buckets(rows)
    assert len(samples) <= 4 and samples[-1] == rows and samples[0] == 1


@given(st.data())
def test_the_device_reads_what_was_planned(data: st.DataObject) -> None:
    """A scheduler is driven at random; each vector is read back and compared with the requests themselves."""
    kv = KVCacheManager(
        [KVGroupSpec(num_pages=14), KVGroupSpec(num_pages=14, window=6)],
        PAGE_SIZE,
        max_step_tokens=BUDGET,
    )
    scheduler = Scheduler(SchedulerConfig(ROWS, BUDGET, LONGEST), kv)
    widths = (pages_for(LONGEST, PAGE_SIZE),) * 2
    packer = StepPacker(ROWS, widths)
    shape = StepShape(tokens=BUDGET, entries=ROWS, rows=ROWS, table_widths=widths)
    for sequence in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 20))
        params = SamplingParams(temperature=sequence + 1)
        scheduler.add(
            Request(
                sequence=sequence,
                # Two in three begin alike, so that some begin with pages of others.
                prompt_token_ids=[100 * (sequence % 3 == 0) + i for i in range(length)],
                max_tokens=data.draw(st.integers(1, LONGEST - length)),
                sampling=SequenceSampling(params=params, seed=sequence, sample=0),
            )
        )
    starts: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        plan = scheduler.schedule()
        if not plan.entries:
            break
        step = unpack(packer.pack(plan.entries, kv, shape), shape)  # type: ignore[arg-type]
        used = len(plan.entries)
        assert step.cu_q_lens[0] == 0 and (step.cu_q_lens[used:] == plan.num_tokens).all()
        assert (step.row_ids[used:] == ROWS).all() and not step.reset[used:].any()
        for i, entry in enumerate(plan.entries):
            request = entry.request
            start, stop = int(step.cu_q_lens[i]), int(step.cu_q_lens[i + 1])
            assert stop - start == entry.num_tokens
            given_tokens = step.tokens[start:stop].tolist()
            if entry.is_new:
                starts[request.sequence] = request.num_tokens
            # What the row has sampled itself, since it was given to the sequence, is on the device.
            assert entry.on_device == (entry.first >= starts[request.sequence])
            if entry.on_device:
                assert given_tokens == [LAST_TOKEN]
            else:
                assert given_tokens == request.tokens(entry.first, entry.first + entry.num_tokens)
            assert step.row_ids[i] == request.row
            assert step.reset[i] == (1 + entry.first if entry.is_new else 0)
            assert not entry.is_new or entry.first % PAGE_SIZE == 0
            expected = request.sampling.words() if step.reset[i] else np.zeros(NUM_WORDS)  # type: ignore[attr-defined]
            np.testing.assert_array_equal(step.sampling[i], expected)
            for group, table in enumerate(step.page_tables):
                pages = kv.table(request.sequence, group)
                seen = table[i].tolist()
                # Pages that a window has passed may still be named; nothing reads them.
                assert all(p in (0, s) for p, s in zip(pages, seen, strict=False))
                assert not any(seen[len(pages) :])
        sampled = {
            entry.request.sequence: SampledToken(token=7, logprob=0.0)
            for entry in plan.entries
            if entry.samples
        }
        scheduler.update(plan, sampled)


def test_a_step_without_entries_touches_the_dummy_row_alone() -> None:
    shape = StepShape(tokens=8, entries=4, rows=5, table_widths=(3,))
    step = unpack(pack_nothing(shape), shape)  # type: ignore[arg-type]
    assert (np.asarray(step.row_ids) == 5).all()
    assert not np.asarray(step.cu_q_lens).any() and not np.asarray(step.reset).any()


def test_no_bucket_holds_more_than_the_largest() -> None:
    with pytest.raises(StopIteration):
        bucket_for(11, (1, 10))
