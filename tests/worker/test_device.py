"""Which device and which dtype: what was asked for, or a clear no."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jpaged import ConfigError
from jpaged.worker.device import choose_device, choose_dtype, cpu_multiplies_bf16

CPU = jax.devices("cpu")[0]


def test_a_given_device_is_taken() -> None:
    assert choose_device(None, [CPU]) is CPU
    assert choose_device("cpu", None) is CPU
    assert choose_device("cpu", [CPU]) is CPU


@pytest.mark.parametrize(
    ("device", "devices", "field"),
    [("tpu", None, "device"), ("gpu", [CPU], "device"), (None, [CPU, CPU], "devices")],
)
def test_a_device_that_cannot_be_had_is_refused(
    device: str | None, devices: list[jax.Device] | None, field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        choose_device(device, devices)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512_bf16", True), ("amx_bf16 amx_tile", True), ("fpu avx2 avx512f", False)],
)
def test_bf16_units_are_read_from_the_cpus_flags(
    tmp_path: Path, flags: str, expected: bool
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nmodel name : x\nflags\t\t: {flags}\n")
    assert cpu_multiplies_bf16(path) is expected
    assert cpu_multiplies_bf16(tmp_path / "missing") is False


def fake(platform: str, **attributes: Any) -> Any:
    return SimpleNamespace(platform=platform, **attributes)


@pytest.mark.parametrize("bf16", [True, False])
def test_auto_on_a_cpu_follows_its_units(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.worker.device.cpu_multiplies_bf16", lambda: bf16)
    assert choose_dtype("auto", "bfloat16", CPU) == ("bfloat16" if bf16 else "float32")
    assert choose_dtype("float16", "bfloat16", CPU) == "float16"


@pytest.mark.parametrize(
    ("device", "checkpoint", "expected"),
    [
        (fake("gpu", compute_capability="8.0"), "float32", "bfloat16"),
        (fake("gpu", compute_capability="9.0"), "float16", "float16"),
        (fake("gpu", compute_capability="7.5"), "bfloat16", "float16"),
        (fake("tpu"), "float16", "bfloat16"),
        (fake("tpu"), None, "bfloat16"),
    ],
)
def test_auto_on_an_accelerator_follows_the_checkpoint_as_far_as_it_can(
    device: Any, checkpoint: str | None, expected: str
) -> None:
    assert choose_dtype("auto", checkpoint, device) == expected


@pytest.mark.parametrize(
    ("device", "dtype"),
    [(fake("gpu", compute_capability="7.5"), "bfloat16"), (fake("tpu"), "float16")],
)
def test_a_dtype_that_the_device_lacks_is_refused(device: Any, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks dtype {dtype}; it has") as error:
        choose_dtype(dtype, None, device)
    assert error.value.field == "dtype"
