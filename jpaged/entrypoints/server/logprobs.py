"""Log-probabilities in the two forms of the OpenAI API."""

from collections.abc import Sequence

from jpaged.engine.outputs import Logprob

# JSON has no infinity; OpenAI writes this for a token that cannot come.
LOWEST = -9999.0

_Positions = Sequence[dict[int, Logprob]]


class CompletionLogprobs:
    """The form of /v1/completions for one sample; text offsets go on from call to call."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def take(self, token_ids: Sequence[int], positions: _Positions) -> dict[str, object]:
        """The entries of tokens that follow those of the last call."""
        tokens, values, tops, offsets = [], [], [], []
        for token, entries in zip(token_ids, positions, strict=True):
            text = _text(token, entries[token])
            tokens.append(text)
            values.append(max(entries[token].logprob, LOWEST))
            top: dict[str, float] = {}
            for other, entry in entries.items():
                # Two ids may have one text; the likelier one is meant.
                name, value = _text(other, entry), max(entry.logprob, LOWEST)
                top[name] = max(value, top.get(name, LOWEST))
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }


def chat_logprobs(
    token_ids: Sequence[int], positions: _Positions, num_top: int
) -> dict[str, object]:
    """The form of /v1/chat/completions: `num_top` most likely tokens beside each sampled one."""
    content = []
    for token, entries in zip(token_ids, positions, strict=True):
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]
        content.append(
            {
                **_chat_entry(token, entries[token]),
                "top_logprobs": [_chat_entry(other, entry) for other, entry in best],
            }
        )
    return {"content": content, "refusal": None}


def _chat_entry(token: int, entry: Logprob) -> dict[str, object]:
    text = _text(token, entry)
    return {
        "token": text,
        "logprob": max(entry.logprob, LOWEST),
        "bytes": list(text.encode()),
    }


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
