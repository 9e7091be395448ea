from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts import Word
from megakernel_tts.server.character_times import CharacterSpan, CharacterTimes
from megakernel_tts.server.speech_stream import SpeechChunk

WORDS = ["Hello", "there,", "a", "friend.", "incomprehensibilities"]
RATE = 24_000
FRAME = 1_920  # samples


def spans_of(starts: Sequence[tuple[str, float]], sizes: Sequence[int]) -> list[CharacterSpan]:
    """The spans of a stream whose chunks have these numbers of samples."""
    times, spans, num_samples = CharacterTimes(), list[CharacterSpan](), 0
    words = [Word(text, start, None, False) for text, start in starts]
    for size in sizes:
        start_s, num_samples = num_samples / RATE, num_samples + size
        end_s = num_samples / RATE
        last = len(spans) == len(sizes) - 1
        begun = tuple(word for word in words if last or word.start < end_s)
        words = words[len(begun) :]
        spans.append(times.add(SpeechChunk(b"", begun, start_s, end_s)))
    return [*spans, times.end()]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[str, float]], list[int]]:
    """Words with increasing starts, and the numbers of samples of chunks."""
    sizes = draw(st.lists(st.sampled_from([FRAME, 2 * FRAME, 1_903, 480]), min_size=1, max_size=30))
    texts = draw(st.lists(st.sampled_from(WORDS), max_size=8))
    total_ms = 1000 * sum(sizes) // RATE
    starts = draw(st.lists(st.integers(0, total_ms), min_size=len(texts), max_size=len(texts)))
    seconds = [ms / 1000 for ms in sorted(starts)]
    return list(zip(texts, seconds, strict=True)), sizes


@given(streams())
def test_every_character_is_in_one_span_and_words_begin_when_the_engine_says(
    stream: tuple[list[tuple[str, float]], list[int]],
) -> None:
    words, sizes = stream
    spans = spans_of(words, sizes)
    assert "".join(c for span in spans for c in span.characters) == "".join(
        f"{text} " for text, _ in words
    )
    starts = [start for span in spans for start in span.starts_ms]
    assert starts == sorted(starts)
    first = 0
    for text, start in words:
        assert starts[first] == round(1000 * start)
        first += len(text) + 1


@given(streams())
def test_spans_are_those_of_the_audio(
    stream: tuple[list[tuple[str, float]], list[int]],
) -> None:
    *spans, rest = spans_of(*stream)
    ends_ms = [1000 * num_samples / RATE for num_samples in accumulate(stream[1])]
    assert spans[0].start_ms == 0
    assert rest.start_ms == rest.stop_ms == spans[-1].stop_ms
    assert all(
        abs(span.stop_ms - end_ms) <= 0.5 for span, end_ms in zip(spans, ends_ms, strict=True)
    )
    for span, after in zip(spans, [*spans[1:], rest], strict=True):
        assert span.stop_ms == after.start_ms
        assert all(span.start_ms <= start <= span.stop_ms for start in span.starts_ms)
        if span.characters:
            assert span.stops_ms == [*span.starts_ms[1:], span.stop_ms]


@given(streams())
def test_a_chunk_without_a_character_is_not_within_a_word(
    stream: tuple[list[tuple[str, float]], list[int]],
) -> None:
    *spans, _ = spans_of(*stream)
    characters = " "
    for span in spans:
        assert span.characters or characters[-1] == " "
        characters += "".join(span.characters)


def test_a_character_that_begins_a_word_is_not_early() -> None:
    """In an unspaced script no space separates it from the word before."""
    times, words = CharacterTimes(), (Word("你", 0.0, None, False), Word("好。", 0.1, None, False))
    spans = [times.add(SpeechChunk(b"", words, 0.0, 0.02))]
    spans += [times.add(SpeechChunk(b"", (), i / 50, (i + 1) / 50)) for i in range(1, 7)]
    assert [span.characters for span in spans] == [["你"], [], [], [], [], ["好"], ["。"]]
    assert spans[5].starts_ms == [100]


def test_a_chunk_without_audio_has_no_character_that_is_early() -> None:
    times = CharacterTimes()
    times.add(SpeechChunk(b"", (Word("Hello", 0.0, None, False),), 0.0, 0.02))
    assert times.add(SpeechChunk(b"", (), 0.02, 0.02)).characters == []
    assert times.add(SpeechChunk(b"", (), 0.02, 0.04)).characters == ["e"]


def test_characters_of_unspaced_scripts_have_no_space_between_them() -> None:
    spans = spans_of([("你", 0.0), ("好。", 0.2)], [FRAME] * 5)
    assert "".join(c for span in spans for c in span.characters) == "你好。 "


def test_a_word_that_is_reported_late_begins_with_its_chunk() -> None:
    """The engine reports a word once its text is complete."""
    times = CharacterTimes()
    times.add(SpeechChunk(b"", (), 0.0, 0.5))
    span = times.add(SpeechChunk(b"", (Word("Hi", 0.4, None, False),), 0.5, 1.0))
    assert span.starts_ms[0] == 500


@pytest.mark.parametrize("words", [[], [("Hi", 0.0)]])
def test_a_text_ends_with_a_space_once(words: list[tuple[str, float]]) -> None:
    spans = spans_of(words, [FRAME] * 10)
    characters = [c for span in spans for c in span.characters]
    assert characters == ([*"Hi "] if words else [])
