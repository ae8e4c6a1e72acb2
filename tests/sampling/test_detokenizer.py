"""Detokenizer: the pieces add up to what decoding everything at once gives."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import Tokenizer

from jpaged.sampling.detokenizer import Detokenizer

from . import tokenizers_for_tests as tiny

BYTE_LEVEL, BYTE_FALLBACK = tiny.byte_level(), tiny.byte_fallback()


def stream(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True
) -> list[str]:
    """The delta after each token, and the last one at the end."""
    detokenizer = Detokenizer(tiny.decoder(tokenizer), prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def whole(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> str:
    """What the tokens add to the prompt, decoding everything at once."""
    everything = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert everything.startswith(before)
    return everything[len(before) :]


byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30)
# Mostly bytes that begin or continue characters, so that many are unfinished, finished or wrong.
nasty_bytes = st.lists(
    st.sampled_from(
        [0x41, 0xFF, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xEF, 0xBF, 0xBD]
    ),
    max_size=20,
)


def ids_of_bytes(data: list[int]) -> list[int]:
    """One byte-level token a byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [BYTE_LEVEL.token_to_id(letters[byte]) for byte in data]


@given(text=st.text(max_size=30), prompt=st.text(max_size=10), skip=st.booleans())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "fallback"])
def test_any_text_arrives_whole(tokenizer: Tokenizer, text: str, prompt: str, skip: bool) -> None:
    prompt_ids = tokenizer.encode(prompt).ids
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, prompt_ids, ids, skip=skip)) == whole(
        tokenizer, prompt_ids, ids, skip=skip
    )


@given(ids=byte_level_ids, skip=st.booleans())
def test_random_byte_level_tokens_arrive_as_decoded_at_once(ids: list[int], skip: bool) -> None:
    prompt = BYTE_LEVEL.encode("a prompt").ids
    assert "".join(stream(BYTE_LEVEL, prompt, ids, skip=skip)) == whole(
        BYTE_LEVEL, prompt, ids, skip=skip
    )


@given(data=nasty_bytes)
@example(data=[0xFF] * 40 + [0xE2, 0x82, 0xAC])
def test_wrong_and_unfinished_bytes_arrive_as_decoded_at_once(data: list[int]) -> None:
    ids = ids_of_bytes(data)
    assert "".join(stream(BYTE_LEVEL, [], ids)) == bytes(data).decode(errors="replace")


@given(text=st.text(max_size=20))
def test_no_unfinished_character_is_shown(text: str) -> None:
    ids = ids_of_bytes(list(text.encode()))
    deltas = stream(BYTE_LEVEL, [], ids)
    assert "".join(deltas) == text
    if "�" not in text:
        assert not any("�" in delta for delta in deltas)
        # A character is sent with the token that finishes it.
        done = 0
        for n, delta in enumerate(deltas[:-1]):
            finished = text.encode()[: n + 1].decode(errors="ignore")
            assert delta == finished[done:]
            done = len(finished)


def test_a_replacement_character_that_the_model_wrote_is_text() -> None:
    ids = ids_of_bytes([0x61, 0xEF, 0xBF, 0xBD, 0x62])
    assert "".join(stream(BYTE_LEVEL, [], ids)) == "a�b"
    assert "".join(stream(BYTE_LEVEL, [], ids[:-1])) == "a�"


def test_special_tokens_are_left_out_or_kept() -> None:
    eos = BYTE_LEVEL.token_to_id("<eos>")
    ids = [*ids_of_bytes([0x61]), eos, *ids_of_bytes([0x62])]
    assert stream(BYTE_LEVEL, [], ids, skip=True) == ["a", "", "b", ""]
    assert stream(BYTE_LEVEL, [], ids, skip=False) == ["a", "<eos>", "b", ""]


def test_spaces_between_words_survive_a_token_at_a_time() -> None:
    ids = BYTE_FALLBACK.encode("a the a.").ids
    prompt = BYTE_FALLBACK.encode("a").ids
    deltas = stream(BYTE_FALLBACK, prompt, ids)
    assert "".join(deltas) == whole(BYTE_FALLBACK, prompt, ids) == " a the a."


def test_spaces_before_punctuation_are_not_cleaned_up() -> None:
    ids = BYTE_LEVEL.encode("a    . a , a").ids
    assert "".join(stream(BYTE_LEVEL, [], ids)) == "a    . a , a"


@given(ids=byte_level_ids)
def test_tokens_that_were_held_come_with_the_flush(ids: list[int]) -> None:
    detokenizer = Detokenizer(tiny.decoder(BYTE_LEVEL), [], skip_special_tokens=True)
    for i in ids:
        detokenizer.hold(i)
    assert detokenizer.flush() == whole(BYTE_LEVEL, [], ids)
