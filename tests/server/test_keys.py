from pathlib import Path

import pytest

from megakernel_tts.server.keys import ApiKey, Priority, read_api_keys
from megakernel_tts.server.settings import ServerSettings

FILE = """
[[key]]
name = "bot"
key = "secret-1"
streams = 4
characters_per_minute = 20_000
requests_per_minute = 60

[[key]]
name = "night"
key = "secret-2"
priority = "batch"
"""


def read(tmp_path: Path, text: str) -> tuple[ApiKey, ...]:
    file = tmp_path / "keys.toml"
    file.write_text(text, encoding="utf-8")
    return read_api_keys(file)


def test_a_table_is_a_key_with_its_limits(tmp_path: Path) -> None:
    assert read(tmp_path, FILE) == (
        ApiKey(
            name="bot",
            key="secret-1",
            streams=4,
            characters_per_minute=20_000,
            requests_per_minute=60,
        ),
        ApiKey(name="night", key="secret-2", priority=Priority.BATCH),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key"),
        ("secret-1\n", "keys.toml"),
        ("[key]\nname = 'a'\nkey = 'b'", r"\[\[key\]\]"),
        ("key = ['a']", r"\[\[key\]\]"),
        ("keys = []", "keys is unknown"),
        ("[[key]]\nname = 'a'", "needs a key"),
        ("[[key]]\nkey = 'a'", "needs a name"),
        ("[[key]]\nname = 'a'\nkey = 3", "needs a key"),
        ("[[key]]\nname = ''\nkey = 'a'", "printable"),
        ("[[key]]\nname = 'a'\nkey = 'two words'", "without spaces"),
        ("[[key]]\nname = 'a'\nkey = 'schlüssel'", "ASCII"),
        ("[[key]]\nname = 'a'\nkey = 'b'\nstream = 1", "did you mean streams"),
        ("[[key]]\nname = 'a'\nkey = 'b'\nstreams = 0", "above 0"),
        ("[[key]]\nname = 'a'\nkey = 'b'\nstreams = true", "whole number"),
        ("[[key]]\nname = 'a'\nkey = 'b'\npriority = 'urgent'", "live, prefetch, batch"),
        ("[[key]]\nname = 'a'\nkey = 'b'\n[[key]]\nname = 'a'\nkey = 'c'", "same name"),
        ("[[key]]\nname = 'a'\nkey = 'b'\n[[key]]\nname = 'c'\nkey = 'b'", "same key"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_the_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    bot, nightly = read(tmp_path, page[page.index("[[key]]") :].partition("```")[0])
    assert (bot.streams, bot.priority, nightly.priority) == (4, Priority.LIVE, Priority.BATCH)


def test_keys_are_not_shown() -> None:
    settings = ServerSettings(api_keys=(ApiKey(name="bot", key="secret"),))
    assert "secret" not in repr(settings) and "bot" in repr(settings)
