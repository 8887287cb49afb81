"""Token accounting: what a session used, and the limit it may not pass.

Fireworks bills three kinds of token: *prefill* (prompt tokens read), *sampled* (tokens
generated) and *trained* (tokens sent to forward_backward). The local service bills
nothing, and is counted alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class TokenLimitReached(RuntimeError):
    """A request was not sent because it could pass the session's token limit."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens used, by kind.

    Example:
        >>> (TokenCounts(5, 3, 0) - TokenCounts(1, 1, 0)).total
        6
    """

    prefill: int = 0
    sampled: int = 0
    trained: int = 0

    @property
    def total(self) -> int:
        """All three kinds together."""
        return self.prefill + self.sampled + self.trained

    def __sub__(self, earlier: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prefill - earlier.prefill,
            self.sampled - earlier.sampled,
            self.trained - earlier.trained,
        )

    def cost(self, prices: tuple[float, float, float]) -> float:
        """Cost in dollars at (prefill, sampled, trained) prices per million tokens."""
        used = (self.prefill, self.sampled, self.trained)
        return sum(n * price for n, price in zip(used, prices, strict=True)) / 1e6


class TokenUsage:
    """Thread-safe token counters with an enforced limit.

    A request reserves the most it could use before it is sent, so that requests in
    flight together cannot pass the limit either; what it did not use is given back.

    Args:
        limit: Most tokens, all kinds together, or None for no limit.

    Example:
        >>> usage = TokenUsage(limit=100)
        >>> with usage.reserve(60) as spend:
        ...     spend(prefill=10, sampled=5)
        >>> usage.counts.total
        15
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(
                f"token_limit must be at least 1, got {limit}; None means no limit"
            )
        self.limit = limit
        self._lock = threading.Lock()
        self._counts = TokenCounts()
        self._reserved = 0

    @property
    def counts(self) -> TokenCounts:
        """Tokens used so far."""
        with self._lock:
            return self._counts

    def _take(self, tokens: int) -> None:
        with self._lock:
            used = self._counts.total + self._reserved
            if self.limit is not None and used + tokens > self.limit:
                raise TokenLimitReached(
                    f"not sent: this request may use {tokens:,} tokens and {used:,} "
                    f"are used or in flight, over token_limit={self.limit:,}; raise "
                    "token_limit in connect(), or take fewer or shorter rollouts"
                )
            self._reserved += tokens

    def _spend(self, prefill: int = 0, sampled: int = 0, trained: int = 0) -> None:
        with self._lock:
            now = self._counts
            self._counts = TokenCounts(
                now.prefill + prefill, now.sampled + sampled, now.trained + trained
            )

    @contextmanager
    def reserve(self, tokens: int) -> Iterator[_Spend]:
        """Reserve the most a request may use, then count what it did use.

        Args:
            tokens: Upper bound for this request.

        Yields:
            A function taking ``prefill``, ``sampled`` and ``trained`` counts.

        Raises:
            TokenLimitReached: The bound does not fit under the limit.
        """
        self._take(tokens)
        try:
            yield _Spend(self)
        finally:
            with self._lock:
                self._reserved -= tokens


class _Spend:
    """Counts what a reserved request really used."""

    def __init__(self, usage: TokenUsage) -> None:
        self._usage = usage

    def __call__(self, *, prefill: int = 0, sampled: int = 0, trained: int = 0) -> None:
        self._usage._spend(prefill, sampled, trained)


class BusyClock:
    """Measures the wall time during which at least one request is in flight.

    Overlapping requests count once, so the result never exceeds elapsed time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._total = 0.0

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        with self._lock:
            running = time.perf_counter() - self._since if self._open else 0.0
            return self._total + running

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark one request as in flight."""
        with self._lock:
            if self._open == 0:
                self._since = time.perf_counter()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    self._total += time.perf_counter() - self._since
