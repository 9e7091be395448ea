"""Word times of streams through the engine, from synthetic attention scores."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel_tts import AudioChunk, Finish, Session, Word
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.align.words import Transcript
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.splitter import SplitLimits
from tests.align.synthetic_attention import (
    FRAMES_PER_TOKEN,
    SAMPLE_RATE,
    SAMPLES_PER_FRAME,
    LoudDecoder,
    SyntheticAttentionBackend,
)
from tests.align.texts import words_of
from tests.fakes import ScriptedBackend
from tests.rig import TEXT, Rig, codes, drain

Make = Callable[..., Rig]
SECONDS = SAMPLES_PER_FRAME / SAMPLE_RATE


@pytest.fixture
def make(load: Callable[..., LoadedModel]) -> Iterator[Make]:
    rigs: list[Rig] = []

    def one(lookahead: int | None = 0, backend: ScriptedBackend | None = None) -> Rig:
        """A rig whose words are aligned; with `lookahead=None` they are estimated."""
        alignment = None if lookahead is None else Alignment(((0, 0),), 1e-4, lookahead, {})
        backend = backend or SyntheticAttentionBackend()
        rigs.append(Rig(load(), backend, decoder=LoudDecoder(), alignment=alignment))
        return rigs[-1]

    yield one
    for rig in rigs:
        rig.backend.gate.set()
        rig.engine.close()


def words_of_chunks(chunks: list[AudioChunk]) -> list[Word]:
    return [word for chunk in chunks for word in chunk.words]


def expected_words(rig: Rig, text: str, segment_start: float = 0.0) -> list[tuple[str, float]]:
    """The words of a segment, and when its frames first attend to their first tokens."""
    tokenizer = rig.loaded.tokenizer
    transcript = Transcript(tokenizer.token_bytes)
    ids = tokenizer.encode(text)
    transcript.update(ids, len(ids))
    first_tokens: dict[int, int] = {}  # word -> the first token of its first audible unit
    for unit, word in enumerate(transcript.unit_words):
        if not transcript.unit_silent[unit]:
            first_tokens.setdefault(word, transcript.unit_starts[unit])
    starts = [
        round(segment_start + FRAMES_PER_TOKEN * first_tokens[word] * SECONDS, 3)
        for word in range(len(transcript))
    ]
    return list(zip(words_of(transcript), starts, strict=True))


def timed(words: list[Word]) -> list[tuple[str, float]]:
    return [(word.text, round(word.start, 3)) for word in words]


@pytest.mark.parametrize("lookahead", [0, 2, 4])
@pytest.mark.parametrize("policy", [(1, 8), (1, 1), (4, 4), (8, 8)])
def test_words_are_delivered_with_the_audio_in_which_they_begin(
    make: Make, lookahead: int, policy: tuple[int, int]
) -> None:
    rig = make(lookahead)
    chunks, finish = drain(rig.open(first=policy[0], largest=policy[1]))
    assert finish.reason == "eos"
    assert expected_words(rig, TEXT) == timed(words_of_chunks(chunks))
    for chunk in chunks:
        begin, end = chunk.frame * SECONDS, (chunk.frame + len(chunk.codes)) * SECONDS
        assert all(begin <= word.start + 1e-3 < end + 1e-3 for word in chunk.words)
    plain, _ = drain(make(None, ScriptedBackend(tail=3)).open())
    assert np.array_equal(codes(chunks)[: len(codes(plain))], codes(plain))


def test_first_chunk_does_not_wait_for_lookahead(make: Make) -> None:
    rig = make(4)
    session = rig.open(first=1, largest=4, ahead=9)
    chunks, _ = drain(session)
    assert rig.backend.step_lengths[:2] == [1, 2 + 4], "the second chunk waits for its look-ahead"
    assert [len(chunk.codes) for chunk in chunks[:4]] == [1, 2, 4, 4]
    assert chunks[-1].frame + len(chunks[-1].codes) == sum(len(c.codes) for c in chunks)


class EarlyAttentionBackend(SyntheticAttentionBackend):
    """One frame attends to the next word long before that word is spoken."""

    def _scores(self, slot: int, first: int, count: int) -> Tensor:
        scores = super()._scores(slot, first, count)
        if first <= 1 < first + count:
            start = self._starts[slot]
            scores[1 - first, :, start : start + 2] = torch.tensor([-1.0, 1.0])
        return scores


@pytest.mark.parametrize(("lookahead", "right"), [(0, False), (2, True)])
def test_lookahead_decides_whether_a_word_has_begun(
    make: Make, lookahead: int, right: bool
) -> None:
    rig = make(lookahead, EarlyAttentionBackend())
    chunks, _ = drain(rig.open("a b c", first=1, largest=1))
    assert (expected_words(rig, "a b c") == timed(words_of_chunks(chunks))) == right


def test_stream_continues_when_lookahead_exceeds_what_may_be_unread(make: Make) -> None:
    chunks, finish = drain(make(4).open(first=1, largest=8, ahead=8))
    assert finish.reason == "eos" and words_of_chunks(chunks)


def test_live_text_is_aligned_like_complete_text(make: Make) -> None:
    rig = make(2)
    session = rig.open(None)
    for char in TEXT:
        session.push_text(char)
    session.end()
    assert expected_words(rig, TEXT) == timed(words_of_chunks(drain(session)[0]))


def test_word_times_of_segments_share_one_clock(make: Make) -> None:
    rig = make(2)
    first, second = "This is the first sentence. ", "And this is the other one."
    chunks, _ = drain(rig.open(first + second, limits=SplitLimits(sentence=1)))
    length = FRAMES_PER_TOKEN * len(rig.loaded.tokenizer.encode(first.strip())) * SECONDS
    expected = expected_words(rig, first.strip()) + expected_words(
        rig, second, segment_start=length
    )
    assert expected == timed(words_of_chunks(chunks))


def test_words_of_a_discarded_attempt_are_not_delivered(make: Make) -> None:
    rig = make(2)
    rig.backend.runaway = {1}
    chunks, finish = drain(rig.open("hello", seed=1, max_retries=1))
    assert finish.reason == "eos"
    assert expected_words(rig, "hello") == timed(words_of_chunks(chunks))


def test_words_that_were_not_reached_are_not_delivered(make: Make) -> None:
    chunks, finish = drain(make(2).open(max_frames=12))
    assert finish.reason == "length" and finish.frames == 12
    words = words_of_chunks(chunks)
    assert 0 < len(words) < len(TEXT.split())
    assert all(word.start < 12 * SECONDS for word in words)


def _read_until_starved(session: Session, frames: int) -> list[AudioChunk]:
    chunks: list[AudioChunk] = []
    for event in session:
        assert isinstance(event, AudioChunk)
        chunks.append(event)
        if event.frame + len(event.codes) == frames:
            return chunks
    raise AssertionError


class TextEndBackend(SyntheticAttentionBackend):
    """The speech ends when the text ends."""

    def _ends(self, stream: dict[str, int]) -> bool:
        return True


def test_remaining_words_are_delivered_when_no_frame_follows(make: Make) -> None:
    rig = make(2, TextEndBackend())
    session = rig.open(None)
    session.push_text("hello to the world ")
    tokens = len(rig.loaded.tokenizer.encode("hello to the world"))
    chunks = _read_until_starved(session, tokens)
    session.end()
    *rest, finish = list(session)
    assert isinstance(finish, Finish) and finish.reason == "eos"
    chunks += [event for event in rest if isinstance(event, AudioChunk)]
    assert [word.text for word in words_of_chunks(chunks)] == ["hello", "to", "the", "world"]
    assert codes(chunks).shape == (tokens, 16)


def test_words_without_calibration_are_estimated(make: Make) -> None:
    chunks, _ = drain(make(None, ScriptedBackend(tail=60)).open())
    words = words_of_chunks(chunks)
    assert [word.text for word in words] == TEXT.split()
    assert all(word.estimated and word.end is None for word in words)


def test_aligned_words_are_not_marked_as_estimated(make: Make) -> None:
    words = words_of_chunks(drain(make().open())[0])
    assert words and not any(word.estimated for word in words)


def test_words_of_many_segments_are_in_the_order_of_their_times(make: Make) -> None:
    """A word timed at the end of its segment is not later than the first word of the next."""
    rig = make(None, ScriptedBackend())  # speaks faster than the estimate
    words_of_text = TEXT.rstrip(".").split()
    sentences = [" ".join(words_of_text[: 1 + i % len(words_of_text)]) for i in range(60)]
    text = "! ".join(sentences) + "!"
    chunks, _ = drain(rig.open(text, limits=SplitLimits(sentence=1)))
    words = words_of_chunks(chunks)
    assert [word.text for word in words] == text.split()
    starts = [word.start for word in words]
    assert starts == sorted(starts)
