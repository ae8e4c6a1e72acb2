"""Keys of pages: equal for equal prefixes, and for nothing else."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpaged.core.page_keys import next_key, root_key

extras = st.dictionaries(st.text(max_size=3), st.binary(max_size=4), max_size=3)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)


@given(st.integers(1, 8), extras, st.integers(1, 8), extras)
def test_roots_are_equal_for_equal_sizes_and_extras_only(
    size: int, given_extras: dict[str, bytes], other_size: int, other: dict[str, bytes]
) -> None:
    same = (size, given_extras) == (other_size, other)
    assert (root_key(size, given_extras.items()) == root_key(other_size, other.items())) is same


def test_the_order_of_extras_does_not_matter() -> None:
    pairs = [("adapter", b"1"), ("cache_salt", b"2")]
    assert root_key(4, pairs) == root_key(4, pairs[::-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("a", b"bc")], [("ab", b"c")]),
        ([("a", b"1")], [("b", b"1")]),
        ([("a", b"1"), ("b", b"2")], [("a", b"2"), ("b", b"1")]),
        ([("a", b"1"), ("b", b"2")], [("a", b"1b2")]),
        ([("a", b"")], []),
    ],
)
def test_two_kinds_cannot_collide(
    one: list[tuple[str, bytes]], other: list[tuple[str, bytes]]
) -> None:
    assert root_key(4, one) != root_key(4, other)


def test_a_kind_comes_once() -> None:
    with pytest.raises(ValueError, match="comes twice"):
        root_key(4, [("a", b"1"), ("a", b"2")])


@given(token_ids, token_ids)
def test_a_key_says_which_tokens(one: list[int], other: list[int]) -> None:
    root = root_key(4)
    assert (next_key(root, one) == next_key(root, other)) is (one == other)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6), st.data())
def test_sums_that_collide_in_weak_hashes_do_not_here(ids: list[int], data: st.DataObject) -> None:
    """B32: token j one polynomial step up and token j + 1 that much down, for the usual multipliers."""
    root = root_key(len(ids))
    at = data.draw(st.integers(0, len(ids) - 2))
    for multiplier in (31, 33, 37, 257, 65_599, 16_777_619):
        moved = list(ids)
        moved[at] += 1
        moved[at + 1] -= multiplier
        if moved[at + 1] >= 0:
            assert next_key(root, moved) != next_key(root, ids)


def test_a_key_says_what_came_before() -> None:
    root = root_key(2)
    one, other = next_key(root, [1, 2]), next_key(root, [1, 3])
    assert next_key(one, [5, 6]) != next_key(other, [5, 6])
    assert next_key(root, [1, 2]) == one
