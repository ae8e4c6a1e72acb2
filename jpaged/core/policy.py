"""Policies: who goes first. A rank is compared; the lowest is served first and preempted last.

Arrival is in every rank, so that no two requests have the same one.
"""

from collections.abc import Callable
from typing import TypeAlias

from jpaged.core.request import Request

Rank: TypeAlias = tuple[int, int]


def first_come(request: Request) -> Rank:
    """First come, first served."""
    return (0, request.arrival)


def by_priority(request: Request) -> Rank:
    """The lowest `priority` first; among equals, first come, first served."""
    return (request.priority, request.arrival)


POLICIES: dict[str, Callable[[Request], Rank]] = {"fcfs": first_come, "priority": by_priority}
