import pytest

from pipecat_service.playhead import OUTPUT_BLOCK_S, Playhead

SECOND_NS = 1_000_000_000


def test_audio_plays_in_real_time_and_in_order() -> None:
    playhead = Playhead()
    assert playhead.remaining_s(5 * SECOND_NS) == 0
    playhead.add(5 * SECOND_NS, 1.0)
    playhead.add(5 * SECOND_NS, 0.52)
    assert playhead.end_ns == 6.52 * SECOND_NS and playhead.remaining_s(6 * SECOND_NS) == 0.52
    assert playhead.remaining_s(7 * SECOND_NS) == 0


def test_audio_after_a_gap_plays_from_the_time_it_is_sent() -> None:
    playhead = Playhead()
    playhead.add(1 * SECOND_NS, 1.0)
    playhead.add(9 * SECOND_NS, 1.0)
    assert playhead.end_ns == 10 * SECOND_NS


def test_cleared_audio_is_not_remaining() -> None:
    playhead = Playhead()
    playhead.add(1 * SECOND_NS, 5.01)
    playhead.clear()
    assert playhead.remaining_s(1 * SECOND_NS) == 0
    playhead.add(9 * SECOND_NS, 0.03)
    assert playhead.remaining_s(9 * SECOND_NS) == 0, "audio of an earlier block was kept"


def test_gaps_in_a_speech_add_up_and_those_before_it_do_not_count() -> None:
    playhead = Playhead()
    playhead.add(1 * SECOND_NS, 1.0)
    playhead.begin_speech(5 * SECOND_NS)
    playhead.add(5 * SECOND_NS, 1.0)
    assert playhead.delay_s(6 * SECOND_NS) == 0
    assert playhead.delay_s(8 * SECOND_NS) == 2
    playhead.add(8 * SECOND_NS, 1.0)
    playhead.add(8 * SECOND_NS, 1.0)
    assert playhead.delay_s(13 * SECOND_NS) == 2 + 3
    playhead.begin_speech(13 * SECOND_NS)
    assert playhead.delay_s(13 * SECOND_NS) == 0


def test_speech_that_continues_is_ahead_by_what_was_played_before() -> None:
    playhead = Playhead()
    playhead.begin_speech(0)
    playhead.add(0, 3.03)
    playhead.begin_speech(25 * SECOND_NS, played_s=3.03)
    # The last 30 ms wait for their block: the audio after 3 s is played next.
    assert playhead.delay_s(25 * SECOND_NS) == -3
    playhead.add(25 * SECOND_NS, 1.01)
    assert playhead.delay_s(27 * SECOND_NS) == pytest.approx(1 - 3 - 0.04)


def test_samples_of_an_incomplete_block_are_played_with_the_next_audio_or_the_end() -> None:
    playhead = Playhead()
    playhead.begin_speech(0)
    playhead.add(0, 1.03)
    assert playhead.end_ns == 1 * SECOND_NS
    playhead.add(3 * SECOND_NS, 0.03)
    assert playhead.end_ns == 3 * SECOND_NS + 40_000_000
    assert playhead.delay_s(3 * SECOND_NS) == 2
    playhead.end_speech(4 * SECOND_NS)
    assert playhead.end_ns == 4 * SECOND_NS + round(OUTPUT_BLOCK_S * 1e9)
    playhead.end_speech(5 * SECOND_NS)
    assert playhead.remaining_s(5 * SECOND_NS) == pytest.approx(0)
