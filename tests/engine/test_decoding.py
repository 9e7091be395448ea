"""Chunks that the vocoder is given before their last frame is made."""

from collections.abc import Callable

import numpy as np

from megakernel_tts.loader import LoadedModel
from tests.fakes import ExpectingVocoder, ScriptedBackend
from tests.rig import UNLIMITED, Rig, codes, drain, scripted


class SmallVocoder(ExpectingVocoder):
    """A vocoder that takes eight frames early, of all streams together."""

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
