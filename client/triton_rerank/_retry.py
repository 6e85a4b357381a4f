# SPDX-License-Identifier: Apache-2.0
"""When a request is sent again, and how long one call may take. Pure but for the clock."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from ._errors import RerankError, ServerUnavailable

# With five retries the spans add up to 3 s: enough for a model that is being loaded again.
_FIRST_DELAY_S = 0.1
# A server that restarts takes minutes; asking more rarely than this gains it nothing.
_LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment by which a whole call must be over."""

    timeout_s: float
    at_s: float  # on time.monotonic

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """The deadline `timeout_s` from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    def remaining_s(self) -> float:
        """Seconds left, negative once it has passed."""
        return self.at_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter: a random part of a span that doubles."""

    max_retries: int

    def delay_s(self, error: RerankError, retries: int, remaining_s: float, part: float) -> float | None:
        """Seconds to wait before the next attempt, or None when `error` is final.

        Args:
            error: What the last attempt raised; only ServerUnavailable and Overloaded are worth another.
            retries: How many retries have been made.
            remaining_s: Seconds left of the call; no retry starts after them.
            part: The jitter, in [0, 1).
        """
        if not isinstance(error, ServerUnavailable) or retries >= self.max_retries:
            return None
        delay_s = part * min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(retries, 16))
        return delay_s if delay_s < remaining_s else None


def jitter() -> float:
    """A number in [0, 1) that spreads the retries of many clients."""
    return random.random()  # noqa: S311  nothing secret depends on it
