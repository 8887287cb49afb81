"""Token accounting: what a session used, and the limit it may not pass.

Fireworks bills three kinds of token: *prefill* (prompt tokens read), *sampled* (tokens
generated) and *trained* (tokens sent to forward_backward). The local service bills
nothing, and is counted alike.

Every request takes the most it may use from the limit before it is sent. A request that
fails without an answer counts with that bound, because it may have been billed: the
counters err upwards, never downwards. What the SDK repeats on its own after a dropped
connection is one request here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhelpers.tables import markdown_table, plain_text


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

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prefill + other.prefill,
            self.sampled + other.sampled,
            self.trained + other.trained,
        )

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


@dataclass(frozen=True)
class PlannedWork:
    """What a session is about to do, and the most tokens it can take.

    Attributes:
        rollouts: Rollouts planned, evaluations included.
        datums: How many of them may be trained on.
        prompt_tokens: The longest prompt, in tokens.
        max_tokens: The longest reply, in tokens.
        forwards: How many rollouts a forward pass reads again, as the KL to the base
            model asks.

    Example:
        >>> PlannedWork(10, 4, prompt_tokens=38, max_tokens=160).bound.total
        2768
    """

    rollouts: int
    datums: int
    prompt_tokens: int
    max_tokens: int
    forwards: int = 0

    @property
    def bound(self) -> TokenCounts:
        """The most tokens of each kind. A datum is one token shorter than its text."""
        datum = self.prompt_tokens + self.max_tokens - 1
        return TokenCounts(
            prefill=self.rollouts * self.prompt_tokens + self.forwards * datum,
            sampled=self.rollouts * self.max_tokens,
            trained=self.datums * datum,
        )


@dataclass(frozen=True)
class UsageReport:
    """What was used, beside the most that was planned.

    Counted here: prompts and replies by their token ids, training by the length of its
    datums. The account's bill is the last word on it.

    Attributes:
        used: Tokens used so far.
        planned: The most that the planned work could take, as the banner said.
        unanswered: The part of ``used`` that is a bound: requests that failed.
        prices: Dollars per million (prefill, sampled, trained) tokens, or None.

    Example:
        >>> print(UsageReport(TokenCounts(90, 10, 5), TokenCounts(100, 50, 50)))
        tokens    used  planned at most
        prefill     90              100
        sampled     10               50
        trained      5               50
        together   105              200
    """

    used: TokenCounts
    planned: TokenCounts
    unanswered: TokenCounts = TokenCounts()
    prices: tuple[float, float, float] | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """What, how much of it was used, and how much was planned at most."""
        found = [
            (name, f"{getattr(self.used, kind):,}", f"{getattr(self.planned, kind):,}")
            for name, kind in (
                ("prefill", "prefill"),
                ("sampled", "sampled"),
                ("trained", "trained"),
                ("together", "total"),
            )
        ]
        if self.prices is not None:
            cost = (self.used.cost(self.prices), self.planned.cost(self.prices))
            found.append(("cost", f"${cost[0]:,.2f}", f"${cost[1]:,.2f}"))
        if self.unanswered.total:
            found.append(("unanswered", f"{self.unanswered.total:,}", ""))
        return found

    def _repr_markdown_(self) -> str:
        return markdown_table(["tokens", "used", "planned at most"], self.rows())

    def __str__(self) -> str:
        return plain_text(self._repr_markdown_())


class TokenUsage:
    """Thread-safe token counters with an enforced limit.

    A request reserves the most it could use before it is sent, so that requests in
    flight together cannot pass the limit either; what it did not use is given back.

    Args:
        limit: Most tokens, all kinds together, or None for no limit.

    Example:
        >>> usage = TokenUsage(limit=100)
        >>> with usage.reserve(prefill=10, sampled=50) as spend:
        ...     spend(prefill=10, sampled=5)
        >>> usage.counts.total
        15
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = _checked(limit)
        self._lock = threading.Lock()
        self._counts = TokenCounts()
        self._unanswered = TokenCounts()
        self._reserved = 0

    @property
    def limit(self) -> int | None:
        """Most tokens, or None. It may be raised while the session is open.

        Raises:
            ValueError: On setting: neither a whole number of at least 1 nor None.
        """
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = _checked(limit)

    @property
    def counts(self) -> TokenCounts:
        """Tokens used so far, those of unanswered requests included."""
        with self._lock:
            return self._counts

    @property
    def unanswered(self) -> TokenCounts:
        """The part of :attr:`counts` that is a bound: requests that failed."""
        with self._lock:
            return self._unanswered

    def charge(self, *, prefill: int = 0, sampled: int = 0, trained: int = 0) -> None:
        """Count a request whose tokens are known, before it is sent.

        Raises:
            TokenLimitReached: They do not fit under the limit; nothing was counted.
        """
        asked = TokenCounts(prefill, sampled, trained)
        with self._lock:
            self._check(asked.total)
            self._counts += asked

    def require(self, tokens: int) -> None:
        """Refuse work of several requests that would not fit as a whole.

        Raises:
            TokenLimitReached: So many tokens do not fit under the limit.
        """
        with self._lock:
            self._check(tokens)

    @contextmanager
    def reserve(
        self, *, prefill: int = 0, sampled: int = 0, trained: int = 0
    ) -> Iterator[_Spend]:
        """Reserve the most a request may use, then count what it did use.

        If the block raises before it has counted, the whole reservation counts.

        Args:
            prefill, sampled, trained: Upper bounds for this request.

        Yields:
            A function taking ``prefill``, ``sampled`` and ``trained`` counts.

        Raises:
            TokenLimitReached: The bound does not fit under the limit.
        """
        bound = TokenCounts(prefill, sampled, trained)
        with self._lock:
            self._check(bound.total)
            self._reserved += bound.total
        spend = _Spend()
        try:
            yield spend
        except BaseException:
            if spend.used is None:
                spend.used = bound
                with self._lock:
                    self._unanswered += bound
            raise
        finally:
            with self._lock:
                self._reserved -= bound.total
                self._counts += spend.used or TokenCounts()

    def _check(self, tokens: int) -> None:
        """Refuse what does not fit; the lock is held."""
        used = self._counts.total + self._reserved
        if self._limit is not None and used + tokens > self._limit:
            raise TokenLimitReached(
                f"not sent: this request may use {tokens:,} tokens and {used:,} are "
                f"used or in flight, over token_limit={self._limit:,}. What was done "
                "is saved. To go on, raise session.usage.limit, or token_limit "
                "(TOKEN_LIMIT) in connect(), and resume; or take fewer or shorter "
                "rollouts"
            )


def _checked(limit: int | None) -> int | None:
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and not (whole and limit >= 1):
        raise ValueError(
            f"token_limit must be at least 1, got {limit!r}; give a whole number of "
            "tokens, or None for no limit"
        )
    return limit


class _Spend:
    """Takes what a reserved request really used."""

    def __init__(self) -> None:
        self.used: TokenCounts | None = None

    def __call__(self, *, prefill: int = 0, sampled: int = 0, trained: int = 0) -> None:
        self.used = (self.used or TokenCounts()) + TokenCounts(
            prefill, sampled, trained
        )


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
