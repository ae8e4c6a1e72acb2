"""Ragged paged attention: every implementation against its meaning in plain jnp."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels import KVGroup, allocate_kv, paged_attention

from .cases import IMPLEMENTATIONS, Case, tolerance

attend = jax.jit(
    paged_attention, static_argnames=("scale", "window", "soft_cap", "implementation", "platform")
)

# Decodes, a prompt, chunks after a prefix, a short chunk, an unused row, a row without new tokens.
MIX = ((300, 1), (17, 17), (130, 100), (1, 1), (90, 2), (0, 0), (40, 0), (64, 64))

CASES: Mapping[str, tuple[Case, Mapping[str, object]]] = {
    "one query head a kv head, pages of one token": (
        Case(MIX, heads=4, kv_heads=4, head_dim=32, page_size=1),
        {},
    ),
    "three to one, window, odd pages": (
        Case(MIX, heads=3, kv_heads=1, head_dim=64, page_size=7),
        {"window": 20},
    ),
    "nine to three": (Case(MIX, heads=9, kv_heads=3, head_dim=64), {}),
    "one kv head for eight, soft cap, large pages": (
        Case(MIX, heads=8, kv_heads=1, head_dim=96, page_size=64),
        {"soft_cap": 2.0},
    ),
    "sinks, window and soft cap": (
        Case(MIX, heads=4, kv_heads=2, head_dim=128),
        {"sinks": (0.5, -1.0, 3.0, 0.0), "window": 33, "soft_cap": 5.0},
    ),
    "wide heads, window of one": (
        Case(MIX, heads=2, kv_heads=2, head_dim=256, page_size=7),
        {"window": 1},
    ),
    "bfloat16, window": (
        Case(MIX, heads=9, kv_heads=3, head_dim=64, dtype="bfloat16"),
        {"window": 70},
    ),
    "bfloat16, scales": (
        Case(MIX, heads=9, kv_heads=3, head_dim=64, dtype="bfloat16", page_size=1),
        {"scales": True},
    ),
    "float16, sinks": (
        Case(MIX, heads=8, kv_heads=2, head_dim=32, dtype="float16", page_size=64),
        {"sinks": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestPagedAttention:
    """Each implementation gives what the plain jnp form gives."""

    @pytest.mark.parametrize("name", CASES)
    def test_matches_reference(self, implementation: str, name: str) -> None:
        case, given_options = CASES[name]
        options = dict(given_options)
        q, kv, metadata = case.build()
        if options.pop("scales", False):
            scales = jnp.linspace(0.5, 2.0, 2 * case.kv_heads * case.layers)
            kv = dataclasses.replace(kv, scales=scales.reshape(case.layers, -1))
        if "sinks" in options:
            options["sinks"] = jnp.array(options["sinks"])
        options["scale"] = case.head_dim**-0.5
        expected = attend(q, kv, 1, metadata, implementation="reference", **options)
        got = attend(q, kv, 1, metadata, implementation=implementation, **options)
        assert got.dtype == q.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32),
            np.asarray(expected, np.float32),
            rtol=0,
            atol=tolerance(expected, case.dtype),
        )
        padding = np.asarray(got, np.float32)[int(metadata.cu_q_lens[-1]) :]
        assert padding.size
        assert not padding.any()

    @given(data=st.data())
    def test_any_ragged_step(self, implementation: str, data: st.DataObject) -> None:
        window = data.draw(st.sampled_from([None, 5]))
        rows: list[tuple[int, int]] = []
        tokens = 48
        for _ in range(data.draw(st.integers(1, 5))):
            count = data.draw(st.integers(0, tokens))
            length = count + data.draw(st.integers(0, 60 - count)) if count < 60 else count
            rows.append((length, count))
            tokens -= count
        case = Case(rows, page_size=4, tokens=48, num_rows=6, table_width=16, num_pages=80)
        q, kv, metadata = case.build()
        expected = attend(q, kv, 0, metadata, scale=0.2, window=window, implementation="reference")
        got = attend(q, kv, 0, metadata, scale=0.2, window=window, implementation=implementation)
        atol = max(tolerance(expected, "float32"), 1e-6)
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)

    def test_bits_of_a_row_do_not_depend_on_its_neighbours(self, implementation: str) -> None:
        def run(rows: Sequence[tuple[int, int]], seeds: Sequence[int], order: int) -> jax.Array:
            case = Case(
                rows,
                tokens=160,
                num_rows=8,
                table_width=40,
                num_pages=60,
                seeds=seeds,
                order=order,
            )
            q, kv, metadata = case.build()
            return attend(q, kv, 1, metadata, scale=0.2, implementation=implementation)

        chunk, decode = (130, 70), (200, 1)
        alone = run([chunk, decode], [7, 8], order=0)
        crowd = run([(50, 1), decode, (33, 33), chunk, (9, 9)], [1, 8, 2, 7, 3], order=5)
        np.testing.assert_array_equal(alone[:70], crowd[35:105])
        np.testing.assert_array_equal(alone[70], crowd[1])

    def test_bits_do_not_depend_on_the_table(self, implementation: str) -> None:
        q, kv, metadata = Case(MIX).build()
        wide = jnp.pad(metadata.page_table, ((0, 5), (0, 200)))
        more = dataclasses.replace(
            metadata,
            page_table=wide,
            kv_lens=jnp.pad(metadata.kv_lens, (0, 5)),
            cu_q_lens=jnp.pad(metadata.cu_q_lens, (0, 5), mode="edge"),
        )
        narrow = attend(q, kv, 1, metadata, scale=0.2, implementation=implementation)
        np.testing.assert_array_equal(
            narrow, attend(q, kv, 1, more, scale=0.2, implementation=implementation)
        )

    def test_pages_before_the_window_are_not_read(self, implementation: str) -> None:
        case = Case([(200, 1), (150, 20)], page_size=4)
        q, kv, metadata = case.build()
        table = np.array(metadata.page_table)
        table[0, : (200 - 30) // 4] = 0
        table[1, : (150 - 20 - 30 + 1) // 4] = 0
        kept = dataclasses.replace(metadata, page_table=jnp.asarray(table))
        options = {"scale": 0.2, "window": 30, "implementation": implementation}
        np.testing.assert_array_equal(
            attend(q, kv, 1, metadata, **options), attend(q, kv, 1, kept, **options)
        )

    def test_without_tokens_everything_is_padding(self, implementation: str) -> None:
        q, kv, metadata = Case([(0, 0), (30, 0)]).build()
        got = attend(q, kv, 0, metadata, scale=1.0, implementation=implementation)
        np.testing.assert_array_equal(got, jnp.zeros_like(q))


def test_int8_pool_goes_to_xla() -> None:
    case = Case(MIX, heads=4, kv_heads=2)
    q, kv, metadata = case.build()
    whole = np.nan_to_num(np.asarray(kv.pages) * 30).round().clip(-127, 127).astype(np.int8)
    scales = jnp.full((case.layers, 2 * case.kv_heads), 1 / 30)
    quantized = KVGroup(pages=jnp.asarray(whole), scales=scales, dtype="int8")
    expected = attend(q, quantized, 1, metadata, scale=0.2, implementation="reference")
    got = attend(q, quantized, 1, metadata, scale=0.2)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(expected, "float32"))
    with pytest.raises(ValueError, match=r"numba.*pages hold int8"):
        attend(q, quantized, 1, metadata, scale=0.2, implementation="numba")


def test_arguments_are_checked_by_name() -> None:
    q, kv, metadata = Case(((5, 1), (9, 9))).build()

    def refuses(pattern: str, q: jax.Array = q, **changes: object) -> None:
        fields = {k: v for k, v in changes.items() if hasattr(metadata, k)}
        options = {"scale": 0.2, **{k: v for k, v in changes.items() if k not in fields}}
        layer = options.pop("layer", 0)
        pool = options.pop("kv", kv)
        with pytest.raises(ValueError, match=pattern):
            paged_attention(q, pool, layer, dataclasses.replace(metadata, **fields), **options)

    refuses(r"implementation='triton'.*reference, xla, numba", implementation="triton")
    refuses(r"platform='abacus'.*cpu, gpu, tpu", platform="abacus")
    refuses(r"numba.*platform='gpu'", implementation="numba", platform="gpu")
    refuses(r"q has shape", q=q[:, :, :16])
    refuses(r"q has 3 heads.*multiple of kv_heads = 2", q=q[:, :3])
    refuses(r"q has dtype int32", q=q.astype(jnp.int32))
    refuses(r"kv_lens has shape", kv_lens=metadata.kv_lens[:2])
    refuses(r"kv_lens has dtype", kv_lens=metadata.kv_lens.astype(jnp.int16))
    refuses(r"cu_q_lens has shape", cu_q_lens=metadata.cu_q_lens[:2])
    refuses(r"page_table has shape", page_table=metadata.page_table[0])
    refuses(r"scale=nan", scale=float("nan"))
    refuses(r"window=0", window=0)
    refuses(r"soft_cap=-1.0", soft_cap=-1.0)
    refuses(r"sinks has shape", sinks=jnp.zeros(3))
    refuses(r"scales has shape", kv=dataclasses.replace(kv, scales=jnp.ones((1, 1))))


def test_odd_head_dim_goes_to_xla_and_numba_refuses_it() -> None:
    q, kv, metadata = Case([(20, 3)], head_dim=24).build()
    expected = attend(q, kv, 0, metadata, scale=0.2, implementation="reference")
    got = attend(q, kv, 0, metadata, scale=0.2, platform="cpu")
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(expected, "float32"))
    with pytest.raises(ValueError, match=r"head_dim=24 is not a multiple of 16"):
        attend(q, kv, 0, metadata, scale=0.2, implementation="numba", platform="cpu")


def test_numba_refuses_indices_outside_of_the_pool() -> None:
    q, kv, metadata = Case([(20, 3), (5, 1)]).build()
    for changes in (
        {"page_table": metadata.page_table.at[0, 1].set(999)},
        {"page_table": metadata.page_table.at[0, 0].set(-1)},
        {"kv_lens": metadata.kv_lens.at[0].set(10_000)},
        {"cu_q_lens": metadata.cu_q_lens.at[-1].set(10_000)},
    ):
        wrong = dataclasses.replace(metadata, **changes)
        with pytest.raises(Exception, match="point outside of the pool"):
            jax.block_until_ready(attend(q, kv, 0, wrong, scale=0.2, implementation="numba"))
    with pytest.raises(Exception, match="point outside of the pool"):
        jax.block_until_ready(attend(q, kv, 7, metadata, scale=0.2, implementation="numba"))


def test_an_empty_pool_is_zeros() -> None:
    kv = allocate_kv(2, 3, 4, 1, 16, dtype="bfloat16")
    assert kv.pages.shape == (2, 3, 4, 2, 16)
    assert not np.asarray(kv.pages).any()
