from pathlib import Path

import httpx
import pytest

import megakernel_tts
from bench.simulation import simulated_tts
from megakernel_tts import TTS
from megakernel_tts.server import page
from tests.server.running import RunningServer, locked_by, running_server

TYPES = {
    ".html": {"text/html"},
    ".css": {"text/css"},
    ".js": {"text/javascript", "application/javascript"},
    ".svg": {"image/svg+xml"},
}
FILES = sorted(file.name for file in Path(page.__file__).with_name("static").iterdir())


@pytest.mark.parametrize("path", ["", *(f"static/{name}" for name in FILES)])
def test_files_are_served_with_their_type_and_checked_for_changes(
    server: RunningServer, path: str
) -> None:
    reply = httpx.get(f"{server.url}/{path}")
    assert reply.status_code == 200
    suffix = Path(path or "index.html").suffix
    assert reply.headers["content-type"].split(";")[0] in TYPES[suffix]
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(reply.url, headers={"If-None-Match": reply.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_the_page_may_load_and_reach_this_server_only(server: RunningServer) -> None:
    policy = httpx.get(server.url).headers["content-security-policy"]
    sources = {
        source for rule in policy.split(";") for source in rule.split()[1:] if ":" not in source
    }
    assert sources == {"'none'", "'self'"}
    assert "media-src blob:" in policy  # recordings, which the page itself made


@pytest.mark.parametrize("path", ["static/none.js", "static/../app.py", "static/%2e%2e/app.py"])
def test_other_files_are_not_served(server: RunningServer, path: str) -> None:
    assert httpx.get(f"{server.url}/{path}").status_code == 404


def test_the_status_describes_model_and_streams(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/status").json() == {
        "version": megakernel_tts.__version__,
        "model": "simulated",
        "note": None,
        "kind": "custom_voice",
        "voices": [
            {"name": name, "languages": ["english", "german", "chinese"]}
            for name in ("ryan", "serena")
        ],
        "languages": ["english", "german", "chinese"],
        "takes_instruct": True,
        "takes_voices": False,
        "num_slots": 4,
        "num_speaking": 0,
        "num_waiting": 0,
        "unready_reason": None,
    }


def test_the_status_says_why_the_server_is_not_ready() -> None:
    with simulated_tts(num_slots=1, frame_seconds=0.0) as tts, running_server(tts) as server:
        server.server.streams.draining = True
        reply = httpx.get(f"{server.url}/status").json()
        assert reply["unready_reason"] == "the server is stopping"


def test_the_files_need_no_key_and_the_status_does(engine: TTS) -> None:
    with running_server(engine, locked_by("key")) as server:
        for path in ("", *(f"static/{name}" for name in FILES)):
            assert httpx.get(f"{server.url}/{path}").status_code == 200
        assert httpx.get(f"{server.url}/static/none.js").status_code == 401
        assert httpx.get(f"{server.url}/status").status_code == 401
        headers = {"X-API-Key": "key"}
        assert httpx.get(f"{server.url}/status", headers=headers).status_code == 200
