from megakernel_tts.align.estimate import EstimatedWordTimer
from megakernel_tts.align.words import Transcript
from megakernel_tts.engine.stream import Segment
from megakernel_tts.text.text_queue import TextSegment


def test_text_is_used_up_only_once_its_end_was_handed_over() -> None:
    """A frame that was made while the writer pauses is no frame after the text."""
    times = EstimatedWordTimer(Transcript(lambda ids: []), 24_000)
    u = Segment(TextSegment(), cap=99, tokens=3, fed=2, closed=False, times=times)
    assert [u.used_up(frame) for frame in range(5)] == [False] * 5
    u.closed = True
    assert [u.used_up(frame) for frame in range(5)] == [False, False, True, True, True]
