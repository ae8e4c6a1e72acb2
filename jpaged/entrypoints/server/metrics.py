"""Metrics of one server in the Prometheus form, under the names vLLM's users know.

Counts come from the engine when they are asked for; times from finished requests. The registry is the
server's own, so that two servers in one process do not mix.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jpaged.engine.async_llm_engine import AsyncLLMEngine
from jpaged.engine.outputs import RequestOutput

_LABELS = ("model_name",)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_LONG_SECONDS = (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """What /metrics tells."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._model = engine.model_name
        self._success = Counter(
            "jpaged:request_success",
            "Finished requests by the reason of their end.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            (*_SECONDS, *_LONG_SECONDS),
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first, per request.",
            _SECONDS,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds",
            "From arrival to the last token.",
            (*_SECONDS, *_LONG_SECONDS),
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "From arrival to the first step.",
            (*_SECONDS, *_LONG_SECONDS),
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generation = self._histogram(
            "request_generation_tokens", "Tokens of the longest answer to a request.", _TOKENS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"jpaged:{name}", text, _LABELS, buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model)

    def observe(self, output: RequestOutput, num_tokens: int) -> None:
        """Counts a finished request; `num_tokens` is the length of its longest sample."""
        for part in output.outputs:
            if part.finish_reason is not None:
                self._success.labels(self._model, part.finish_reason).inc()
        self._prompt.observe(len(output.prompt_token_ids))
        self._generation.observe(num_tokens)
        times = output.metrics
        first, last = times.first_token_time, times.finished_time
        if times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)
        if first is None:
            return
        self._ttft.observe(first - times.arrival_time)
        if last is not None:
            self._latency.observe(last - times.arrival_time)
            if num_tokens > 1:
                self._tpot.observe((last - first) / (num_tokens - 1))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's counters, read when they are asked for."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.get_stats()
        name = self._engine.model_name
        gauges = {
            "num_requests_running": ("Sequences in the running batch.", stats.num_running),
            "num_requests_waiting": ("Sequences in the queue.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the KV cache's pages that are held, 0 to 1.",
                stats.pages_used / max(1, stats.pages_total),
            ),
        }
        counters = {
            "num_preemptions": ("Sequences that lost their pages.", stats.num_preemptions),
            "prefix_cache_queries": (
                "Prompt tokens looked for in pages of earlier requests.",
                stats.prefix_cache_queries,
            ),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_cache_hits),
            "prompt_tokens": ("Tokens of prompts taken in.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Device steps.", stats.num_steps),
            "scheduled_tokens": ("Tokens that steps computed.", stats.scheduled_tokens),
            "padded_tokens": ("Tokens computed to fill a step's shape.", stats.padded_tokens),
        }
        for key, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"jpaged:{key}", text, labels=_LABELS)
            gauge.add_metric([name], value)
            yield gauge
        for key, (text, count) in counters.items():
            counter = CounterMetricFamily(f"jpaged:{key}", text, labels=_LABELS)
            counter.add_metric([name], count)
            yield counter
