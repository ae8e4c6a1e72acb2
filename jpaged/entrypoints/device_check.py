"""Which device a launched server is to run on, found out before jax is loaded.

An accelerator that this installation of JAX cannot use is not passed over in silence: a model that runs on
the CPU of a GPU machine looks like a slow engine. Looks at files and installed packages only; imports no
jax. What needs jax (is the driver new enough, does the device answer) the engine finds out.
"""

import dataclasses
import glob
import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jpaged.errors import ConfigError

_NVIDIA_SMI_SECONDS = 10
_GOOGLE = "0x1ae0"
# PCI device ids of TPU v2/v3, v4, v5p, v5e, v6e and v7 chips, as jax's own detection has them.
_TPU_CHIPS = frozenset(
    {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"},
)
_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_TPU_PLUGINS = ("libtpu",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is: accelerators in words (None if there is none), and what JAX can use."""

    nvidia: str | None = None
    tpu: str | None = None
    has_cuda_plugin: bool = False
    has_tpu_plugin: bool = False

    def __str__(self) -> str:
        return ", ".join(["cpu", *(d for d in (self.nvidia, self.tpu) if d is not None)])


def look_at_machine() -> Machine:
    """Finds accelerators and JAX's plugins for them."""
    return Machine(
        nvidia=_find_nvidia(),
        tpu=_find_tpu(),
        has_cuda_plugin=any(map(_is_installed, _CUDA_PLUGINS)),
        has_tpu_plugin=any(map(_is_installed, _TPU_PLUGINS)),
    )


def choose_platform(
    requested: str | None, machine: Machine, environ: Mapping[str, str]
) -> str | None:
    """The platform to ask the engine for; None leaves it to JAX.

    Raises ConfigError where an accelerator is there and JAX lacks its plugin, unless the CPU was asked
    for (by `requested` or by JAX_PLATFORMS=cpu), and where what was asked for is not there.
    """
    if requested is None and environ.get("JAX_PLATFORMS"):
        return "cpu" if environ["JAX_PLATFORMS"] == "cpu" else None
    if requested == "cpu":
        return "cpu"
    if requested in (None, "gpu") and machine.nvidia is not None:
        if not machine.has_cuda_plugin:
            # Not 13: its libraries have left out older cards, which 12 still runs on.
            raise _no_plugin(machine.nvidia, "CUDA", "cuda12")
        return "gpu"
    if requested in (None, "tpu") and machine.tpu is not None:
        if not machine.has_tpu_plugin:
            raise _no_plugin(machine.tpu, "TPU", "tpu")
        return "tpu"
    if requested == "gpu" and machine.has_cuda_plugin:
        # A card that this module does not know how to see; JAX may.
        return "gpu"
    if requested is not None:
        raise ConfigError(
            f"device {requested!r} was asked for, and this machine shows none; it has: {machine}",
            field="device",
        )
    return None


def _no_plugin(device: str, kind: str, extra: str) -> ConfigError:
    return ConfigError(
        f"this machine has {device}, but the installed JAX has no {kind} support. Install it with\n"
        f'    pip install -e ".[{extra}]"\n'
        "or run on the CPU with --device cpu.",
        field="device",
    )


def _find_nvidia() -> str | None:
    """The first NVIDIA card in words."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        names = _output([tool, "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        if names and names[0].strip():
            return f"an NVIDIA GPU ({names[0].strip()})"
    devices = sorted(glob.glob("/dev/nvidia[0-9]*"))
    return f"an NVIDIA GPU ({devices[0]})" if devices else None


def _output(command: list[str]) -> str:
    """What a command prints; "" if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _find_tpu() -> str | None:
    """TPU chips in words."""
    chips = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        if _read(Path(folder, "vendor")) == _GOOGLE and _read(Path(folder, "device")) in _TPU_CHIPS:
            chips += 1
    return f"a TPU ({chips} chips)" if chips else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
