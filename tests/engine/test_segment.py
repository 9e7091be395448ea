from megakernel_tts.engine.segment import Segment
from megakernel_tts.text.text_queue import TextSegment


def test_text_is_used_up_only_once_its_end_was_fed() -> None:
    """A frame made while the writer pauses is not a frame after the text."""
    segment = Segment(
        TextSegment(),
        num_prompt=9,
        max_frames=99,
        num_tokens=3,
        num_fed=2,
        text_complete=False,
        last_step_s=0.0,
    )
    assert segment.used_up_at is None
    segment.add_text(0, 0, text_complete=True)
    assert segment.used_up_at == 2


def test_a_cut_drops_the_frames_behind_it() -> None:
    segment = Segment(
        TextSegment(),
        num_prompt=9,
        max_frames=99,
        num_tokens=3,
        num_fed=2,
        text_complete=True,
        last_step_s=0.0,
    )
    segment.num_frames = 9
    segment.cut(4)
    assert (segment.num_frames, len(segment.pending), segment.outcome) == (4, 0, "guard")
