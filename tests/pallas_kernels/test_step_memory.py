"""Writing and attending over several layers: the pool stays where it is, whatever else runs."""

import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import KVGroup, allocate_kv, paged_attention, write_kv
from jpaged.pallas_kernels.kv import from_storage

from .cases import IMPLEMENTATIONS, Case, pool_of

LAYERS = 4


def _step(implementation: str) -> Any:
    """A step of several layers that are one traced function."""

    @jax.jit
    def layer(q: Any, kv: KVGroup, index: Any, metadata: Any) -> tuple[Any, KVGroup]:
        kv = write_kv(kv, index, q[:, :2], q[:, 1:3], metadata.slots, implementation=implementation)
        attended = paged_attention(
            q, kv, index, metadata, scale=0.02, implementation=implementation
        )
        return q + attended, kv

    def step(q: Any, kv: KVGroup, metadata: Any) -> tuple[Any, KVGroup]:
        for index in range(LAYERS):
            q, kv = layer(q, kv, jnp.int32(index), metadata)
        return q, kv

    return jax.jit(step, donate_argnums=1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestStep:
    """A donated step over all layers."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_pool_is_neither_copied_nor_moved(self, implementation: str, dtype: str) -> None:
        q, _, metadata = Case([(30, 1), (20, 6)], dtype=dtype).build()
        kv = allocate_kv(LAYERS, 3000, 16, 2, 32, dtype=dtype)
        compiled = _step(implementation).lower(q, kv, metadata).compile()
        memory, pool_bytes = compiled.memory_analysis(), kv.pages.nbytes
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / LAYERS
        place = kv.pages.unsafe_buffer_pointer()
        _, after = compiled(q, kv, metadata)
        assert after.pages.unsafe_buffer_pointer() == place

    def test_sees_what_it_writes(self, implementation: str) -> None:
        q, kv, metadata = Case([(30, 1), (20, 20)], layers=LAYERS).build()
        again = dataclasses.replace(kv, pages=kv.pages.copy())
        expected, kv_expected = _step("reference")(q, again, metadata)
        got, kv_got = _step(implementation)(q, kv, metadata)
        real = int(metadata.cu_q_lens[-1])
        np.testing.assert_allclose(got[:real], expected[:real], rtol=1e-5, atol=1e-5)
        owned = np.asarray(metadata.page_table)[:2, 0]
        np.testing.assert_allclose(
            kv_got.pages[:, owned], kv_expected.pages[:, owned], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
class TestWriteKV:
    """K and V of each token arrive in its slot, and nothing else changes."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
    def test_writes_its_slots_only(self, implementation: str, dtype: str) -> None:
        before = np.arange(2 * 5 * 4 * 4 * 16).reshape(2, 5, 4, 4, 16) % 100
        kv = pool_of(before, dtype)
        rng = np.random.default_rng(0)
        k, v = (jnp.asarray(rng.integers(-9, 9, (3, 2, 16)), jnp.float32) for _ in range(2))
        slots = jnp.array([6, 19, 0], jnp.int32)
        write = jax.jit(write_kv, static_argnames=("implementation",))
        after = write(kv, 1, k, v, slots, implementation=implementation)
        expected = before.astype(np.float32).reshape(2, 20, 2, 2, 16)
        expected[1, slots, :, 0], expected[1, slots, :, 1] = k, v
        got = np.asarray(from_storage(after.pages, dtype), np.float32)
        np.testing.assert_array_equal(got, expected.reshape(before.shape))

    def test_divides_by_the_scales(self, implementation: str) -> None:
        kv = pool_of(np.zeros((1, 2, 4, 2, 16)), "int8")
        kv = dataclasses.replace(kv, scales=jnp.array([[0.5, 0.25]]))
        k, v = jnp.full((1, 1, 16), 3.2), jnp.full((1, 1, 16), -99.0)
        after = write_kv(kv, 0, k, v, jnp.array([5], jnp.int32), implementation=implementation)
        assert after.pages[0, 1, 1, 0].tolist() == [6] * 16
        assert after.pages[0, 1, 1, 1].tolist() == [-128] * 16

    def test_arguments_are_checked_by_name(self, implementation: str) -> None:
        kv = allocate_kv(1, 2, 4, 2, 16, dtype="float32")
        good, slots = jnp.zeros((3, 2, 16)), jnp.zeros(3, jnp.int32)
        options = {"implementation": implementation}
        with pytest.raises(ValueError, match=r"k has shape \(3, 1, 16\)"):
            write_kv(kv, 0, good[:, :1], good, slots, **options)
        with pytest.raises(ValueError, match=r"v has shape \(2, 2, 16\)"):
            write_kv(kv, 0, good, good[:2], slots, **options)
        with pytest.raises(ValueError, match=r"slots has dtype float32"):
            write_kv(kv, 0, good, good, slots.astype(jnp.float32), **options)


def test_write_refuses_an_unknown_implementation() -> None:
    kv = allocate_kv(1, 2, 4, 1, 16, dtype="float32")
    with pytest.raises(ValueError, match="reference, xla, numba"):
        write_kv(
            kv,
            0,
            jnp.zeros((1, 1, 16)),
            jnp.zeros((1, 1, 16)),
            jnp.zeros(1, jnp.int32),
            implementation="x",
        )


def test_numba_write_refuses_slots_outside_of_the_pool() -> None:
    kv = allocate_kv(1, 2, 4, 1, 16, dtype="float32")
    one = jnp.zeros((1, 1, 16))
    for slot in (-1, 8):
        with pytest.raises(Exception, match="slots point outside of the pool"):
            after = write_kv(kv, 0, one, one, jnp.array([slot], jnp.int32), implementation="numba")
            jax.block_until_ready(after)


def test_two_threads_at_once() -> None:
    step = _step("numba")
    q, kv, metadata = Case([(300, 1)] * 12 + [(90, 60)], layers=LAYERS).build()

    def run() -> np.ndarray:
        pool = dataclasses.replace(kv, pages=kv.pages.copy())
        return np.asarray(step(q, pool, metadata)[0])

    expected, results = run(), []

    def many() -> None:
        results.extend(run() for _ in range(20))

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for result in results:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_wide_table_costs_nothing(implementation: str) -> None:
    q, kv, metadata = Case([(128, 1)] * 64, heads=9, kv_heads=3, head_dim=64).build()
    attend = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
    best = {}
    for _ in range(25):
        for tokens in (512, 8192):
            width = tokens // kv.page_size - metadata.page_table.shape[1]
            table = jnp.pad(metadata.page_table, ((0, 0), (0, width)))
            one = dataclasses.replace(metadata, page_table=table)
            jax.block_until_ready(one)
            start = time.perf_counter()
            got = attend(q, kv, 1, one, scale=0.2, implementation=implementation)
            jax.block_until_ready(got)
            best[tokens] = min(best.get(tokens, 1e9), time.perf_counter() - start)
    assert best[8192] <= 1.2 * best[512]
