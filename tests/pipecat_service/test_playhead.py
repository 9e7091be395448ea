from pipecat_service.playhead import Playhead

SECOND_NS = 1_000_000_000


def test_audio_plays_in_real_time_and_in_order() -> None:
    playhead = Playhead()
    assert playhead.remaining_s(5 * SECOND_NS) == 0
    playhead.add(5 * SECOND_NS, 1.0)
    playhead.add(5 * SECOND_NS, 0.5)
    assert playhead.end_ns == 6.5 * SECOND_NS and playhead.remaining_s(6 * SECOND_NS) == 0.5
    assert playhead.remaining_s(7 * SECOND_NS) == 0


def test_audio_after_a_gap_plays_from_the_time_it_is_sent() -> None:
    playhead = Playhead()
    playhead.add(1 * SECOND_NS, 1.0)
    playhead.add(9 * SECOND_NS, 1.0)
    assert playhead.end_ns == 10 * SECOND_NS


def test_cleared_audio_is_not_remaining() -> None:
    playhead = Playhead()
    playhead.add(1 * SECOND_NS, 5.0)
    playhead.clear()
    assert playhead.remaining_s(1 * SECOND_NS) == 0
