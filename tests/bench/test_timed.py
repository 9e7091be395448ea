"""The host alone: nothing takes less than the device's own time, and it works no more than that."""

import pytest

from bench.timed import Times, measure, timed_tts

TIMES = Times(frame=(3.0, 5.0), prompt=1.0, codec=(1.0, 2.0))


@pytest.mark.parametrize(("streams", "passes"), [(1, 2), (2, 3)])
def test_a_request_takes_the_devices_time_and_the_hosts(streams: int, passes: int) -> None:
    """Eleven positions are each stream's own: a full pass, and three that share one."""
    tts, device = timed_tts(TIMES)
    with tts:
        tts.warmup()
        found = measure(tts, device, streams, chunk=1, rounds=3)
    frame, codec = TIMES.frame_of(streams), TIMES.codec_of(streams)
    assert len(found.first_chunk) == streams
    assert min(found.first_chunk) >= 2 * TIMES.prompt + TIMES.frame_of(1) + TIMES.codec_of(1)
    if streams > 1:
        assert max(found.first_chunk) >= passes * TIMES.prompt + frame + codec
    assert found.frame > found.device >= frame + codec
