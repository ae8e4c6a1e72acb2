"""What CPU kernels rest on: the FFI's layout, the fall-back without it, and numba's cache."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numba.core.caching
import numpy as np
import pytest

from jpaged.pallas_kernels import matmul, paged_attention
from jpaged.pallas_kernels.cpu import abi, runtime
from jpaged.pallas_kernels.matmul import numba_cpu
from jpaged.pallas_kernels.paged_attention import numba_cpu as attention_cpu

from .cases import Case, tolerance


@pytest.fixture
def header() -> str:
    return (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()


@pytest.fixture
def forgets_abi() -> Iterator[None]:
    abi.usable.cache_clear()
    yield
    abi.usable.cache_clear()


def test_the_installed_header_is_the_one_we_know(header: str) -> None:
    assert abi.differences(header) == []
    assert abi.usable()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  XLA_FFI_DataType dtype;\n  void* data;", "  void* data;", "XLA_FFI_Buffer.dtype"),
        ("  int64_t rank;\n", "  int64_t rank;\n  int64_t more;\n", "XLA_FFI_Buffer.dims"),
        ("struct XLA_FFI_Rets {", "struct XLA_FFI_Results {", "XLA_FFI_Rets is gone"),
        ("XLA_FFI_API_MAJOR 0", "XLA_FFI_API_MAJOR 1", "version"),
        ("ExecutionStage_EXECUTE = 3", "ExecutionStage_EXECUTE = 4", "EXECUTE is not 3"),
        (
            "  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Error_Create);\n",
            "",
            "XLA_FFI_Api.XLA_FFI_Error_Create lies at None",
        ),
    ],
)
def test_a_changed_header_is_noticed(header: str, old: str, new: str, expected: str) -> None:
    assert old in header
    assert expected in "; ".join(abi.differences(header.replace(old, new)))


@pytest.mark.usefixtures("forgets_abi")
def test_without_the_ffi_xla_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(abi, "_obstacles", lambda: ["the moon is full"])
    q, kv, metadata = Case([(20, 3), (5, 1)]).build()
    x, w = jnp.ones((1, 16)), jnp.ones((4, 16))
    with caplog.at_level(logging.WARNING):
        got = paged_attention(q, kv, 0, metadata, scale=0.2, platform="cpu")
        expected = paged_attention(q, kv, 0, metadata, scale=0.2, implementation="xla")
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(matmul(x, w, platform="cpu"), jnp.full((1, 4), 16.0))
    assert sum("the moon is full" in record.message for record in caplog.records) == 1
    with pytest.raises(ValueError, match="FFI"):
        matmul(x, w, implementation="numba", platform="cpu")


def test_a_kernel_compiles_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(runtime, "_registered", {})
    monkeypatch.setattr(numba_cpu, "KINDS", {"uncached": 0})
    name = numba_cpu.prepare("uncached")
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1, 8), jnp.float32))
    np.testing.assert_array_equal(
        call(jnp.ones((1, 16)), jnp.ones((8, 16))), jnp.full((1, 8), 16.0)
    )


@pytest.mark.parametrize("width", [8, 16])
def test_kernels_are_right_for_every_register_width(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    for module in (attention_cpu, numba_cpu):
        monkeypatch.setattr(module, "host_width", lambda: width)
    case = Case([(200, 1), (90, 50), (33, 33)], heads=9, kv_heads=3, head_dim=64)
    q, kv, metadata = case.build()
    options = {"scale": 0.1, "window": 60, "soft_cap": 4.0}
    expected = paged_attention(q, kv, 1, metadata, implementation="reference", **options)
    got = paged_attention(q, kv, 1, metadata, implementation="numba", **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(expected, "float32"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 48)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((21, 48)), jnp.float32)
    product = matmul(x, w, implementation="reference")
    np.testing.assert_allclose(matmul(x, w, implementation="numba"), product, rtol=1e-5, atol=1e-5)


def test_without_numba_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba cannot be imported" in abi._obstacles()[0]


def test_the_digest_follows_every_file(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("a")
    first = runtime.source_digest(str(kernel))
    kernel.write_text("b")
    assert runtime.source_digest(str(kernel)) not in (0, first)
    assert runtime.source_digest(str(kernel)) != runtime.source_digest()
