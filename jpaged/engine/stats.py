"""EngineStats: what an engine has done and holds now. Plain numbers; imports no jax."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since start, except the first two, `pages_used` and `pages_cached`, which are of now.

    Attributes:
        num_running: sequences with a row.
        num_waiting: sequences in the queue.
        num_preemptions: times a sequence lost its pages to another.
        pages_total: pages that can be held, over all KV groups.
        pages_used: pages held.
        pages_cached: pages that nobody holds, kept for later requests with the same beginning.
        prefix_cache_queries: prompt tokens that were looked for in pages.
        prefix_cache_hits: prompt tokens that were found there.
        prompt_tokens: tokens of the prompts taken in.
        generation_tokens: tokens sampled.
        num_steps: device calls.
        scheduled_tokens: tokens that steps computed.
        padded_tokens: tokens computed beside them, to fill a step's shape.
        num_compilations: step programs compiled at start.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    pages_total: int
    pages_used: int
    pages_cached: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    scheduled_tokens: int
    padded_tokens: int
    num_compilations: int
