"""Which implementation of an op runs where: names, platforms, and the errors for unknown ones.

Knows no op: each op hands in the names it has.
"""

from collections.abc import Iterable

import jax

PLATFORMS = ("cpu", "gpu", "tpu")


def resolve_platform(platform: str | None) -> str:
    """`platform` checked; None is the default backend of this process."""
    if platform is None:
        platform = jax.default_backend()
    if platform in ("cuda", "rocm"):
        platform = "gpu"
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r} is unknown; allowed: {', '.join(PLATFORMS)}, None")
    return platform


def check_implementation(implementation: str, allowed: Iterable[str]) -> None:
    """Raises ValueError, naming those allowed, unless `implementation` is one of them."""
    allowed = tuple(allowed)
    if implementation not in allowed:
        raise ValueError(
            f"implementation={implementation!r} is unknown; allowed: {', '.join(allowed)}, None"
        )
