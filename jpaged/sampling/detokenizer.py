"""Detokeniser: token ids to text, a token at a time, append-only.

Knows the tokenizer's `decode`; knows nothing of requests. A token is decoded in a window that
begins a few tokens back, so that byte-level and metaspace decoders see the neighbours they need;
text that ends in an unfinished character is held back until it is finished or the sequence ends.
"""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "�"
# An UTF-8 character has at most four bytes: a replacement character that is still last after this many
# further tokens is one that the model really wrote.
_MAX_UNFINISHED_TOKENS = 4
_PROMPT_WINDOW = 6


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
        # ids[prefix:read] have been turned into text; ids[read:] have not.
        self._ids = list(prompt_token_ids[-_PROMPT_WINDOW:])
        self._prefix = 0
        self._read = len(self._ids)
        self._prefix_text = self._decode(0, self._read)

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        # Without clean-up: it rewrites text that has been sent already.
        return self._tokenizer.decode(
            self._ids[start:stop],
            skip_special_tokens=self._skip,
            clean_up_tokenization_spaces=False,  # type: ignore[call-arg]  # absent in some decoders
        )

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._prefix, len(self._ids))
        unfinished = len(self._ids) - self._read < _MAX_UNFINISHED_TOKENS
        if len(text) <= len(self._prefix_text) or (text.endswith(_REPLACEMENT) and unfinished):
            return ""
        return self._take(text)

    def hold(self, token: int) -> None:
        """Takes in a token without making text of it: `flush` gives all at once."""
        self._ids.append(token)

    def flush(self) -> str:
        """Whatever was held back, at the end of the sequence."""
        return self._take(self._decode(self._prefix, len(self._ids)))

    def _take(self, text: str) -> str:
        delta = text[len(self._prefix_text) :]
        self._prefix = self._read
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._prefix, self._read)
        return delta
