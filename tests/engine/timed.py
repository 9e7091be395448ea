"""A device on a virtual clock: each kind of work advances the clock by the time that it takes."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, PrefillResult
from megakernel_tts.codec.decoder import Decoder, DecodeRequest
from megakernel_tts.codec.vocoder import PendingSamples, TorchVocoder
from megakernel_tts.session import FRAME_S, AudioChunk, Event, Session
from tests.fakes import ScriptedBackend
from tests.rig import ManualClock


class Device:
    """Advances a clock by the time that work takes.

    Attributes:
        clock: The engine's clock.
        frame_s: Time of a frame of the backend.
        call_s: Time of a call of the codec, beside that of its frames.
        decode_s: Time of a frame in the codec.
        jitter: By which share each of these may be longer or shorter.
        stream_s: Time that each stream adds to a frame.
        position_s: Time of a position of a prompt.
        step_s: Time of a step, beside that of its frames.
        on_work: Called after the clock was advanced.
    """

    def __init__(
        self,
        frame_s: float,
        call_s: float = 0.0,
        decode_s: float = 0.0,
        jitter: float = 0.0,
        stream_s: float = 0.0,
        position_s: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        self.clock = ManualClock()
        self.frame_s, self.call_s, self.decode_s, self.jitter = frame_s, call_s, decode_s, jitter
        self.stream_s, self.position_s, self.step_s = stream_s, position_s, step_s
        self.on_work: Callable[[], object] = lambda: None
        self._rng = random.Random(0)

    def work(self, seconds: float) -> None:
        self.clock.now_s += seconds * self._rng.uniform(1 - self.jitter, 1 + self.jitter)
        self.on_work()


class TimedBackend(ScriptedBackend):
    """A scripted backend whose prompts and frames take time."""

    blocking = True

    def __init__(self, device: Device, num_slots: int = 2, max_streams: int | None = None) -> None:
        super().__init__(num_slots)
        self.max_streams = max_streams or num_slots
        self._device = device
        self._num_moving = 0

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        result = super().prefill(requests, budget)
        self._device.work(result.num_run * self._device.position_s)
        return result

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        assert len(slots) <= self.max_streams
        self._num_moving = len(slots)
        self._device.work(self._device.step_s)
        return super().step(slots, num_frames, overlap, on_last_frame)

    def _pass_gate(self) -> None:
        self._device.work(self._device.frame_s + self._num_moving * self._device.stream_s)


class TimedVocoder(TorchVocoder):
    """A vocoder of silence that takes time, during which no frame is made, as on a CPU."""

    def __init__(self, decoder: Decoder, device: Device) -> None:
        super().__init__(decoder)
        self._device = device

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        for request in requests:
            self._device.work(self._device.call_s + len(request.codes) * self._device.decode_s)
        return lambda: [np.zeros(1920 * len(request.codes), np.int16) for request in requests]


def gaps(chunks: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds without audio before each chunk, if playback begins with the first one.

    Args:
        chunks: The arrival in seconds and the frames of every chunk.
    """
    found: list[float] = []
    played_until_s = chunks[0][0]
    for arrival_s, num_frames in chunks:
        found.append(max(0.0, arrival_s - played_until_s))
        played_until_s = max(played_until_s, arrival_s) + num_frames * FRAME_S
    return found


def record_chunks(session: Session, clock: ManualClock) -> list[tuple[float, int]]:
    """Returns a list that receives the arrival in seconds and the frames of every chunk."""
    chunks: list[tuple[float, int]] = []
    put = session._events.put

    def record(event: Event) -> None:
        if isinstance(event, AudioChunk):
            chunks.append((clock.now_s, len(event.codes)))
        put(event)

    session._events.put = record  # type: ignore[method-assign]
    return chunks
