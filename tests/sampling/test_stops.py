"""Stop strings: the earliest match in text that arrives in pieces, and what may be shown meanwhile."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from jpaged.sampling.stops import StopMatch, StopStrings

stops_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
pieces_lists = st.lists(st.text("ab", max_size=3), max_size=12)


def first_match(text: str, stops: list[str], *, include: bool) -> StopMatch | None:
    """The meaning: as soon as some prefix of the text ends with a match, the earliest that begins there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end if include else end - len(stop))
    return None


def feed(
    stops: list[str], pieces: list[str], *, include: bool
) -> tuple[str, str, StopMatch | None]:
    """Drives it as the engine does: what was shown before the end, the final text, and the match."""
    finder = StopStrings(stops, include=include)
    text = shown = ""
    for piece in pieces:
        text += piece
        match = finder.find(text, len(piece))
        if match is not None:
            assert text[: match.length].startswith(shown), "text was shown that a stop takes away"
            return shown, text[: match.length], match
        certain = finder.num_certain(text)
        assert text[:certain].startswith(shown), "what is certain stays certain"
        shown = text[:certain]
    return shown, text, None


@given(stops=stops_lists, pieces=pieces_lists, include=st.booleans())
def test_characters_one_by_one_find_the_first_match(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    _, final, match = feed(stops, list(text), include=include)
    want = first_match(text, stops, include=include)
    assert match == want
    assert final == (text if want is None else text[: want.length])


@example(stops=["b", "abb"], pieces=["a", "b", "b"], include=False)
@given(stops=stops_lists, pieces=pieces_lists, include=st.booleans())
def test_pieces_of_any_size_end_at_a_match(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    shown, final, match = feed(stops, pieces, include=include)
    assert (match is None) == (not any(stop in text for stop in stops))
    if match is not None:
        before = match.length - len(match.stop) if include else match.length
        assert text[before:].startswith(match.stop)
        assert final == text[: match.length]
        # Nothing was passed over that begins earlier and was there when the text ended; with what comes
        # later a longer one might have begun earlier still.
        ends = next(
            i for i in range(len(pieces)) if any(s in "".join(pieces[: i + 1]) for s in stops)
        )
        seen = "".join(pieces[: ends + 1])
        assert all(not 0 <= seen.find(stop) < before for stop in stops)
    else:
        assert final == text and final.startswith(shown)


@given(stops=stops_lists, text=st.text("ab", max_size=12))
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    certain = StopStrings(stops, include=False).num_certain(text)
    held = text[certain:]
    if held and not any(stop in text for stop in stops):
        assert any(stop.startswith(held) for stop in stops)
    for start in range(certain):
        assert not any(len(s) > len(text) - start and s.startswith(text[start:]) for s in stops)


def test_a_long_stop_string_is_never_shown_in_part() -> None:
    shown, final, match = feed(["DEFGHIJ"], list("ABCDEFGHIJ"), include=False)
    assert shown == final == "ABC"
    assert match == StopMatch("DEFGHIJ", 3)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    finder = StopStrings(["zzzzzzzzzz"], include=False)
    for n in range(1, 11):
        assert finder.num_certain("ABCDEFGHIJ"[:n]) == n


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
def test_of_two_that_begin_together_the_shorter_ends_first(include: bool, text: str) -> None:
    for pieces in (list("xabcd"), ["xabcd"]):
        _, final, match = feed(["abc", "ab"], pieces, include=include)
        assert final == text and match is not None and match.stop == "ab"


def test_no_stop_strings_hold_nothing_back() -> None:
    finder = StopStrings([], include=False)
    assert finder.find("abc", 3) is None and finder.num_certain("abc") == 3
