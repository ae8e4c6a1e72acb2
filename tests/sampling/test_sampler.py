"""The sampler against numpy: what is kept, what is drawn, and what its log-probabilities are."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.sampling.filters import filter_mask
from jpaged.sampling.noise import gumbel, noise_keys
from jpaged.sampling.params import MAX_LOGPROBS, SamplingParams
from jpaged.sampling.row_params import RowParams, empty_row_params
from jpaged.sampling.sampler import NUM_LIKELY, Sampled, sample

from . import oracle

run = jax.jit(sample)
# float32 sums over a vocabulary: partial sums closer to top_p than this may fall on either side.
MARGIN = 1e-4


def draw(logits: np.ndarray, params: RowParams, positions: Sequence[int] | np.ndarray) -> Sampled:
    """One draw a row, in batches of two sizes only: each shape is a compilation."""
    rows = len(logits)
    batch = 64 if rows <= 64 else 2048
    parts = []
    for start in range(0, rows, batch):
        take = np.arange(start, start + batch) % rows
        out = run(
            jnp.asarray(logits[take], jnp.float32),
            jax.tree.map(lambda x, take=take: jnp.asarray(np.asarray(x)[take]), params),
            jnp.asarray(np.asarray(positions)[take], jnp.int32),
        )
        parts.append(out)
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts)


def random_logits(rng: np.random.Generator, rows: int, vocab: int, *, ties: bool) -> np.ndarray:
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    return np.round(logits) if ties else logits


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 3, vocab // 2, vocab, vocab + 5])),
        top_p=float(rng.choice([1.0, 1e-6, 0.3, 0.9, 0.999])),
        logprobs=int(rng.integers(0, MAX_LOGPROBS + 1)) if rng.random() < 0.5 else None,
    )


# Below, at and beyond the number of likely tokens that are looked at first.
@pytest.mark.parametrize("vocab", [8, NUM_LIKELY + 1, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_the_best_of_what_is_kept_plus_noise(vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab + ties)
    checked = 0
    for _ in range(2):
        rows = 64
        logits = random_logits(rng, rows, vocab, ties=ties)
        params = [random_params(rng, vocab) for _ in range(rows)]
        seeds = [int(s) for s in rng.integers(0, 2**63, rows)]
        samples = [int(s) for s in rng.integers(0, 9, rows)]
        positions = rng.integers(0, 10_000, rows)
        device_rows = oracle.rows(*params, seeds=seeds, samples=samples)
        out = draw(logits, device_rows, positions)
        keys = noise_keys(
            device_rows.seed_low, device_rows.seed_high, device_rows.sample, jnp.asarray(positions)
        )
        noise = np.asarray(gumbel(keys, jnp.broadcast_to(jnp.arange(vocab), (rows, vocab))))
        for row, p in enumerate(params):
            if p.temperature == 0:
                assert out.tokens[row] == np.argmax(logits[row])
                continue
            scaled = (logits[row] - logits[row].max()) / np.float32(p.temperature)
            kept, margin = oracle.keep(scaled, p.top_k, p.top_p)
            if margin < MARGIN:
                continue
            total = np.where(kept, scaled + noise[row], -np.inf)
            assert kept[out.tokens[row]]
            # One rounding of the sum is all that may differ.
            assert total[out.tokens[row]] >= total.max() - 1e-4
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("ties", [False, True])
def test_filter_keeps_exactly_k_and_the_smallest_nucleus(ties: bool) -> None:
    rng = np.random.default_rng(ties)
    rows, vocab = 200, 40
    logits = random_logits(rng, rows, vocab, ties=ties)
    top_k = rng.choice([0, 1, 2, 7, 39, 40, 100], rows)
    top_p = rng.choice([1.0, 1e-7, 0.2, 0.5, 0.95, 0.9999], rows)
    mask = np.asarray(filter_mask(jnp.asarray(logits), jnp.asarray(top_k), jnp.asarray(top_p)))
    checked = 0
    for row in range(rows):
        kept, margin = oracle.keep(logits[row], int(top_k[row]), float(top_p[row]))
        if margin > MARGIN:
            np.testing.assert_array_equal(mask[row], kept)
            checked += 1
        if top_p[row] == 1 and top_k[row] > 0:
            assert mask[row].sum() == min(top_k[row], vocab)
    assert checked > 150


def test_ties_at_the_kth_place_go_to_the_lower_id() -> None:
    logits = np.full((2000, 8), -50.0)
    logits[:, :3] = np.log([0.3, 0.4, 0.3])
    params = oracle.rows(*[SamplingParams(top_k=2)] * 2000)
    tokens = draw(logits, params, np.arange(2000)).tokens
    assert set(tokens) == {0, 1}
    assert abs(np.mean(tokens == 1) - 4 / 7) < 0.05


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.75, {0, 1}), (0.5, {0}), (0.500001, {0, 1}), (1.0, {0, 1, 2, 3})]
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: set[int]) -> None:
    """Probabilities that are exact in binary, so that the sums are too."""
    logits = np.full(8, -np.inf)
    logits[:4] = np.log2(np.array([0.5, 0.25, 0.125, 0.125])) * np.log(2)
    tokens = draw(
        np.tile(logits, (1000, 1)), oracle.rows(*[SamplingParams(top_p=top_p)] * 1000), range(1000)
    ).tokens
    assert set(tokens) == kept


def test_top_k_1_and_a_tiny_top_p_are_greedy() -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 64, 1000, ties=True)
    for params in (SamplingParams(top_k=1, temperature=5), SamplingParams(top_p=1e-60)):
        tokens = draw(logits, oracle.rows(*[params] * 64), range(64)).tokens
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [8, 1000])
def test_draws_have_the_distribution_of_the_tempered_softmax(
    temperature: float, vocab: int
) -> None:
    rng = np.random.default_rng(7)
    count = 20_000
    logits = np.full(vocab, -100.0, np.float32)
    logits[:8] = rng.normal(0, 1, 8)
    logits = rng.permutation(logits)
    params = oracle.rows(*[SamplingParams(temperature=temperature)] * count, seeds=[11] * count)
    tokens = draw(np.tile(logits, (count, 1)), params, np.arange(count)).tokens
    likely = np.argsort(-logits)[:8]
    expected = np.exp(oracle.log_softmax(logits / temperature))[likely] * count
    seen = np.array([(tokens == i).sum() for i in likely])
    assert seen.sum() == count
    # 7 degrees of freedom: 29.9 is exceeded once in ten thousand.
    assert np.sum((seen - expected) ** 2 / expected) < 29.9


def test_noise_is_uniform_over_ids_and_never_infinite() -> None:
    """Every word the hash can end in, the two extremes included, is finite noise."""
    keys = np.array([[123, 456]], np.uint32)

    def unmix(x: int) -> int:
        """Inverse of MurmurHash3's finaliser."""
        x ^= x >> 16
        x = x * pow(0xC2B2AE35, -1, 2**32) % 2**32
        x ^= x >> 13 ^ x >> 26
        x = x * pow(0x85EBCA6B, -1, 2**32) % 2**32
        return x ^ x >> 16

    extremes = [0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 2, 2**32 - 1]
    ids = [
        (unmix(unmix(word) ^ 456) - 123) * pow(0x9E3779B1, -1, 2**32) % 2**32 for word in extremes
    ]
    noise = np.asarray(gumbel(jnp.asarray(keys), jnp.asarray([ids], jnp.uint32)))
    assert np.all(np.isfinite(noise))
    assert noise.min() < -2.5 and noise.max() > 15, "the ids reach the extremes"
    many = np.asarray(gumbel(jnp.asarray(keys), jnp.arange(200_000, dtype=jnp.int32)[None]))[0]
    # Gumbel: mean 0.5772 (Euler), variance pi^2 / 6.
    assert abs(many.mean() - 0.5772) < 0.02
    assert abs(many.var() - np.pi**2 / 6) < 0.03
    counts = np.histogram(np.exp(-np.exp(-many)), bins=20, range=(0, 1))[0]
    assert np.sum((counts - 10_000) ** 2 / 10_000) < 52  # 19 degrees of freedom, once in 10^4


def test_a_token_is_a_function_of_seed_sample_and_position() -> None:
    rng = np.random.default_rng(3)
    logits = np.tile(random_logits(rng, 1, 1000, ties=False), (4, 1))
    base = SamplingParams(temperature=3.0)

    def token(row: int, seed: int, sample_index: int, position: int) -> int:
        """Drawn in `row` of a batch whose other rows ask for other things."""
        others = [
            SamplingParams(temperature=0.0),
            SamplingParams(top_k=3, logprobs=2),
            SamplingParams(top_p=0.5),
            SamplingParams(),
        ]
        params = [base if i == row else other for i, other in enumerate(others)]
        rows = oracle.rows(*params, seeds=[seed] * 4, samples=[sample_index] * 4)
        return int(draw(logits, rows, [position] * 4).tokens[row])

    want = token(0, 42, 1, 17)
    assert all(token(row, 42, 1, 17) == want for row in range(4))
    variations = [(s, i, p) for s in (42, 43, 2**40 + 42, -1) for i in (0, 1) for p in (17, 18)]
    drawn = {v: token(0, *v) for v in variations}
    assert drawn[42, 1, 17] == want
    # 16 draws among 1000 tokens: a function that left one argument out would repeat itself.
    assert len(set(drawn.values())) > 10


def test_samples_without_filters_and_with_filters_that_keep_all_agree() -> None:
    rng = np.random.default_rng(9)
    logits = random_logits(rng, 32, 1000, ties=False)
    plain = draw(logits, oracle.rows(*[SamplingParams()] * 32), range(32)).tokens
    for params in (SamplingParams(top_k=1000), SamplingParams(top_k=10_000)):
        np.testing.assert_array_equal(
            draw(logits, oracle.rows(*[params] * 32), range(32)).tokens, plain
        )


@pytest.mark.parametrize("vocab", [8, 257])
def test_logprobs_and_ranks(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 8
    logits = random_logits(rng, rows, vocab, ties=False)
    params = [SamplingParams(logprobs=i, temperature=float(i % 3)) for i in range(rows)]
    out = draw(logits, oracle.rows(*params), range(rows))
    want = oracle.log_softmax(logits)
    count = min(vocab, MAX_LOGPROBS)
    for row in range(rows):
        token = out.tokens[row]
        assert out.logprobs[row] == pytest.approx(want[row, token], abs=1e-5)
        ranked = oracle.order(logits[row])
        assert ranked[out.ranks[row] - 1] == token
        np.testing.assert_array_equal(out.top_ids[row, :count], ranked[:count])
        np.testing.assert_allclose(
            out.top_logprobs[row, :count], want[row, ranked[:count]], atol=1e-5
        )
        assert np.all(np.isneginf(out.top_logprobs[row, count:]))


def test_masked_logits_are_never_drawn_and_poison_nobody() -> None:
    """-inf in one row; the greedy row beside it and the sampled one are what they are alone."""
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 3, 1000, ties=False)
    logits[1, 5:] = -np.inf
    params = [SamplingParams(temperature=0), SamplingParams(temperature=100.0), SamplingParams()]
    together = draw(logits, oracle.rows(*params), [3, 4, 5])
    for row, p in enumerate(params):
        alone = draw(logits[row : row + 1], oracle.rows(p), [3 + row])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-5)
    assert np.all(np.isfinite(together.logprobs))
    masked = np.tile(logits[1], (500, 1))
    for p in (params[1], SamplingParams(top_p=0.9999), SamplingParams(top_k=300)):
        assert draw(masked, oracle.rows(*[p] * 500), range(500)).tokens.max() < 5


@pytest.mark.parametrize("temperature", [1e-60, 1e-10, 1e300])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    logits = random_logits(np.random.default_rng(2), 200, 1000, ties=False) * 10
    params = oracle.rows(*[SamplingParams(temperature=temperature)] * 200)
    out = draw(logits, params, range(200))
    assert np.all(np.isfinite(out.logprobs))
    if temperature < 1:
        np.testing.assert_array_equal(out.tokens, logits.argmax(-1))
    else:
        assert len(set(out.tokens)) > 100, "nearly uniform"


def test_a_row_of_nan_yields_an_id_in_range_and_a_logprob_that_says_so() -> None:
    logits = np.array([[np.nan] * 8, [0, 1, 2, 3, 4, 5, 6, 7]], np.float32)
    out = draw(
        logits, oracle.rows(SamplingParams(temperature=0), SamplingParams(temperature=0)), [0, 0]
    )
    assert 0 <= out.tokens[0] < 8 and np.isnan(out.logprobs[0])
    assert out.tokens[1] == 7


def test_row_params_survive_their_words() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.25, logprobs=3)
    rows = oracle.rows(params, SamplingParams(), seeds=[2**64 - 2, -1], samples=[0, 7])
    assert np.asarray(rows.temperature).tolist() == [np.float32(0.7), 1.0]
    assert np.asarray(rows.top_k).tolist() == [5, 0]
    assert np.asarray(rows.top_p).tolist() == [0.25, 1.0]
    assert np.asarray(rows.seed_low).tolist() == [2**32 - 2, 2**32 - 1]
    assert np.asarray(rows.seed_high).tolist() == [2**32 - 1] * 2
    assert np.asarray(rows.sample).tolist() == [0, 7]
    assert np.asarray(rows.top_logprobs).tolist() == [3, -1]
    same = jax.tree.map(
        lambda a, b: (a.dtype, a.shape) == (b.dtype, b.shape), rows, empty_row_params(2)
    )
    assert all(jax.tree.leaves(same))
