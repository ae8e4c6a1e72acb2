"""OutputLengths against numpy over the lengths that were put in."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jpaged.core.output_lengths import OutputLengths

PHI = (math.sqrt(5) + 1) / 2
PRIOR = 16
LENGTHS = st.lists(st.integers(1, 200), min_size=PRIOR, max_size=120)
FAR = 10**6


def learned(lengths: list[int], history: int = 512) -> OutputLengths:
    outputs = OutputLengths(history=history, prior_count=PRIOR)
    for length in lengths:
        outputs.add(length)
    return outputs


@given(LENGTHS, st.integers(PRIOR, 40), st.integers(0, 10**6), st.integers(0, 220))
def test_it_is_a_quantile_of_the_longer_ones_of_the_window(
    lengths: list[int], history: int, number: int, so_far: int
) -> None:
    outputs = learned(lengths, history)
    window = np.array(lengths[-history:])
    longer = window[window > so_far]
    expected = outputs.expected(number, so_far, FAR)
    if not len(longer):
        assert expected == max(so_far + 1, so_far + so_far // 2)
        return
    quantile, doubt = number / PHI % 1, number * np.finfo(float).eps
    assert expected in longer
    assert np.mean(longer < expected) <= quantile + doubt
    assert np.mean(longer <= expected) >= quantile - doubt


@given(LENGTHS, st.integers(0, 10**6), st.integers(0, 200), st.integers(2, 300))
def test_a_batch_is_expected_to_be_as_long_as_such_batches_are(
    lengths: list[int], first: int, so_far: int, count: int
) -> None:
    """By Koksma's inequality: the mean errs by discrepancy times range, for any numbers in a row."""
    window = np.array(lengths)
    longer = window[window > so_far]
    if not len(longer):
        return
    outputs = learned(lengths)
    batch = [outputs.expected(number, so_far, FAR) for number in range(first, first + count)]
    # Of multiples of the golden ratio; an interval that wraps around counts as two.
    discrepancy = 2 * (1 + math.log(math.sqrt(5) * count, PHI)) / count
    assert abs(np.mean(batch) - longer.mean()) <= discrepancy * np.ptp(longer) + 1e-9


@given(LENGTHS, st.integers(0, 10**9), st.integers(0, 300), st.integers(1, 300))
def test_it_lies_beyond_what_is_there_and_within_the_limit(
    lengths: list[int], number: int, so_far: int, more: int
) -> None:
    outputs = learned(lengths)
    at_most = so_far + more
    expected = outputs.expected(number, so_far, at_most)
    assert so_far < expected <= at_most
    assert expected == min(at_most, outputs.expected(number, so_far, FAR))


@given(st.lists(st.integers(1, 200), max_size=PRIOR), st.data())
def test_what_is_learned_takes_the_place_of_the_prior_one_by_one(
    lengths: list[int], data: st.DataObject
) -> None:
    """Whatever is asked, `expected` finds these lengths and so many of the prior, no others."""
    prior = {OutputLengths(prior_count=PRIOR).expected(i, 0, FAR) for i in range(1000)}
    assert len(prior) == PRIOR
    shift = data.draw(st.sampled_from([0, 10**5]))  # among the prior's, and beyond them
    lengths = [length + shift for length in lengths]
    outputs = learned(lengths)
    found = {outputs.expected(i, 0, FAR) for i in range(1000)}
    assert found <= prior | set(lengths) and set(lengths) <= found
    if not prior & set(lengths):
        assert len(found & prior) == PRIOR - len(lengths)


@pytest.mark.parametrize(("mean", "count"), [(256, 16), (10, 64), (1000, 5)])
def test_the_prior_is_exponential(mean: float, count: int) -> None:
    outputs = OutputLengths(prior_mean=mean, prior_count=count)
    seen = [outputs.expected(i, 0, FAR) for i in range(4000)]
    # A count of quantiles misses the tail, and with it a share of the mean.
    assert (1 - 1 / count) * mean <= np.mean(seen) <= mean * (1 + 1 / count)
    for level in (0.25, 0.5, 0.75):
        assert -math.log(1 - level) * mean == pytest.approx(
            float(np.quantile(seen, level)), abs=mean * 4 / count + 1
        )


def test_the_longer_it_is_the_longer_it_is_expected_to_be() -> None:
    """A long tail: who has passed what most do will go on as those did that passed it."""
    outputs = learned([10] * 90 + [1000] * 10)
    fresh = [outputs.expected(i, 0, FAR) for i in range(1000)]
    assert 0.05 < np.mean(np.array(fresh) == 1000) < 0.15
    assert {outputs.expected(i, 10, FAR) for i in range(100)} == {1000}
    assert outputs.expected(0, 1000, FAR) == 1500
