"""Prefix caching: what is found, what is kept, what is counted; on a runner that notices foreign pages."""

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpaged.core.kv_cache_manager import KVGroupSpec, first_live_page
from jpaged.core.request import Request

from .fake_runner import VOCAB, FakeRunner, expected_output


def runner(pages: int = 200, page_size: int = 4, windows: Any = (None,), **kw: Any) -> FakeRunner:
    options: dict[str, Any] = {
        "page_size": page_size,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 100,
    }
    return FakeRunner(groups=[KVGroupSpec(pages, w) for w in windows], **options | kw)


def request(sequence: int, ids: list[int], max_tokens: int = 2, **kw: Any) -> Request:
    return Request(sequence=sequence, prompt_token_ids=ids, max_tokens=max_tokens, **kw)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def serve(run: FakeRunner, *requests: Request) -> list[int | None]:
    """Runs requests to their ends, looks at their tokens; how many of each were cached."""
    for one in requests:
        run.scheduler.add(one)
    while run.scheduler.has_unfinished():
        run.step()
    run.settle()
    run.assert_empty()
    for one in requests:
        assert one.output_token_ids == expected_output(one, run.windows)
    return [one.num_cached for one in requests]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_hit_is_all_full_pages_but_the_last_token(
    page_size: int, beside: int, pages: int, overlap: bool
) -> None:
    """B31: a prompt that is wholly cached; at least one token is computed, and the answer is the same."""
    length = pages * page_size + beside
    if length < 1:
        return
    run = runner(page_size=page_size, overlap=overlap)
    ids = words(0, length)
    assert serve(run, request(0, ids)) == [0]
    assert serve(run, request(1, list(ids))) == [(length - 1) // page_size * page_size]


def test_what_an_answer_left_is_found_by_the_next_turn() -> None:
    run = runner()
    first = request(0, words(0, 10), max_tokens=12)
    serve(run, first)
    turn = first.prompt_token_ids + first.output_token_ids
    # The last token was sampled and never computed.
    assert serve(run, request(1, turn + words(1, 5))) == [(len(turn) - 1) // 4 * 4]


@pytest.mark.parametrize(
    "other",
    [
        {"extras": (("cache_salt", b"b"),)},
        {"extras": (("adapter", b"a"),)},
        {"extras": ()},
        {"extras": (("cache_salt", b"a"), ("adapter", b"a"))},
    ],
)
def test_other_extras_share_nothing(other: dict[str, Any]) -> None:
    """B30: the same tokens under another adapter or salt."""
    run, ids = runner(), words(0, 20)
    salt = {"extras": (("cache_salt", b"a"),)}
    assert serve(run, request(0, ids, **salt)) == [0]
    assert serve(run, request(1, ids, **other)) == [0]
    assert serve(run, request(2, ids, **salt)) == [16]


def test_other_weights_share_nothing() -> None:
    run, ids = runner(), words(0, 20)
    serve(run, request(0, ids))
    run.change_weights()
    assert run.kv.num_cached == 0
    assert serve(run, request(1, ids)) == [0]
    assert serve(run, request(2, ids)) == [16]


def test_running_requests_go_on_under_new_weights_and_offer_their_new_pages() -> None:
    run, ids = runner(), words(0, 20)
    run.scheduler.add(request(0, ids, max_tokens=8))
    for _ in range(4):
        run.step()
    run.change_weights()
    assert serve(run) == []
    assert serve(run, request(1, ids)) == [16]


def test_a_request_may_opt_out_of_reading() -> None:
    """It computes everything, counts nothing, and leaves pages for others."""
    run, ids = runner(), words(0, 20)
    assert serve(run, request(0, ids, reads_cache=False)) == [0]
    assert run.scheduler.prefix_queries == 0
    assert serve(run, request(1, ids)) == [16]
    assert serve(run, request(2, ids, reads_cache=False)) == [0]
    assert run.scheduler.prefix_queries == 20 and run.scheduler.prefix_hits == 16


def test_without_caching_nothing_is_kept() -> None:
    run, ids = runner(prefix_caching=False), words(0, 20)
    assert serve(run, request(0, ids), request(1, ids)) == [0, 0]
    assert run.kv.num_cached == 0
    assert serve(run, request(2, ids)) == [0]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("reads_cache", [False, True])
@pytest.mark.parametrize("length", [3, 4, 5, 21, 40])
def test_samples_share_the_full_pages_of_their_prompt(
    prefix_caching: bool, reads_cache: bool, length: int
) -> None:
    """n > 1: the prompt is computed once, but for its last tokens."""
    run = runner(prefix_caching=prefix_caching)
    ids = words(0, length)
    samples = [
        request(i, ids, 6, leader=0, reads_cache=reads_cache, stop_token_ids=frozenset([99]))
        for i in range(4)
    ]
    shared = (length - 1) // 4 * 4
    assert serve(run, *samples) == [0, shared, shared, shared]
    assert run.num_tokens == length + 3 * (length - shared) + 4 * 5
    assert run.scheduler.prefix_hits == 0, "one's own samples are no hits"


def test_samples_do_not_wait_for_a_leader_that_is_gone() -> None:
    run = runner(max_num_batched_tokens=8)
    for i in range(3):
        run.scheduler.add(request(i, words(0, 30), 4, leader=0))
    run.step()
    assert run.scheduler.num_running == 1
    run.abort(0)
    assert serve(run) == []


def test_recompute_after_preemption_is_no_hit() -> None:
    """B34: prompts that have nothing in common, in a pool too small for them."""
    run = runner(pages=14, admission="all", max_model_len=48)
    requests = [request(i, words(i, 10), 30) for i in range(6)]
    assert serve(run, *requests) == [0] * 6
    assert run.scheduler.num_preemptions > 0
    assert run.scheduler.prefix_hits == 0


def test_a_hot_prompt_stays_while_cold_ones_pass() -> None:
    """B33: a pool of ten pages, the hot prompt every second time, thirty cold ones."""
    run = runner(pages=11, max_model_len=36)
    hot = words(0, 13)
    serve(run, request(0, hot))
    for i in range(30):
        serve(run, request(2 * i + 1, words(i + 1, 13)))
        assert serve(run, request(2 * i + 2, hot)) == [12], f"evicted by cold prompt {i}"


def test_leaves_are_evicted_before_roots() -> None:
    """As pages are taken one by one, what is left of a cached prompt is always its beginning."""
    run = runner(pages=11, max_model_len=40)
    ids = words(0, 33)
    serve(run, request(0, ids, 1))
    pool = run.kv.pools[0]
    one = request(1, ids)
    found = []
    while pool.num_cached:
        pool.allocate(pool.num_free + 1)
        found.append(len(run.scheduler._reuse.hit(one)))
    assert found == list(range(7, -1, -1))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    branches=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    num_pages=st.integers(9, 20),
)
def test_a_page_that_is_kept_has_its_whole_beginning_kept(
    lengths: list[int], branches: list[int], num_pages: int
) -> None:
    """Prompts that branch off one another, served one by one from a small pool."""
    run = runner(pages=num_pages, max_model_len=32)
    trunk = words(0, 40)
    prompts = [
        trunk[: min(branch, length)] + words(i + 1, length - min(branch, length))
        for i, (length, branch) in enumerate(zip(lengths, branches, strict=False))
    ]
    for i, ids in enumerate(prompts):
        serve(run, request(i, ids, 2))
        for other in prompts[: i + 1]:
            one = request(1000, other + [0])
            hit = len(run.scheduler._reuse.hit(one))
            later = [run.kv.match([key]) for key in one.page_keys[hit:]]
            assert not any(later), "a page is kept whose beginning is gone"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_window_holds_few_pages_and_its_hits_need_few(overlap: bool) -> None:
    """B40: window 8, page 4, 60 tokens; the output is that of a full cache, and the last pages are hits."""
    run = runner(windows=(8,), max_num_batched_tokens=4, overlap=overlap)
    ids = words(0, 40)
    first = request(0, ids, 20)
    run.scheduler.add(first)
    most = 0
    while run.scheduler.has_unfinished():
        run.step()
        if first.row >= 0:
            most = max(most, sum(page != 0 for page in run.kv.table(0, 0)))
    run.settle()
    assert most <= 8 // 4 + 1
    assert first.output_token_ids == expected_output(first, [8])
    # Only what the window can see is looked for: the pages before may be gone.
    pool, keys = run.kv.pools[0], list(first.page_keys)
    assert run.kv.match(keys) == 14
    for key in keys[: first_live_page(14 * 4, 4, 8)]:
        page = pool.find(key)
        assert page is not None
        pool._free.add([page])
        del pool._cache._idle[page]
        pool._cache.forget(page)
    assert run.kv.match(keys) == 14
    turn = ids + first.output_token_ids
    assert serve(run, request(1, turn)) == [56]


def test_a_hit_must_suit_every_group() -> None:
    """The full group has all pages; of the windowed one the last are evicted first."""
    run = runner(windows=(None, 8))
    ids = words(0, 40)
    serve(run, request(0, ids, 1))
    one = request(1, ids)
    assert len(run.scheduler._reuse.hit(one)) == 9
    windowed = run.kv.pools[1]
    gone = windowed.find(one.page_keys[7])
    assert gone is not None
    windowed._cache._idle.move_to_end(gone, last=False)
    windowed.release(windowed.allocate(windowed.num_free + 1))
    assert windowed.find(one.page_keys[7]) is None
    # Without page 7 neither 8 nor 9 pages will do: their windows begin in it.
    assert len(run.scheduler._reuse.hit(one)) == 7
    assert serve(run, one) == [28]


def test_two_that_compute_the_same_at_once_both_keep_their_pages() -> None:
    run = runner(max_num_batched_tokens=64)
    ids = words(0, 20)
    assert serve(run, request(0, ids), request(1, ids)) == [0, 0]
    assert run.kv.num_cached == 10
    assert serve(run, request(2, ids)) == [16]


def test_a_constant_digest_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """B32: keys alone decide what is shared, so that these tests must see it when keys are wrong."""
    monkeypatch.setattr("jpaged.core.prefix_reuse.next_key", lambda parent, ids: b"constant")
    run = runner()
    serve(run, request(0, words(0, 20)))
    with pytest.raises(AssertionError, match="foreign tokens"):
        serve(run, request(1, words(1, 20)))
