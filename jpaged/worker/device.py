"""Which device an engine runs on, and in which dtype it computes."""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from jpaged.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
# Flags of CPUs that multiply bf16 directly; elsewhere bf16 is slower than float32.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def platform_of(device: jax.Device) -> str:
    """ "cpu", "gpu" or "tpu"."""
    return _PLATFORMS.get(device.platform, device.platform)


def choose_device(device: str | None, devices: Sequence[jax.Device] | None) -> jax.Device:
    """The one device of an engine. Raises ConfigError naming what there is."""
    if devices is not None:
        chosen = list(devices)
        if len(chosen) != 1:
            raise ConfigError(
                f"devices must hold one device, got {len(chosen)}: an engine runs on one device",
                field="devices",
            )
        if device is not None and platform_of(chosen[0]) != device:
            raise ConfigError(
                f"device {device!r} contradicts devices, which holds {chosen[0]}", field="device"
            )
        return chosen[0]
    if device is None:
        return jax.local_devices()[0]
    try:
        return jax.local_devices(backend=device)[0]
    except RuntimeError as error:
        there = ", ".join(sorted({platform_of(d) for d in jax.local_devices()} | {"cpu"}))
        raise ConfigError(
            f"device {device!r} is not available to JAX here; available: {there}", field="device"
        ) from error


def choose_dtype(dtype: str, checkpoint_dtype: str | None, device: jax.Device) -> str:
    """Resolves "auto" and refuses what the device lacks.

    auto is the checkpoint's dtype with float32 taken as bfloat16; on a CPU without bf16 units,
    float32.
    """
    platform = platform_of(device)
    lacking = _lacking(platform, device)
    if dtype == "auto":
        chosen = checkpoint_dtype if checkpoint_dtype == "float16" else "bfloat16"
        if platform == "cpu":
            chosen = "bfloat16" if cpu_multiplies_bf16() else "float32"
        if chosen in lacking:
            chosen = "float16" if chosen == "bfloat16" else "bfloat16"
        logger.info("dtype auto: %s on %s", chosen, device)
        return chosen
    if dtype in lacking:
        has = ", ".join(name for name in _DTYPES if name not in lacking)
        raise ConfigError(f"{device} lacks dtype {dtype}; it has {has}", field="dtype")
    return dtype


def _lacking(platform: str, device: jax.Device) -> frozenset[str]:
    """Dtypes that a device does not multiply."""
    if platform == "tpu":
        return frozenset({"float16"})
    capability = getattr(device, "compute_capability", None)
    if platform == "gpu" and capability and float(capability) < 8.0:
        return frozenset({"bfloat16"})
    return frozenset()


def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bf16 units."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return not _BF16_FLAGS.isdisjoint(line.split(":", 1)[1].split())
    return False
