"""Live text of `megakernel-tts say -`: read as it is spoken, and no further."""

from collections.abc import Iterator
from itertools import islice

from megakernel_tts import AudioChunk
from megakernel_tts.cli.say import _MAX_WAITING_SEGMENTS, _stream_live
from tests.rig import Rig

SENTENCE = "hello to the world, this is a test of speech. "  # four of them are a segment


class Input:
    """Standard input with sentences.

    Attributes:
        num_read: Sentences read.
    """

    def __init__(self, num_sentences: int) -> None:
        self.num_read = 0
        self._num_sentences = num_sentences

    def __iter__(self) -> Iterator[str]:
        for _ in range(self._num_sentences):
            self.num_read += 1
            yield SENTENCE


def test_standard_input_is_read_at_the_rate_of_synthesis(rig: Rig) -> None:
    text = Input(100_000)
    session = rig.open(None)
    chunks = _stream_live(session, iter(text))
    num_frames = 0
    for chunk in islice(chunks, 60):
        assert isinstance(chunk, AudioChunk)
        num_frames += len(chunk.codes)
        assert session.num_waiting_segments <= _MAX_WAITING_SEGMENTS + 1
    num_spoken = num_frames / len(rig.loaded.tokenizer.encode(SENTENCE))
    sentences_per_segment = 5
    buffered = (_MAX_WAITING_SEGMENTS + 3) * sentences_per_segment
    assert num_spoken - 1 <= text.num_read <= num_spoken + buffered
    chunks.close()
    assert rig.idle()


def test_all_of_standard_input_is_spoken(rig: Rig) -> None:
    text = Input(20)
    session = rig.open(None)
    num_frames = sum(len(chunk.codes) for chunk in _stream_live(session, iter(text)))
    assert text.num_read == 20
    assert session.finish is not None and session.finish.reason == "eos"
    assert num_frames > 20 * len(rig.loaded.tokenizer.encode(SENTENCE.strip()))
    assert session.num_waiting_segments == 0
