"""Keys of full pages: what a page's K and V were computed from, as a chain of SHA-256 digests.

A key stands for every token up to the end of its page and for all that shaped them beside tokens (weights,
adapter, salt), so that equal keys mean equal pages. Two different prefixes with one key would let a
request read another's pages; hence a cryptographic digest, over fields whose borders cannot shift.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

Extras = tuple[tuple[str, bytes], ...]

_DOMAIN = b"jpaged page key 1"


def root_key(page_size: int, extras: Iterable[tuple[str, bytes]] = ()) -> bytes:
    """The key before the first page.

    `extras` are (kind, content) pairs; their order does not matter. Kind and content are written
    with their lengths, so that no content can pass for another kind. Raises ValueError if a kind
    comes twice.
    """
    pairs = sorted((kind.encode(), content) for kind, content in extras)
    kinds = [kind for kind, _ in pairs]
    if len(set(kinds)) != len(kinds):
        raise ValueError(f"a kind of extra comes twice: {[kind.decode() for kind in kinds]}")
    digest = hashlib.sha256()
    for field in (
        _DOMAIN,
        struct.pack("<q", page_size),
        *(part for pair in pairs for part in pair),
    ):
        digest.update(struct.pack("<q", len(field)))
        digest.update(field)
    return digest.digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the page that holds `token_ids`, behind the page (or root) of key `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()
