"""PrefixReuse: which pages a request may begin with, and which of its own it offers to later ones.

Joins requests, which have tokens, with the manager, which has keys. Knows no queue and no step.
"""

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.page_keys import next_key, root_key
from jpaged.core.request import Request


class PrefixReuse:
    """Keys of requests' pages under the present weights."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._weights = 0

    def forget(self) -> None:
        """The weights have changed, or pages were lost: nothing computed until now is found again."""
        self._weights += 1
        self._kv.forget_all()

    def drop_keys(self, request: Request) -> None:
        """The request's keys are of weights that are gone."""
        request.page_keys.clear()

    def prepare(self, request: Request) -> None:
        """Computes the keys of a prompt, so that planning a step need not."""
        if self._has_keys(request):
            self._extend(request, len(request.prompt_token_ids))

    def most_pages(self, request: Request) -> int:
        """Most pages that a prompt of its length can begin with: at least one token is computed."""
        return (request.num_tokens - 1) // self._kv.page_size

    def hit(self, request: Request) -> list[bytes]:
        """Keys of the pages that a waiting request can begin with."""
        if not self._has_keys(request):
            return []
        if not request.reads_cache and not request.is_follower and request.num_cached is None:
            return []  # it asked to be computed; its followers and its own second run need not be
        self._extend(request, request.num_tokens - 1)
        keys = request.page_keys[: self.most_pages(request)]
        return keys[: self._kv.match(keys)]

    def register(self, request: Request) -> None:
        """Offers the pages that planned steps fill, as far as their tokens are known."""
        if not self._has_keys(request):
            return
        known = min(request.num_computed, request.num_tokens)
        full = known // self._kv.page_size
        if full > request.num_registered:
            self._extend(request, known)
            for index in range(request.num_registered, full):
                self._kv.register(request.sequence, index, request.page_keys[index])
            request.num_registered = full

    def _has_keys(self, request: Request) -> bool:
        """Without prefix caching only the samples of one request share pages."""
        return self._kv.prefix_caching or request.leader is not None

    def _extend(self, request: Request, num_tokens: int) -> None:
        """Computes keys until they cover all full pages of the first `num_tokens` tokens."""
        keys, size = request.page_keys, self._kv.page_size
        for index in range(len(keys), num_tokens // size):
            if keys:
                parent = keys[-1]
            else:
                weights = ("weights", self._weights.to_bytes(8, "little"))
                extras = (*request.extras, weights)
                if not self._kv.prefix_caching:
                    extras = (*extras, ("request", str(request.leader).encode()))
                parent = root_key(size, extras)
            keys.append(next_key(parent, request.tokens(index * size, (index + 1) * size)))
