"""Admission against its definition: a walk through time, a token a step for each, page by page."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpaged.core.admission import (
    ADMISSIONS,
    MARGIN,
    Demand,
    Room,
    admit_all,
    expected_peak,
    reserve_max,
)

DEMANDS = st.lists(
    st.builds(
        lambda tokens, expected, more: Demand(tokens, expected, expected + more),
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 40),
    ),
    max_size=8,
)
ROOMS = st.builds(
    Room,
    st.integers(0, 150),
    st.sampled_from([1, 2, 4, 16]),
    st.none() | st.integers(1, 20),
)
UNBOUNDED = ROOMS.map(lambda room: room._replace(most_pages=None))


def pages(tokens: int, room: Room) -> int:
    """Pages that one request holds with so many tokens."""
    count = -(-tokens // room.page_size)
    return count if room.most_pages is None else min(count, room.most_pages)


def counted_on(room: Room) -> int:
    """Pages of a room but for the margin."""
    return room.num_pages - int(room.num_pages * MARGIN)


def alive_at(demands: list[Demand], time: int) -> list[int]:
    """Tokens of each that is expected not to have ended, after so many steps."""
    return [d.tokens + time for d in demands if d.expected >= time]


def times(demands: list[Demand]) -> range:
    return range(max((d.expected for d in demands), default=0) + 1)


@given(DEMANDS, ROOMS)
def test_all_admits_whatever_comes(demands: list[Demand], room: Room) -> None:
    assert admit_all(demands, room)


@given(DEMANDS, ROOMS)
def test_max_admits_those_that_fit_when_none_ends_before_the_last(
    demands: list[Demand], room: Room
) -> None:
    longest = max((d.most for d in demands), default=0)
    most = max(
        sum(pages(d.tokens + min(time, d.most), room) for d in demands)
        for time in range(longest + 1)
    )
    assert reserve_max(demands, room) == (most <= room.num_pages)


@given(DEMANDS, UNBOUNDED)
def test_expected_admits_those_that_fit_at_every_time_with_last_pages_half_full(
    demands: list[Demand], room: Room
) -> None:
    most = max(
        sum(tokens + (room.page_size - 1) / 2 for tokens in alive_at(demands, time))
        for time in times(demands)
    )
    assert expected_peak(demands, room) == (most <= counted_on(room) * room.page_size)


@given(DEMANDS, UNBOUNDED)
def test_expected_errs_by_half_a_page_a_request_at_most(demands: list[Demand], room: Room) -> None:
    """Against whole pages, counted one by one; where pages are of one token it does not err."""
    most = max(
        sum(pages(tokens, room) for tokens in alive_at(demands, time)) for time in times(demands)
    )
    doubt = len(demands) * (room.page_size - 1) / 2
    spare = (counted_on(room) - most) * room.page_size
    if abs(spare) > doubt or not doubt:
        assert expected_peak(demands, room) == (spare >= 0)


@given(DEMANDS, ROOMS, st.integers(1, 20))
def test_expected_adds_up_the_most_that_windows_hold(
    demands: list[Demand], room: Room, most_pages: int
) -> None:
    room = room._replace(most_pages=most_pages)
    ends = [Demand(d.tokens, d.expected, d.expected) for d in demands]
    assert expected_peak(demands, room) == reserve_max(
        ends, room._replace(num_pages=counted_on(room))
    )


@pytest.mark.parametrize("name", list(ADMISSIONS))
@given(demands=DEMANDS, one=DEMANDS, room=ROOMS)
def test_no_one_is_refused_who_would_be_admitted_beside_more(
    name: str, demands: list[Demand], one: list[Demand], room: Room
) -> None:
    admits = ADMISSIONS[name]
    if admits([*demands, *one], room):
        assert admits(demands, room)
        assert admits([*demands, *one], room._replace(num_pages=room.num_pages + 1))
        assert admits([*one, *demands], room), "the order is of no matter"


def test_the_policies_differ_where_one_ends_before_the_other_is_long() -> None:
    """12 pages of 4: together they end at 44 tokens, though not at the same time."""
    short, long = Demand(8, 2, 30), Demand(4, 30, 30)
    room = Room(12, 4, None)
    assert expected_peak([short, long], room)
    assert not reserve_max([short, long], room)
    assert not expected_peak([short._replace(expected=30), long], room)
