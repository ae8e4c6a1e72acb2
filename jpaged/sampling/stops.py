"""Stop strings in a growing text: the earliest match, and how much text may be let go meanwhile."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` was found; the text is to be cut to `length` characters."""

    stop: str
    length: int


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`include` keeps the matched string in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)

    def find(self, text: str, new_chars: int) -> StopMatch | None:
        """The match that begins earliest (of several there, the one that ends first), if any.

        Only matches that end in the last `new_chars` characters are looked for: earlier ones were
        found when those characters came.
        """
        if not self._stops or new_chars <= 0:
            return None
        start = max(0, len(text) - new_chars - self._longest + 1)
        found = [(text.find(stop, start), len(stop), stop) for stop in self._stops]
        matches = [match for match in found if match[0] >= 0]
        if not matches:
            return None
        at, size, stop = min(matches)
        return StopMatch(stop=stop, length=at + size if self._include else at)

    def num_certain(self, text: str) -> int:
        """How many characters of `text` no stop string that is yet to come can take away."""
        if self._include or not self._stops:
            return len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
