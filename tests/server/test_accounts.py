import hmac
import random

import pytest

from megakernel_tts.server.accounts import Account, Accounts, Allowance
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.keys import ApiKey, Priority
from tests.rig import ManualClock

KEY = ApiKey(name="bot", key="secret")


def key(**limits: int) -> ApiKey:
    return ApiKey(name="bot", key="secret", **limits)  # type: ignore[arg-type]


def refusal(account: Account, num_characters: int = 0) -> RequestError:
    with pytest.raises(RequestError) as caught:
        account.check(num_characters)
    assert (caught.value.status, caught.value.reason) == (429, "limit")
    return caught.value


def test_an_allowance_gives_its_amount_each_minute() -> None:
    """Whatever arrives when, at most one minute's amount beyond the rate is given."""
    rng, clock = random.Random(1), ManualClock()
    allowance, taken = Allowance(60, clock), 0
    for _ in range(2000):
        clock.now_s += rng.expovariate(3.0)
        amount = rng.randint(1, 5)
        if not allowance.wait_s(amount):
            allowance.take(amount)
            taken += amount
        assert taken <= 60 + clock.now_s + 1e-6
    assert taken >= 0.95 * clock.now_s, "the rate is used up"


def test_the_wait_is_the_time_after_which_the_amount_is_there() -> None:
    clock = ManualClock()
    allowance = Allowance(60, clock)
    allowance.take(60)
    wait_s = allowance.wait_s(10)
    assert wait_s == pytest.approx(10)
    clock.now_s += wait_s - 0.01
    assert allowance.wait_s(10) > 0
    clock.now_s += 0.02
    assert allowance.wait_s(10) == 0


def test_an_amount_beyond_a_minute_is_given_when_full_and_paid_for_later() -> None:
    clock = ManualClock()
    allowance = Allowance(60, clock)
    assert allowance.wait_s(600) == 0
    allowance.take(600)
    assert allowance.wait_s(1) == pytest.approx(541)
    allowance.take(1)
    assert allowance.wait_s(600) == pytest.approx(601)


def test_limits_are_refused_with_the_time_until_they_allow_more() -> None:
    clock = ManualClock()
    account = Account(key(requests_per_minute=6, characters_per_minute=60), clock)
    for _ in range(6):
        account.check(0)
        account.open_stream()
    assert refusal(account).retry_after_s == 10
    clock.now_s = 30
    account.take_characters(59)
    account.check(1)
    assert refusal(account, 21).retry_after_s == 20


def test_text_beyond_the_limit_is_spoken_and_delays_the_next_request() -> None:
    clock = ManualClock()
    account = Account(key(characters_per_minute=60), clock)
    account.check(0)
    account.take_characters(90)  # live text, whose length was unknown
    assert refusal(account).retry_after_s == 31


def test_a_closed_stream_allows_another_one() -> None:
    account = Account(key(streams=2))
    for _ in range(2):
        account.check(0)
        account.open_stream()
    assert "2 streams" in refusal(account).message
    account.close_stream()
    account.check(0)


def test_an_account_without_limits_refuses_nothing() -> None:
    account = Account()
    for _ in range(1000):
        account.check(1 << 20)
        account.open_stream()
        account.take_characters(1 << 20)


@pytest.mark.parametrize(
    ("limit", "requested", "priority"),
    [
        (None, None, Priority.PREFETCH),
        (None, Priority.BATCH, Priority.BATCH),
        (None, Priority.LIVE, Priority.LIVE),
        (Priority.LIVE, None, Priority.LIVE),
        (Priority.LIVE, Priority.BATCH, Priority.BATCH),
        (Priority.BATCH, Priority.LIVE, Priority.BATCH),
        (Priority.PREFETCH, None, Priority.PREFETCH),
    ],
)
def test_a_request_may_name_a_class_up_to_that_of_its_key(
    limit: Priority | None, requested: Priority | None, priority: Priority
) -> None:
    account = Account(ApiKey(name="bot", key="secret", priority=limit))
    assert account.priority(requested, default=Priority.PREFETCH) is priority


def test_accounts_are_found_by_any_of_the_given_keys() -> None:
    accounts = Accounts([ApiKey(name=str(i), key=f"secret-{i}") for i in range(3)])
    found = accounts.find(["wrong", "secret-2"])
    assert found is not None and found.name == "2"
    assert accounts.find(["secret-2"]) is found
    assert accounts.find(["secret"]) is None and accounts.find([]) is None


@pytest.mark.parametrize("given", ["secret-0", "secret-2", "wrong", ""])
def test_every_key_is_compared_whichever_is_given(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """And in constant time, so that the time of a refusal tells nothing about the keys."""
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def recorded(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare_digest(a, b)

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    accounts = Accounts([ApiKey(name=str(i), key=f"secret-{i}") for i in range(3)])
    assert (accounts.find([given]) is None) is (given in ("wrong", ""))
    assert len(compared) == 3 and {len(each) for pair in compared for each in pair} == {32}


def test_without_keys_all_share_one_account() -> None:
    accounts = Accounts([])
    found = accounts.find([])
    assert found is not None and found.name == "" and accounts.find(["any"]) is found
