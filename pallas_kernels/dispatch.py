"""Which implementation of an op runs where: names, platforms, and the errors for unknown ones.

Knows no op: each op hands in the names it has.
"""

from collections.abc import Callable, Iterable

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


def choose(
    implementation: str | None,
    platform: str,
    allowed: Iterable[str],
    *,
    numba_obstacle: Callable[[], str | None],
    prefer_numba: bool = True,
) -> str:
    """The implementation to run: the named one if it can run here, or the best for the platform.

    `numba_obstacle` says why these arguments cannot go to the op's numba kernel (None: they can).
    """
    allowed = tuple(allowed)
    if implementation is None:
        wanted = platform == "cpu" and prefer_numba and "numba" in allowed
        return "numba" if wanted and cpu_kernels_usable() and not numba_obstacle() else "xla"
    if implementation not in allowed:
        raise ValueError(
            f"implementation={implementation!r} is unknown; allowed: {', '.join(allowed)}, None"
        )
    if implementation == "numba":
        obstacle = numba_obstacle()
        if platform != "cpu":
            obstacle = f"it runs on the cpu, not on platform={platform!r}"
        elif not cpu_kernels_usable():
            obstacle = "numba or the FFI it was written for is missing here (see the log)"
        if obstacle:
            raise ValueError(f"implementation='numba' cannot run: {obstacle}; allowed: xla, None")
    return implementation


def cpu_kernels_usable() -> bool:
    """Whether numba kernels can run in this process; says why not once, in the log."""
    from .cpu.abi import usable

    return usable()
