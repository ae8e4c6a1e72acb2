"""Detokeniser: token ids to text, a token at a time, append-only.

Knows the tokenizer's `decode`; knows nothing of requests. A token is decoded in a window that
begins a few tokens back, so that byte-level and metaspace decoders see the neighbours they need;
text that ends in an unfinished character is held back until it is finished or the sequence ends.
"""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "�"
# An unfinished UTF-8 character has at most three bytes, and decoders show it as one replacement
# character, or as one for each byte: so many at the end may yet turn into another character.
_MAX_UNFINISHED_CHARS = 3
_PROMPT_WINDOW = 6
# A model that writes nothing but broken characters does not make the window grow for ever.
_MAX_PENDING_TOKENS = 16


class Decoder(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Text of one sequence's output tokens."""

    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # The window is ids[prefix:], and ids[prefix:read] end with a finished character.
        self._ids = list(prompt_token_ids[-_PROMPT_WINDOW:])
        self._prefix = 0
        self._read = len(self._ids)
        # The part of the window's text that has been given out.
        self._given = self._decode(0)

    def _decode(self, start: int) -> str:
        if start == len(self._ids):
            return ""
        # Without clean-up: it rewrites text that has been sent already.
        return self._tokenizer.decode(
            self._ids[start:],
            skip_special_tokens=self._skip,
            clean_up_tokenization_spaces=False,  # type: ignore[call-arg]  # absent in some decoders
        )

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._prefix)
        broken = len(text) - len(text.rstrip(_REPLACEMENT))
        certain = len(text) - min(broken, _MAX_UNFINISHED_CHARS)
        patient = len(self._ids) - self._read <= _MAX_PENDING_TOKENS
        # A decoder of byte tokens shows a whole run of them as broken until its last one is there.
        if certain <= len(self._given) or (patient and not text.startswith(self._given)):
            return ""
        delta = text[len(self._given) : certain]
        self._given = text[:certain]
        if not broken:
            self._advance(self._read, held_back=0)
        elif not patient:
            self._advance(len(self._ids) - _MAX_PENDING_TOKENS // 2, len(text) - certain)
        return delta

    def hold(self, token: int) -> None:
        """Takes in a token without making text of it: `flush` gives all at once."""
        self._ids.append(token)

    def flush(self) -> str:
        """Whatever was held back, at the end of the sequence."""
        text = self._decode(self._prefix)
        delta = text[len(self._given) :]
        self._given = text
        return delta

    def _advance(self, prefix: int, held_back: int) -> None:
        """Moves the window; the last `held_back` characters of its text are yet to be given out."""
        self._prefix = prefix
        self._read = len(self._ids)
        text = self._decode(prefix)
        self._given = text[: max(0, len(text) - held_back)]
