from typing import Any

import pytest

from megakernel_tts.server.settings import ServerSettings


@pytest.mark.parametrize(
    "fields", [{"max_queue": -1}, {"queue_timeout_s": 0.0}, {"queue_timeout_s": float("nan")}]
)
def test_invalid_limits_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerSettings(**fields)
