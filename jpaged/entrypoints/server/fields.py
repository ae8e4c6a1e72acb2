"""Fields that clients send and this server does not act on.

A field that would change the answer is refused unless its value says "as usual"; one that would not is
accepted. Clients also send fields that no server knows: these are passed over, with one line in the log for
each name, unless the name looks like a misspelt parameter, which must not be lost silently.
"""

import difflib
import functools
import logging
from collections.abc import Mapping

from jpaged.errors import RequestError

logger = logging.getLogger(__name__)

# Say something about the client or its account, nothing about the answer.
IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Fields that are not supported (yet), with the values that ask for nothing.
_COMMON: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
COMPLETION_NEUTRAL = _COMMON | {
    "prompt_embeds": (None,),
    "suffix": (None, ""),
}
CHAT_NEUTRAL = _COMMON | {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


def supported_fields(
    body: Mapping[str, object],
    known: frozenset[str],
    neutral: Mapping[str, tuple[object, ...]] | None,
) -> dict[str, object]:
    """The fields of `body` that are in `known`. RequestError for one that cannot be left out.

    `neutral` None is for requests of our own making, where no other field has a meaning.
    """
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif neutral is None:
            raise RequestError(f"{name[:64]!r} is not a parameter of this request", field=name[:64])
        elif name in neutral:
            if not any(value == allowed for allowed in neutral[name]):
                raise RequestError(
                    f"{name} is not supported by this server; leave it out", field=name
                )
        elif name not in IGNORED:
            _pass_over(name[:64], known)
    return kept


def _pass_over(name: str, known: frozenset[str]) -> None:
    """Logs a field that nobody knows, or refuses it where a parameter is meant by it."""
    meant = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    if meant:
        raise RequestError(
            f"{name!r} is not a parameter of this request; did you mean {meant[0]}?", field=name
        )
    _log_once(name)


@functools.lru_cache(maxsize=1024)
def _log_once(name: str) -> None:
    """The cache is what makes it once, of so many names."""
    logger.warning("request field %r is unknown and passed over", name)
