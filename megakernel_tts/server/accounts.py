"""What the clients of each key use, and their limits."""

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Sequence

from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.keys import ApiKey, Priority

_MINUTE_S = 60.0


class Allowance:
    """An amount per minute: a token bucket that holds one minute's amount and starts full."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts full.

        Args:
            per_minute: The amount.
            clock: Returns the time in seconds.
        """
        self._size = per_minute
        self._clock = clock
        self._full_s = clock()  # the time at which it is full, if nothing is taken

    def wait_s(self, amount: float) -> float:
        """Seconds until it holds an amount, or is full: a larger amount may overdraw it."""
        missing_s = min(amount, self._size) * _MINUTE_S / self._size
        return max(0.0, self._full_s - (_MINUTE_S - missing_s) - self._clock())

    def take(self, amount: float) -> None:
        """Takes an amount, which it need not hold."""
        self._full_s = max(self._full_s, self._clock()) + amount * _MINUTE_S / self._size


class Account:
    """What the clients of one key use.

    Text that is accepted is spoken to its end. If the account does not cover it, the next request
    waits until it does.

    Attributes:
        name: The key's name; empty if no key is needed.
        max_streams: Streams that may be open at once; None for no limit.
    """

    def __init__(
        self, key: ApiKey | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts without use.

        Args:
            key: The key; None for an account without limits.
            clock: Returns the time in seconds.
        """
        self.name = key.name if key else ""
        self._priority = key.priority if key else None
        self.max_streams = key.streams if key else None
        self._num_streams = 0
        self._requests = _allowance(key.requests_per_minute if key else None, clock)
        self._characters = _allowance(key.characters_per_minute if key else None, clock)

    def priority(self, requested: Priority | None, default: Priority) -> Priority:
        """The class of a request.

        Args:
            requested: The class that the request names, if any.
            default: The class of requests that name none, if the key does not set it.
        """
        if self._priority is None:
            return default if requested is None else requested
        return self._priority if requested is None else max(self._priority, requested)

    def check(self, num_characters: int) -> None:
        """Checks that a request is within the limits.

        Args:
            num_characters: Length of its text as far as it is known.

        Raises:
            RequestError: It is not.
        """
        if self.max_streams is not None and self._num_streams >= self.max_streams:
            raise _limit_error(f"{self.max_streams} streams at once", 1.0)
        if self._requests and (wait_s := self._requests.wait_s(1)):
            raise _limit_error("requests per minute", wait_s)
        if self._characters and (wait_s := self._characters.wait_s(max(1, num_characters))):
            raise _limit_error("characters per minute", wait_s)

    def open_stream(self) -> None:
        """Counts a request, and its stream as open."""
        self._num_streams += 1
        if self._requests:
            self._requests.take(1)

    def close_stream(self) -> None:
        """Counts a stream as closed."""
        self._num_streams -= 1

    def take_characters(self, num_characters: int) -> None:
        """Counts text."""
        if self._characters:
            self._characters.take(num_characters)


class Accounts:
    """The accounts of all keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        """Opens an account for each key.

        Args:
            keys: Valid keys; without any, no key is needed, and all clients share one account.
        """
        self._accounts = [(_digest(key.key), Account(key)) for key in keys]
        self._shared = None if keys else Account()

    def find(self, credentials: Iterable[str]) -> Account | None:
        """The account of the first valid key; None if there is none.

        The time does not depend on the keys: all are compared, by digests of one length.
        """
        if self._shared is not None:
            return self._shared
        given = [_digest(each) for each in credentials]
        found: Account | None = None
        for digest, account in self._accounts:
            for each in given:
                if hmac.compare_digest(digest, each):
                    found = found or account
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _allowance(per_minute: int | None, clock: Callable[[], float]) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, clock)


def _limit_error(limit: str, wait_s: float) -> RequestError:
    retry_after_s = math.ceil(wait_s)
    return RequestError(
        f"The key's limit of {limit} is reached. Try again in {retry_after_s} s.",
        429,
        "rate_limit_exceeded",
        reason="limit",
        retry_after_s=retry_after_s,
    )
