from pathlib import Path
from typing import Any

import pytest

from megakernel_tts.server.settings import ServerSettings, read_api_keys


def test_keys_are_the_lines_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the bot\n key-1 \n\nkey-2\n", encoding="utf-8")
    assert read_api_keys(file) == ("key-1", "key-2")


@pytest.mark.parametrize("text", ["", "# none\n", "two words\n", "schlüssel\n"])
def test_files_without_valid_keys_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"[kK]ey"):
        read_api_keys(file)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


@pytest.mark.parametrize(
    "fields", [{"max_queue": -1}, {"queue_timeout_s": 0.0}, {"queue_timeout_s": float("nan")}]
)
def test_invalid_limits_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerSettings(**fields)
