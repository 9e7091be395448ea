"""Chunks that the vocoder is given before their last frame is made, and the order of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.lock_pauses import LockPauses
from megakernel_tts.loader import LoadedModel
from tests.fakes import ExpectingVocoder, ScriptedBackend
from tests.rig import TEXT, UNLIMITED, Rig, codes, drain, scripted


class SmallVocoder(ExpectingVocoder):
    """A vocoder that takes few frames early, of all streams together."""

    num_early: list[int]

    def decode_pending(self, requests):  # type: ignore[no-untyped-def]
        self.num_early.append(sum(request.num_frames for request in requests))
        return super().decode_pending(requests)


def test_no_more_frames_are_begun_early_than_the_vocoder_takes(
    load: Callable[..., LoadedModel],
) -> None:
    """The chunks of the other streams are decoded after the step; nothing is lost."""
    loaded = load()
    vocoder = SmallVocoder(loaded.engine.decoder)
    vocoder.max_pending_total, vocoder.num_early = 8, []
    rig = Rig(loaded, ScriptedBackend(6), vocoder=vocoder)
    rig.backend.gate.clear()
    sessions = [rig.open(seed=0, first=3, largest=3, ahead=UNLIMITED)]
    rig.hold()
    sessions += [rig.open(seed=i, first=3, largest=3, ahead=UNLIMITED) for i in range(1, 6)]
    rig.resume()
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    assert 3 < max(vocoder.num_early) <= 8
    rig.close()


def test_chunks_of_more_than_eight_streams_are_begun_together_before_their_last_frame(
    load: Callable[..., LoadedModel],
) -> None:
    loaded = load()
    vocoder = SmallVocoder(loaded.engine.decoder)
    vocoder.max_pending_total, vocoder.num_early = 256, []
    rig = Rig(loaded, ScriptedBackend(12), vocoder=vocoder)
    sessions = [rig.open(None, seed=i, first=3, largest=3, ahead=UNLIMITED) for i in range(12)]
    rig.settle()
    with rig.paused():
        for session in sessions:
            session.push_text(TEXT)
            session.end()
    for seed, session in enumerate(sessions):
        chunks, finish = drain(session)
        assert finish.reason == "eos"
        np.testing.assert_array_equal(codes(chunks), scripted(seed, rig.num_frames))
    rig.close()
    assert max(vocoder.num_early) == 12 * 3


@dataclass
class DueStream:
    """A stream with a chunk of one frame."""

    active_slot: int
    deadline_s: float
    due: bool = True
    active_segment: None = None
    chunking: Any = field(init=False)

    def __post_init__(self) -> None:
        self.chunking = self

    def next_chunk(self, _: None) -> np.ndarray[Any, Any]:
        return np.zeros((1, 16), np.int64)

    def start_decoding(self) -> None: ...


def test_chunks_are_decoded_and_thus_delivered_in_the_order_of_their_deadlines() -> None:
    slots: list[int] = []

    class RecordingVocoder:
        def decode(self, requests: Sequence[Any]) -> None:
            slots.extend(request.slot for request in requests)

    vocoder: Any = RecordingVocoder()
    pipeline = DecodePipeline(vocoder, lambda: None, LockPauses(lambda: 0.0))
    due: list[Any] = [DueStream(0, 2.0), DueStream(1, 1.0), DueStream(2, float("-inf"))]
    pipeline.decode(due)
    assert slots == [2, 1, 0]
