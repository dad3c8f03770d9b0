"""What the server measures, in the format of Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specdec.decoding.result import Result

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_REQUESTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_TOKENS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        where: Any = {"namespace": "specdec", "registry": self._registry}
        timed: Any = {"buckets": _SECONDS, **where}
        self.responses = Counter("responses", "HTTP responses", ("route", "status"), **where)
        self.refused = Counter("queue_full", "Requests refused because the queue was full", **where)
        self.waiting = Gauge("requests_waiting", "Requests in the queue, the running ones excluded", **where)
        self._prompt = Counter(
            "prompt_tokens", "Prompt tokens, computed or kept from an earlier request", ("source",), **where
        )
        self._tokens = Counter("generated_tokens", "Tokens generated", **where)
        self._cycles = Counter("cycles", "Cycles: one draft, one verification pass, one commit", **where)
        drafts = {"offered": "drafted", "reached": "all earlier ones of the draft accepted", "accepted": "accepted"}
        self._drafts = {
            name: Counter(f"draft_{name}", f"Draft tokens by lookahead position: {what}", ("position",), **where)
            for name, what in drafts.items()
        }
        self._per_cycle = Histogram("tokens_per_cycle", "Tokens per cycle, of a request", buckets=_TOKENS, **where)
        self._queued = Histogram("queue_seconds", "Time in the queue", **timed)
        self._first = Histogram("first_token_seconds", "Time from the request to its first text", **timed)
        self._took = Histogram("request_seconds", "Time from the request to the end of its answer", **timed)
        self._per_token = Histogram("token_seconds", "Time per token after the prompt", buckets=_TOKEN_SECONDS, **where)
        self._sessions = Gauge("sessions_kept", "Sessions of earlier requests that are kept", **where)
        self._bytes = Gauge("sessions_bytes", "Bytes of the kept sessions' states", **where)
        self._batch = Histogram("batch_requests", "Requests in a pass", buckets=_REQUESTS, **where)
        self._rows = Histogram("pass_rows", "Rows of a pass, over all requests", buckets=_ROWS, **where)
        self._reasons = Counter("finished", "Finished generations", ("reason",), **where)

    def generated(self, result: Result, *, queued: float, first: float, took: float) -> None:
        """Count a generation; times in seconds."""
        stats = result.stats
        self._prompt.labels("computed").inc(stats.prefilled)
        self._prompt.labels("kept").inc(max(result.prompt_tokens - 1 - stats.prefilled, 0))
        self._tokens.inc(len(result.tokens))
        self._cycles.inc(stats.cycles)
        for name, counter in self._drafts.items():
            for position, count in enumerate(getattr(stats, name)):
                counter.labels(str(position)).inc(count)
        self._queued.observe(queued)
        self._first.observe(first)
        self._took.observe(took)
        self._reasons.labels(result.finish_reason).inc()
        if stats.cycles and result.tokens:
            self._per_cycle.observe(len(result.tokens) / stats.cycles)
            self._per_token.observe(stats.decode_seconds / len(result.tokens))

    def ran(self, requests: int, rows: int) -> None:
        """Count a pass."""
        if rows:
            self._batch.observe(requests)
            self._rows.observe(rows)

    def kept(self, count: int, size: int) -> None:
        """What is kept of earlier requests, in sessions and bytes."""
        self._sessions.set(count)
        self._bytes.set(size)

    def text(self) -> bytes:
        """All of them, for a scrape."""
        return generate_latest(self._registry)
