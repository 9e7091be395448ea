"""Audio of many streams, which arrives in jittered packets as in calls, and its results.

One event loop pushes the packets of all sessions and reads their results, as a server does.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.recognition import noise
from megakernel_stt import Final, Partial, Session
from megakernel_stt.model.config import FRAME_S, MELS_PER_FRAME, SAMPLE_RATE
from megakernel_stt.network.encoder import NUM_MISSING
from megakernel_stt.network.features import samples_until

PACKET_S = 0.02
_PACKET_SIZE = round(PACKET_S * SAMPLE_RATE)
_TICK_S = 0.001  # shortest pause between pushes; an event loop that sleeps for each takes longer
_MOST_PUSHES = 64  # between two turns of the readers


def arrivals(
    num_streams: int, seconds: float, jitter_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Times [streams, packets] at which packets arrive, in seconds; those of a stream in order."""
    num_packets = round(seconds / PACKET_S)
    recorded = rng.uniform(0, 0.5, (num_streams, 1)) + PACKET_S * np.arange(1, num_packets + 1)
    late = rng.uniform(0, jitter_s, (num_streams, num_packets))
    return np.maximum.accumulate(recorded + late, 1)


def percentiles_ms(values_s: Sequence[float], *percents: int) -> dict[str, float]:
    """Percentiles of seconds in milliseconds; empty if there is no value."""
    if not values_s:
        return {}
    return {f"p{q}": round(1000 * float(np.percentile(values_s, q)), 2) for q in percents}


class Microphones:
    """Pushes packets of noise to sessions when they arrive, and reads the sessions' events.

    Attributes:
        arrivals_s: [streams, packets] When packets arrive, in seconds after the start.
        pushed_s: [streams, packets] When they were pushed, in seconds after the start; set at the
            end of `run`.
        latencies_s: Seconds from the arrival of the packet that completes a chunk to the reading of
            its tokens. A chunk without new tokens has none.
        num_tokens: Of each stream.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        lookahead_ms: int,
        seconds: float,
        jitter_s: float,
        seed: int = 0,
    ) -> None:
        """Sets the times at which packets arrive.

        Args:
            sessions: Of one `STT`.
            lookahead_ms: Of the sessions: length of a chunk.
            seconds: Of audio.
            jitter_s: Longest delay of a packet.
            seed: Of the noise and the times.
        """
        rng, num_streams = np.random.default_rng(seed), len(sessions)
        self.arrivals_s = arrivals(num_streams, seconds, jitter_s, rng)
        self.pushed_s = np.zeros_like(self.arrivals_s)
        self.latencies_s: list[float] = []
        self.num_tokens = [0] * num_streams
        self._sessions = sessions
        self._finals = [asyncio.Queue[Final]() for _ in sessions]
        self._frames_per_chunk = round(lookahead_ms / 1000 / FRAME_S)
        self._noise = (32767 * noise(seconds + 1, seed)).astype(np.int16)
        offsets = rng.integers(0, SAMPLE_RATE, num_streams)
        self._order = np.argsort(self.arrivals_s, axis=None)
        streams, packets = np.divmod(self._order, self.arrivals_s.shape[1])
        # Stream, arrival and first sample of each packet; an element of an array would take as
        # long as its push.
        self._pushes = [
            *zip(
                streams.tolist(),
                self.arrivals_s.ravel()[self._order].tolist(),
                (offsets[streams] + packets * _PACKET_SIZE).tolist(),
                strict=True,
            )
        ]

    @property
    def push_delays_s(self) -> list[float]:
        """Seconds from the arrival of every packet to its push."""
        return (self.pushed_s - self.arrivals_s).ravel().tolist()

    @property
    def tokens_per_frame(self) -> float:
        """Tokens of all streams, divided by the frames of 80 ms of their audio."""
        return sum(self.num_tokens) / (self.arrivals_s.size * PACKET_S / FRAME_S)

    def packet_completing(self, num_frames: int) -> int:
        """Index of the packet with which a stream has the audio of so many frames."""
        num_samples = samples_until(num_frames * MELS_PER_FRAME - NUM_MISSING)
        return min(-(-num_samples // _PACKET_SIZE), self.arrivals_s.shape[1]) - 1

    async def run(self, start_s: float) -> None:
        """Pushes all packets, ends the sessions, and reads their events to the end.

        Args:
            start_s: The start, in seconds of `time.perf_counter`.
        """
        async with asyncio.TaskGroup() as readers:
            for stream in range(len(self._sessions)):
                readers.create_task(self._read(stream, start_s))
            await self._push(start_s)
            for session in self._sessions:
                session.end()

    async def finalize(self, stream: int) -> Final:
        """The result of `Session.finalize` of a stream, which has no other request open."""
        self._sessions[stream].finalize()
        return await self._finals[stream].get()

    async def _push(self, start_s: float) -> None:
        pushed_s = list[float]()
        description, count = f"{len(self._sessions)} streams", len(self._order)
        with tqdm(desc=description, total=count, disable=None) as progress:
            for stream, due_s, begin in self._pushes:
                if (left_s := start_s + due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(max(left_s, _TICK_S))
                elif len(pushed_s) % _MOST_PUSHES == 0:
                    await asyncio.sleep(0)  # readers run also while packets are late
                if len(pushed_s) % _MOST_PUSHES == 0:
                    progress.update(len(pushed_s) - progress.n)
                pushed_s.append(time.perf_counter())
                packet = self._noise[begin : begin + _PACKET_SIZE]
                self._sessions[stream].push(packet, SAMPLE_RATE)
        self.pushed_s.ravel()[self._order] = np.subtract(pushed_s, start_s)

    async def _read(self, stream: int, start_s: float) -> None:
        async for event in self._sessions[stream]:
            if isinstance(event, Partial):
                now_s, tokens = time.perf_counter() - start_s, event.transcript.tokens
                new = tokens[self.num_tokens[stream] :]
                for chunk in {round(t.start / FRAME_S) // self._frames_per_chunk for t in new}:
                    packet = self.packet_completing((chunk + 1) * self._frames_per_chunk)
                    self.latencies_s.append(now_s - self.arrivals_s[stream, packet])
                self.num_tokens[stream] = len(tokens)
            elif not event.is_last:
                self._finals[stream].put_nowait(event)
