"""What all tests share: the platform, the size of the property tests, and the devices some need."""

import glob
import os

import hypothesis
import pytest

_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))
_TPU = bool(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))

if not (_GPU or _TPU):
    # Else an installed libtpu or CUDA plugin is tried first, slowly and with warnings.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests neither ask the network for models nor print progress of a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Derandomised: a test that was green stays green; --full looks further.
hypothesis.settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=40, stateful_step_count=40
)
hypothesis.settings.register_profile(
    "full", deadline=None, max_examples=1000, stateful_step_count=100
)


def runs_full(config: pytest.Config) -> bool:
    """Whether the tests marked `full` take part (`-m ""`)."""
    return not config.getoption("markexpr")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if runs_full(config) else "quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, present, device in (("needs_gpu", _GPU, "GPU"), ("needs_tpu", _TPU, "TPU")):
            if item.get_closest_marker(marker) and not present:
                item.add_marker(pytest.mark.skip(reason=f"needs a {device}: {item.nodeid}"))
