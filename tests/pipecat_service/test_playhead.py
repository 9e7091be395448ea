from pipecat_service.playhead import Playhead

SECOND = 1_000_000_000


def test_audio_plays_in_real_time_and_in_order() -> None:
    head = Playhead()
    assert head.ahead(5 * SECOND) == 0
    head.send(5 * SECOND, 1.0)
    head.send(5 * SECOND, 0.5)
    assert head.end == 6.5 * SECOND and head.ahead(6 * SECOND) == 0.5
    assert head.ahead(7 * SECOND) == 0


def test_audio_after_a_gap_plays_from_the_time_it_is_sent() -> None:
    head = Playhead()
    head.send(1 * SECOND, 1.0)
    head.send(9 * SECOND, 1.0)
    assert head.end == 10 * SECOND


def test_dropped_audio_is_not_ahead() -> None:
    head = Playhead()
    head.send(1 * SECOND, 5.0)
    head.stop()
    assert head.ahead(1 * SECOND) == 0
