from typing import Any

import pytest

from megakernel_tts.server.settings import ServerSettings, check_access


@pytest.mark.parametrize(
    "fields",
    [
        {"max_queue": -1},
        {"max_connections": 0},
        {"queue_timeout_s": 0.0},
        {"queue_timeout_s": float("nan")},
    ],
)
def test_invalid_limits_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerSettings(**fields)


@pytest.mark.parametrize("reached", [None, "0.0.0.0"])
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("no_auth", [False, True])
def test_other_machines_need_keys_or_an_explicit_permission(
    reached: str | None, keys: bool, no_auth: bool
) -> None:
    if (keys and no_auth) or (reached and not (keys or no_auth)):
        with pytest.raises(ValueError, match="contradict" if keys else reached):
            check_access(reached, keys=keys, no_auth=no_auth)
    else:
        check_access(reached, keys=keys, no_auth=no_auth)
