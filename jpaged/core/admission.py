"""Admission: whether one more request may run beside those that do, judged by the pages they will need.

Pages that a request needs at once are not judged here. Three ways: admit whoever has room now (and
preempt later), reserve each request's greatest length (and leave most of it unused), or look ahead: by the
expected lengths, the most pages that all will hold at any one time. The last follows the "past-future"
scheduler of LightLLM (Gong et al., ASPLOS 2025).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

# The part of the room that is not counted on: lengths of requests that turn out longer than expected
# add up to about so much.
MARGIN = 0.03


class Demand(NamedTuple):
    """What one request holds and may come to hold, in tokens that it shares with nobody.

    Attributes:
        tokens: what it has, computed or not.
        expected: further tokens it is expected to make.
        most: further tokens it can make.
    """

    tokens: int
    expected: int
    most: int


class Room(NamedTuple):
    """What the requests share.

    Attributes:
        num_pages: pages that can be theirs alone.
        page_size: tokens in a page.
        most_pages: the most pages that one request holds at once; None if that grows with it.
    """

    num_pages: int
    page_size: int
    most_pages: int | None


Admission: TypeAlias = Callable[[Sequence[Demand], Room], bool]


def admit_all(demands: Sequence[Demand], room: Room) -> bool:
    """Whoever has room now may run."""
    return True


def reserve_max(demands: Sequence[Demand], room: Room) -> bool:
    """All may run to their greatest lengths at the same time."""
    return _sum_of_peaks([d.tokens + d.most for d in demands], room) <= room.num_pages


def expected_peak(demands: Sequence[Demand], room: Room) -> bool:
    """At no time are all expected to hold more than there is, less a margin.

    All make a token a step. The peaks are where one ends: when the one with r tokens to go ends, those
    with at least as many to go hold what they have and r tokens more each.
    """
    num_pages = room.num_pages - int(room.num_pages * MARGIN)
    if room.most_pages is not None:
        # A window's pages do not grow with time; that they are not held to the end is left aside.
        return _sum_of_peaks([d.tokens + d.expected for d in demands], room) <= num_pages
    # A last page is half full on average.
    limit = num_pages * room.page_size
    slack = (room.page_size - 1) / 2
    held = 0.0
    for count, (expected, tokens) in enumerate(
        sorted(((d.expected, d.tokens) for d in demands), reverse=True), start=1
    ):
        held += tokens + slack
        if held + count * expected > limit:
            return False
    return True


def _sum_of_peaks(lengths: Sequence[int], room: Room) -> int:
    pages = [-(-length // room.page_size) for length in lengths]
    if room.most_pages is not None:
        pages = [min(count, room.most_pages) for count in pages]
    return sum(pages)


ADMISSIONS: dict[str, Admission] = {
    "expected": expected_peak,
    "all": admit_all,
    "max": reserve_max,
}
