"""Calls to the voice agent over WebSockets."""

import asyncio
import base64
import json

import aiohttp
import numpy as np
from pipecat.serializers.protobuf import ProtobufFrameSerializer

from examples import voice_agent
from tests.fakes import TIMEOUT_S

SPEECH_S = 0.25  # of the greeting
LOUD = 1000  # of 32767


def loud_seconds(pcm: np.ndarray, rate: int) -> float:
    return float(np.count_nonzero(np.abs(pcm.astype(int)) > LOUD)) / rate


def test_a_websocket_client_receives_the_greeting(agent: str) -> None:
    async def call() -> float:
        serializer, received_s = ProtobufFrameSerializer(), 0.0
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{agent}/ws-client") as socket,
        ):
            while received_s < SPEECH_S:
                frame = await serializer.deserialize(await socket.receive_bytes())
                # The protocol does not distinguish input from output audio.
                audio = getattr(frame, "audio", b"")
                rate = getattr(frame, "sample_rate", 24_000)
                received_s += loud_seconds(np.frombuffer(audio, np.int16), rate)
            return received_s

    assert asyncio.run(asyncio.wait_for(call(), TIMEOUT_S)) >= SPEECH_S


def test_a_phone_call_receives_the_greeting_at_8_khz(agent: str) -> None:
    hello = [
        {"event": "connected", "protocol": "Call", "version": "1.0.0"},
        {"event": "start", "streamSid": "MZ0", "start": {"streamSid": "MZ0", "callSid": "CA0"}},
    ]

    async def call() -> int:
        num_loud = 0
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{agent}/ws") as socket,
        ):
            for message in hello:
                await socket.send_json(message)
            while num_loud < 8_000 * SPEECH_S:
                message = json.loads(await socket.receive_str())
                if message["event"] == "media":
                    mulaw = np.frombuffer(base64.b64decode(message["media"]["payload"]), np.uint8)
                    num_loud += int(np.count_nonzero((~mulaw & 0x7F) >= 0x30))  # 1/16 of full scale
            return num_loud

    assert asyncio.run(asyncio.wait_for(call(), TIMEOUT_S))


def test_every_transport_carries_audio_both_ways() -> None:
    names = {"webrtc", "websocket", "twilio", "telnyx", "plivo", "exotel", "eval"}
    assert set(voice_agent.TRANSPORTS) == names
    for make in voice_agent.TRANSPORTS.values():
        assert make().audio_in_enabled and make().audio_out_enabled
