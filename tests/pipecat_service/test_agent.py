"""The voice agent takes calls over WebSockets, too."""

import asyncio
import base64
import json

import aiohttp
import numpy as np
from pipecat.serializers.protobuf import ProtobufFrameSerializer

from examples import voice_agent

ENOUGH = 1.0  # seconds of the greeting
LOUD = 1000  # of 32767


def seconds_of_sound(pcm: np.ndarray, rate: int) -> float:
    return float(np.count_nonzero(np.abs(pcm.astype(int)) > LOUD)) / rate


def test_a_websocket_client_hears_the_greeting(agent: str) -> None:
    async def call() -> float:
        serializer, heard = ProtobufFrameSerializer(), 0.0
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{agent}/ws-client") as socket,
        ):
            while heard < ENOUGH / 4:
                frame = await serializer.deserialize(await socket.receive_bytes())
                # The wire knows audio, not its direction.
                audio = getattr(frame, "audio", b"")
                rate = getattr(frame, "sample_rate", 24_000)
                heard += seconds_of_sound(np.frombuffer(audio, np.int16), rate)
            return heard

    assert asyncio.run(asyncio.wait_for(call(), 30)) >= ENOUGH / 4


def test_a_phone_call_hears_the_greeting_at_8_khz(agent: str) -> None:
    hello = [
        {"event": "connected", "protocol": "Call", "version": "1.0.0"},
        {"event": "start", "streamSid": "MZ0", "start": {"streamSid": "MZ0", "callSid": "CA0"}},
    ]

    async def call() -> int:
        loud = 0
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{agent}/ws") as socket,
        ):
            for message in hello:
                await socket.send_json(message)
            while loud < 8_000 * ENOUGH / 4:
                message = json.loads(await socket.receive_str())
                if message["event"] == "media":
                    mulaw = np.frombuffer(base64.b64decode(message["media"]["payload"]), np.uint8)
                    loud += int(np.count_nonzero((~mulaw & 0x7F) >= 0x30))  # above 1/16 of full
            return loud

    assert asyncio.run(asyncio.wait_for(call(), 30))


def test_every_transport_carries_audio_both_ways() -> None:
    names = {"webrtc", "websocket", "twilio", "telnyx", "plivo", "exotel", "eval"}
    assert set(voice_agent.TRANSPORTS) == names
    for make in voice_agent.TRANSPORTS.values():
        assert make().audio_in_enabled and make().audio_out_enabled
