"""The description of the HTTP interface is that of the routes and of what they accept."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from megakernel_tts import __version__
from megakernel_tts.server.encoding import SAMPLE_RATES, SampleEncoding
from megakernel_tts.server.fields import _GREEDY, _SAMPLING, MAX_TEXT_CHARACTERS
from megakernel_tts.server.keys import Priority
from tests.server.running import TEXT, RunningServer

ROOT = Path(__file__).parents[2]

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> Schema:
    return httpx.get(f"{server.url}/openapi.json").json()


def operations(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Path and method of each HTTP route."""
    for route in routes:
        if isinstance(route, Mount):
            yield from operations(route.routes or (), prefix + route.path)
        elif isinstance(route, Route) and route.include_in_schema:
            for method in (route.methods or set()) - {"HEAD"}:
                yield prefix + route.path.replace(":path", ""), method.lower()


def test_every_route_is_described(server: RunningServer, schema: Schema) -> None:
    described = {
        (path, method)
        for path, item in schema["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert described == {*operations(server.server.app.routes)}
    assert schema["info"]["version"] == __version__


def test_refusals_of_every_request_are_described(server: RunningServer, schema: Schema) -> None:
    """Of those without a valid key, and those from pages of other sites."""
    for path, operations in schema["paths"].items():
        if path in ("/health", "/ready"):
            continue
        for method, operation in operations.items():
            if method == "parameters":
                continue
            url = server.url + path.replace("{", "").replace("}", "")
            reply = httpx.request(method, url, headers={"Origin": "https://other.example"})
            assert reply.status_code == 403, (method, path)
            assert {"401", "403"} <= {*operation["responses"]}, (method, path)


def test_fields_and_their_values_are_those_of_the_server(schema: Schema) -> None:
    schemas = schema["components"]["schemas"]
    classes = [priority.name.lower() for priority in Priority]
    texts = {"SpeechRequest": "input", "CartesiaRequest": "transcript", "ElevenLabsRequest": "text"}
    for name, text in texts.items():
        fields = schemas[name]["properties"]
        assert fields[text]["maxLength"] == MAX_TEXT_CHARACTERS
        assert {*_SAMPLING, *_GREEDY} <= {*fields}
        assert name == "ElevenLabsRequest" or fields["priority"]["enum"] == [*classes, None]
    assert schema["components"]["parameters"]["priority"]["schema"]["enum"] == classes
    assert schemas["SpeechRequest"]["properties"]["sample_rate"]["enum"] == [*SAMPLE_RATES, None]
    output = schemas["CartesiaRequest"]["properties"]["output_format"]["properties"]
    assert output["encoding"]["enum"] == [*get_args(SampleEncoding)]
    assert output["sample_rate"]["enum"] == [*SAMPLE_RATES]


def test_fields_in_the_docs_are_described(schema: Schema) -> None:
    """Those of the first column of the table of OpenAI's requests."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = text.partition("## OpenAI\n")[2].partition("\n##")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    fields = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert fields <= {*schema["components"]["schemas"]["SpeechRequest"]["properties"]}
    assert "non_streaming_mode" in fields


@pytest.mark.parametrize(
    ("path", "name", "base"),
    [
        ("/v1/audio/speech", "SpeechRequest", {"input": TEXT}),
        ("/tts/bytes", "CartesiaRequest", {"transcript": TEXT}),
        ("/v1/text-to-speech/ryan?output_format=pcm_24000", "ElevenLabsRequest", {"text": TEXT}),
    ],
)
def test_each_value_of_an_enumeration_is_accepted(
    server: RunningServer, schema: Schema, path: str, name: str, base: dict[str, Any]
) -> None:
    for field, description in schema["components"]["schemas"][name]["properties"].items():
        for value in description.get("enum", ()):
            reply = httpx.post(server.url + path, json={**base, field: value})
            assert reply.status_code == 200, f"{field}={value!r}: {reply.text[:200]}"
