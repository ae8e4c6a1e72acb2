"""The product with a weight: every implementation against its meaning in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import matmul

from .cases import IMPLEMENTATIONS


def _arrays(rows: int, outputs: int, inputs: int, dtype: str, w_dtype: str = "") -> Any:
    rng = np.random.default_rng(rows + outputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32)).astype(dtype)
    w = jnp.asarray(rng.standard_normal((outputs, inputs), np.float32)).astype(w_dtype or dtype)
    return x, w


def _tolerance(inputs: int, dtype: str) -> float:
    """Rounding of a sum of `inputs` products of numbers near 1, then of the result to `dtype`."""
    size = 6 * inputs**0.5
    return size * (inputs**0.5 * float(jnp.finfo(jnp.float32).eps) + float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestMatmul:
    """Each implementation gives the float32 product, rounded once."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("shape", [(1, 192, 64), (3, 13, 48), (7, 600, 576), (9, 40, 16)])
    def test_matches_reference(
        self, implementation: str, dtype: str, shape: tuple[int, int, int]
    ) -> None:
        x, w = _arrays(*shape, dtype)
        expected = matmul(x, w, implementation="reference", out_dtype=jnp.float32)
        for out_dtype in (None, "float32"):
            got = matmul(x, w, implementation=implementation, out_dtype=out_dtype)
            assert got.dtype == (out_dtype or dtype)
            atol = _tolerance(shape[2], got.dtype.name)
            np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=atol)

    def test_mixed_dtypes(self, implementation: str) -> None:
        x, w = _arrays(2, 24, 32, "float32", "bfloat16")
        expected = matmul(x, w, implementation="reference")
        got = matmul(x, w, implementation=implementation)
        np.testing.assert_allclose(got, expected, rtol=0, atol=_tolerance(32, "float32"))

    def test_any_leading_axes(self, implementation: str) -> None:
        x, w = _arrays(6, 8, 32, "float32")
        flat = matmul(x, w, implementation=implementation)
        deep = matmul(x.reshape(2, 3, 32), w, implementation=implementation)
        np.testing.assert_array_equal(deep, flat.reshape(2, 3, 8))
        assert matmul(x[0], w, implementation=implementation).shape == (8,)
        assert matmul(x[:0], w, implementation="xla").shape == (0, 8)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("rows", [2, 5, 8, 40])
    def test_bits_of_a_row_do_not_depend_on_the_others(
        self, implementation: str, dtype: str, rows: int
    ) -> None:
        x, w = _arrays(rows, 96, 64, dtype)
        product = jax.jit(
            lambda x, w: matmul(x, w, implementation=implementation, out_dtype=jnp.float32)
        )
        whole = product(x, w)
        others = jnp.roll(x, 1, axis=0).at[0].set(x[-1]) * 3
        for row in (0, rows - 1):
            again = product(others.at[row].set(x[0]), w)
            np.testing.assert_array_equal(again[row], whole[0])

    def test_derivatives(self, implementation: str) -> None:
        x, w = _arrays(4, 24, 32, "float32")

        def loss(x: jax.Array, w: jax.Array, implementation: str) -> jax.Array:
            return jnp.sum(matmul(x, w, implementation=implementation) ** 2)

        expected = jax.grad(loss, argnums=(0, 1))(x, w, "reference")
        got = jax.grad(loss, argnums=(0, 1))(x, w, implementation)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_numba_bits_do_not_depend_on_the_number_of_rows() -> None:
    x, w = _arrays(7, 70, 576, "bfloat16")
    whole = matmul(x, w, implementation="numba", out_dtype=jnp.float32)
    for rows in range(1, 7):
        part = matmul(x[:rows], w, implementation="numba", out_dtype=jnp.float32)
        np.testing.assert_array_equal(part, whole[:rows])


def test_default_is_right_for_every_number_of_rows() -> None:
    for dtype in ("float32", "bfloat16"):
        for rows in (1, 2, 3, 8, 9):
            x, w = _arrays(rows, 40, 48, dtype)
            expected = matmul(x, w, implementation="reference", out_dtype=jnp.float32)
            got = matmul(x, w, out_dtype=jnp.float32)
            np.testing.assert_allclose(got, expected, rtol=0, atol=_tolerance(48, "float32"))


def test_arguments_are_checked_by_name() -> None:
    x, w = _arrays(2, 8, 32, "float32")
    for pattern, given, weight, options in (
        (r"implementation='blas'.*reference, xla, numba", x, w, {"implementation": "blas"}),
        (r"platform='abacus'", x, w, {"platform": "abacus"}),
        (r"numba.*platform='tpu'", x, w, {"implementation": "numba", "platform": "tpu"}),
        (r"w has shape \(8,\)", x, w[:, 0], {}),
        (r"x has shape \(2, 31\)", x[:, :31], w, {}),
        (r"x has dtype int32", x.astype(jnp.int32), w, {}),
        (r"w has dtype int8", x, w.astype(jnp.int8), {}),
        (r"inputs=24 is not a multiple", x[:, :24], w[:, :24], {"implementation": "numba"}),
    ):
        with pytest.raises(ValueError, match=pattern):
            matmul(given, weight, **options)
