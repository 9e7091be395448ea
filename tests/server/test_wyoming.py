import asyncio
import errno
import gc
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from bench.simulation import words_in_audio
from megakernel_tts import TTS
from megakernel_tts.server.serving import bind
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.wyoming import _MAX_PART_BYTES, WyomingService
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, running_server, until, wait_until
from tests.server.wyoming_client import Client, WyomingServer, pcm_of, portions, serving, types_of


@pytest.fixture(scope="module")
def home(engine: TTS) -> Iterator[WyomingServer]:
    with serving(engine) as server:
        yield server


def test_the_description_lists_voices_with_codes_of_languages(home: WyomingServer) -> None:
    async def use(client: Client) -> Info:
        await client.send(Describe())
        return Info.from_event(await client.event())

    (program,) = home.run(use).tts
    assert program.supports_synthesize_streaming and program.installed and program.version
    assert [voice.name for voice in program.voices] == ["ryan", "serena"]
    assert program.voices[0].languages == ["en", "de", "zh"]


def test_a_ping_is_answered_with_its_text(home: WyomingServer) -> None:
    async def use(client: Client) -> list[str | None]:
        await client.send(Ping("a"), Ping())
        return [Pong.from_event(await client.event()).text for _ in range(2)]

    assert home.run(use) == ["a", None]


def test_a_ping_whose_text_is_no_unicode_is_answered(home: WyomingServer) -> None:
    async def use(client: Client) -> str | None:
        assert client._writer is not None
        client._writer.write(b'{"type": "ping", "data": {"text": "a\\ud800"}}\n')
        return Pong.from_event(await client.event()).text

    assert home.run(use) == "a?"


def test_errors_after_the_client_has_gone_are_not_sent(
    home: WyomingServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop of the server raises if a closed connection is written to."""
    event = b'{"type": "synthesize", "data": {"text": "Hi.", "voice": {"name": "nobody"}}}\n'
    for _ in range(50):
        with socket.create_connection((home.host, home.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(event)  # and the end of the block resets the connection
    home.run(lambda client: portions(client, "Hi."))  # after all of them
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_text_is_spoken_as_the_engine_speaks_it(home: WyomingServer) -> None:
    async def use(client: Client) -> list[Event]:
        await client.send(Synthesize(TEXT, SynthesizeVoice("serena")))
        return await client.until(AudioStop)

    speech = home.speech()
    events = home.run(use)
    assert types_of(events) == ["audio-start", "audio-chunk", "audio-stop"]
    assert np.array_equal(pcm_of(events), speech)
    start, stop = AudioStart.from_event(events[0]), AudioStop.from_event(events[-1])
    assert (start.rate, start.width, start.channels, start.timestamp) == (24_000, 2, 1, 0)
    assert stop.timestamp == round(len(speech) / 24)
    opened = home.tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
    assert opened[-1][:2] == ("serena", "auto")


def test_the_language_of_a_request_is_a_code(home: WyomingServer) -> None:
    async def use(client: Client) -> None:
        await client.send(Synthesize(TEXT, SynthesizeVoice(language="de-DE")))
        await client.until(AudioStop)

    home.run(use)
    opened = home.tts._loaded.engine.prompt_builder.opened  # type: ignore[attr-defined]
    assert opened[-1][:2] == ("ryan", "german")


def test_text_in_portions_is_spoken_once_and_its_repetition_is_ignored(
    home: WyomingServer,
) -> None:
    async def use(client: Client) -> list[Event]:
        return await portions(client, "Hel", "lo there, ", "my friend.")

    events = home.run(use)
    assert types_of(events) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert words_in_audio(pcm_of(events)) == [0, 1, 2, 3]


def test_text_in_portions_is_spoken_before_it_ends(home: WyomingServer) -> None:
    async def use(client: Client) -> list[Event]:
        await client.send(SynthesizeStart(), SynthesizeChunk("Hello there, "))
        events = await client.until(AudioChunk)
        await client.send(SynthesizeChunk("my friend."), SynthesizeStop())
        return events + await client.until(SynthesizeStopped)

    assert words_in_audio(pcm_of(home.run(use))) == [0, 1, 2, 3]


@pytest.mark.usefixtures("pauses")
def test_text_that_pauses_is_spoken_to_its_end(home: WyomingServer) -> None:
    async def use(client: Client) -> NDArray[np.int16]:
        await client.send(SynthesizeStart(), SynthesizeChunk("Hello there. "))
        events: list[Event] = []
        while words_in_audio(pcm_of(events)) != [0, 1]:
            events.append(await client.event())
        await client.send(SynthesizeStop())
        return pcm_of(events + await client.until(SynthesizeStopped))

    assert words_in_audio(home.run(use)) == [0, 1]


def test_requests_of_a_connection_are_answered_in_order(home: WyomingServer) -> None:
    async def use(client: Client) -> list[Event]:
        await client.send(Synthesize("One."), Synthesize("Two words."), Ping("end"))
        events = await client.until(Pong)
        return events + await portions(client, "Three ", "more words.")

    events = home.run(use)
    one = ["audio-start", "audio-chunk", "audio-stop"]
    assert types_of(events) == [*one, *one, "pong", *one, "synthesize-stopped"]
    assert home.num_streams == 0


@pytest.mark.parametrize("texts", [(), ("",), (" ", "\n")])
def test_text_without_words_has_no_audio(home: WyomingServer, texts: tuple[str, ...]) -> None:
    async def use(client: Client) -> list[Event]:
        return await portions(client, *texts)

    assert types_of(home.run(use)) == ["synthesize-stopped"]


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([Synthesize(" ")], "invalid_text"),
        ([Synthesize("a" * 70_000)], "string_above_max_length"),
        ([Synthesize(TEXT, SynthesizeVoice("nobody"))], "invalid_voice"),
        ([Synthesize(TEXT, SynthesizeVoice(language="klingon"))], "invalid_language"),
        ([Event("synthesize", {"text": TEXT, "text_format": "ssml"})], "invalid_value"),
        ([SynthesizeStart(SynthesizeVoice("nobody"))], "invalid_voice"),
        ([SynthesizeStart(), SynthesizeStart()], "invalid_value"),
        ([SynthesizeStart(), SynthesizeChunk("a b " * 20_000)], "text_too_long"),
        ([Event("synthesize", {"text": 3})], "invalid_value"),
        ([Event("synthesize", {"text": TEXT, "speed": 3})], "invalid_value"),
        ([Event("synthesize-start", {"pronunciations": [TEXT]})], "invalid_value"),
        ([Event("synthesize", {"text": TEXT, "voice": []})], "invalid_value"),
        ([Event("synthesize", {"text": TEXT, "voice": {"name": 3}})], "invalid_value"),
    ],
    ids=str,
)
def test_an_invalid_request_is_an_error_that_ends_the_connection(
    home: WyomingServer, events: list[Any], code: str
) -> None:
    async def use(client: Client) -> Error:
        for event in events:
            await client.write_event(event if isinstance(event, Event) else event.event())
        error = Error.from_event((await client.until(Error))[-1])
        assert await client.read_event() is None
        return error

    assert home.run(use).code == code
    wait_until(lambda: home.num_streams == 0)


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("live", [False, True])
def test_a_failure_within_the_speech_is_an_error(
    home: WyomingServer, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.setattr(home.tts._loaded.engine.backend, "failing_word", "Failing")
    text = "This begins as it should, and then it fails: Failing."

    async def use(client: Client) -> list[Event]:
        if live:
            await client.send(SynthesizeStart(), SynthesizeChunk(text + " More. "))
        else:
            await client.send(Synthesize(text))
        return await client.until(Error)

    events = home.run(use)
    assert types_of(events) == ["audio-start", "audio-chunk", "error"]
    assert Error.from_event(events[-1]).code == "synthesis_failed"


@pytest.mark.parametrize("live", [False, True])
def test_closing_the_connection_stops_the_speech(home: WyomingServer, live: bool) -> None:
    cancelled = home.metric('requests_success_total{finished_reason="abort"}')

    async def use(client: Client) -> None:
        if live:
            await client.send(SynthesizeStart(), SynthesizeChunk(TEXT * 500))
        else:
            await client.send(Synthesize(TEXT * 1000))
        await client.until(AudioChunk)
        assert home.num_streams == 1

    home.run(use)
    wait_until(lambda: home.num_streams == 0)
    assert home.metric('requests_success_total{finished_reason="abort"}') == cancelled + 1


def test_an_overload_is_an_error_at_once(engine: TTS) -> None:
    async def use(client: Client) -> str | None:
        others = [Client(server.host, server.port) for _ in range(engine.slots)]
        for other in others:
            await other.connect()
            await other.send(Synthesize(TEXT * 1000))
            await other.until(AudioChunk)
        await client.send(Synthesize(TEXT))
        error = Error.from_event(await client.event())
        for other in others:
            await other.disconnect()
        await until(lambda: server.num_streams == 0)
        return error.code

    with serving(engine, ServerSettings(max_queue=0)) as server:
        assert server.run(use) == "overloaded"


def test_a_stopping_server_refuses_requests_and_closes_connections(engine: TTS) -> None:
    async def use(client: Client) -> str | None:
        await client.send(Synthesize(TEXT))
        return Error.from_event(await client.event()).code

    with socket.socket() as idle:
        with serving(engine) as server:
            server.server.streams.draining = True
            assert server.run(use) == "draining"
            idle.connect((server.host, server.port))
            idle.sendall(b'{"type": "ping"}\n')
            assert b"pong" in idle.recv(1000)
        idle.settimeout(TIMEOUT_S)
        while idle.recv(1000):
            pass


BROKEN = [
    b"\n",
    b"no json\n",
    b"[]\n",
    b"3\n",
    b"{}\n",
    b'{"type": "synthesize", "data": []}\n',
    b'{"type": "synthesize", "data_length": "5"}\n',
    b'{"type": "synthesize", "data_length": 2}\n[]',
    b'{"type": "synthesize", "data_length": 1000000000000}\n',
    b'{"type": "synthesize", "payload_length": 1000000000000}\n',
    b'{"type": "synthesize", "data_length": 100}\n{}',
    b"[" * 100_000 + b"\n",
    b"x" * 1_000_000,
]


@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:60]))
def test_a_broken_event_ends_its_connection_only(
    home: WyomingServer, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection((home.host, home.port), timeout=TIMEOUT_S) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        except OSError as error:  # the server does not read all data before it closes
            assert error.errno in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)
    assert not caplog.records

    async def use(client: Client) -> Event:
        await client.send(Ping())
        return await client.event()

    assert Pong.is_type(home.run(use).type)


@pytest.mark.parametrize("part", ["data_length", "payload_length"])
@pytest.mark.parametrize("length", [_MAX_PART_BYTES + 1, 10**12])
def test_a_large_part_is_refused_before_it_arrives_and_others_continue(
    home: WyomingServer, part: str, length: int
) -> None:
    async def use(client: Client) -> list[Event]:
        await client.send(SynthesizeStart(), SynthesizeChunk("Hello there, "))
        events = await client.until(AudioChunk)
        with socket.create_connection((home.host, home.port), timeout=TIMEOUT_S) as other:
            other.sendall(json.dumps({"type": "ping", part: length}).encode() + b"\n")
            assert await asyncio.to_thread(other.recv, 1) == b""
        await client.send(SynthesizeChunk("my friend."), SynthesizeStop())
        return events + await client.until(SynthesizeStopped)

    assert words_in_audio(pcm_of(home.run(use))) == [0, 1, 2, 3]


def test_a_part_of_the_largest_size_is_read(home: WyomingServer) -> None:
    async def use(client: Client) -> Event:
        await client.write_event(Event("ping", payload=bytes(_MAX_PART_BYTES)))
        return await client.event()

    assert Pong.is_type(home.run(use).type)


def test_unknown_events_are_ignored(home: WyomingServer) -> None:
    async def use(client: Client) -> Event:
        await client.write_event(Event("transcribe", {"name": "x"}, payload=b"abc"))
        await client.send(SynthesizeChunk("outside of a text"), SynthesizeStop(), Ping())
        return await client.event()

    assert Pong.is_type(home.run(use).type)


def test_a_connection_that_is_reset_leaves_no_stream(
    home: WyomingServer, caplog: pytest.LogCaptureFixture
) -> None:
    request = json.dumps({"type": "synthesize", "data": {"text": TEXT * 1000}}) + "\n"
    with socket.create_connection((home.host, home.port), timeout=TIMEOUT_S) as client:
        client.sendall(request.encode())
        assert client.recv(100)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: home.num_streams == 0)
    assert not caplog.records


def test_a_client_that_does_not_read_is_disconnected(
    home: WyomingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel_tts.server.playback.MAX_BEHIND_S", 0.3)
    monkeypatch.setattr("megakernel_tts.server.wyoming_connection._CLOSE_TIMEOUT_S", 0.1)
    request = json.dumps({"type": "synthesize", "data": {"text": TEXT * 1000}}) + "\n"
    process = psutil.Process()
    gc.collect()  # files of earlier tests, which may also be closed later
    num_open = process.num_fds()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect((home.host, home.port))
        client.sendall(request.encode())
        wait_until(lambda: home.num_streams == 1)
        wait_until(lambda: home.num_streams == 0)
        # The server's socket is closed although its buffer is full.
        wait_until(lambda: process.num_fds() <= num_open + 1)


def test_an_idle_connection_is_closed(home: WyomingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel_tts.server.wyoming_connection._IDLE_S", 0.05)

    async def use(client: Client) -> Event | None:
        await client.send(Synthesize(TEXT * 20))  # whose speech takes longer
        await client.until(AudioStop)
        return await client.read_event()

    assert home.run(use) is None


def has_multicast() -> bool:
    """Whether this machine receives what it sends to the group of zeroconf."""
    group, interface = "224.0.0.251", socket.inet_aton("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        probe.settimeout(1)
        try:
            membership = socket.inet_aton(group) + interface
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            probe.sendto(b"probe", (group, probe.getsockname()[1]))
            return probe.recv(5) == b"probe"
        except OSError:  # a timeout, too
            return False


@pytest.mark.skipif(not has_multicast(), reason="multicast does not reach this machine itself")
def test_the_service_is_announced_in_the_network(engine: TTS) -> None:
    # Another server of the network may have a fixed name; this one would then be renamed.
    name = f"test voice {uuid4().hex}"

    async def find() -> AsyncServiceInfo | None:
        service = "_wyoming._tcp.local."
        async with AsyncZeroconf() as network:
            return await network.async_get_service_info(service, f"{name}.{service}", 60_000)

    with (
        bind("127.0.0.1", 0) as listener,
        running_server(engine, wyoming=WyomingService(listener, name)),
    ):
        found = asyncio.run(find())
        assert found is not None
        assert found.parsed_addresses() == ["127.0.0.1"]
        assert found.port == listener.getsockname()[1]


def test_connections_beyond_the_bound_are_closed(engine: TTS) -> None:
    with serving(engine, ServerSettings(max_connections=1)) as server:

        async def use(client: Client) -> Event | None:
            await client.send(Ping())
            await client.until(Pong)
            async with Client(server.host, server.port) as further:
                return await further.read_event()

        assert server.run(use) is None


def test_an_invalid_name_is_refused() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ValueError, match="zeroconf"):
        WyomingService(listener, "a" * 70)
