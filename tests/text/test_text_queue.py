import tracemalloc
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel_tts.text.markup import Break, Markup
from megakernel_tts.text.pronunciations import Pronunciations
from megakernel_tts.text.splitter import SplitLimits, Splitter
from megakernel_tts.text.text_queue import TextQueue, TextSegment
from megakernel_tts.text.tokenizer import TextTokenizer


@pytest.fixture
def tokenizer(checkpoint: Callable[..., Path]) -> TextTokenizer:
    return TextTokenizer(checkpoint(), 10_000)


def pop_segments(queue: TextQueue) -> list[TextSegment]:
    segments = []
    while (segment := queue.front()) is not None:
        assert segment.text_ended
        segments.append(segment)
        queue.pop()
    return segments


def pop_token_ids(queue: TextQueue) -> list[list[int]]:
    return [segment.token_ids for segment in pop_segments(queue)]


def test_segments_behind_the_front_one_wait(tokenizer: TextTokenizer) -> None:
    """Whitespace is no segment, however long it is."""
    queue = TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=1)))
    counts: list[int] = []
    for text in ("", "One. ", "Two. ", " " * 10_000, "Three. ", "Four."):
        queue.push(text)
        counts.append(queue.num_waiting)
    assert counts[:3] == [0, 0, 1] and counts[3] <= 2 and counts[4] <= 3
    queue.end()
    assert queue.num_waiting == 3
    queue.pop()
    assert queue.num_waiting == 2
    queue.close()
    assert queue.num_waiting == 0


def test_segments_have_the_tokens_of_their_text(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=1)))
    for char in "  One two.  Three!\n\n Four ":
        queue.push(char)
    queue.end()
    assert pop_token_ids(queue) == [tokenizer.encode(t) for t in ("One two.", "Three!", "Four")]
    assert queue.exhausted


def test_front_segment_grows_until_the_text_ends(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter())
    queue.push("hello")
    assert queue.front() is None
    queue.push(" wor")
    segment = queue.front()
    assert (
        segment is not None
        and segment.token_ids == tokenizer.encode("hello")
        and not segment.text_ended
    )
    queue.end()
    assert segment.token_ids == tokenizer.encode("hello wor") and segment.text_ended
    assert not queue.exhausted
    queue.pop()
    assert queue.exhausted


@given(st.text(alphabet="ab AB.\u0301 \n12é한", max_size=40), st.integers(0, 40))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_do_not_depend_on_how_the_text_arrives(
    tokenizer: TextTokenizer, text: str, cut: int
) -> None:
    complete, live = (
        TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=8))) for _ in range(2)
    )
    complete.push(text[:cut])
    complete.push(text[cut:], text_ended=True)
    for char in text:
        live.push(char)
    live.end()
    assert complete.text_ended
    for one, other in zip(pop_segments(complete), pop_segments(live), strict=True):
        assert (one.token_ids, one.num_whole) == (other.token_ids, other.num_whole)
        assert one.expected_frames == pytest.approx(other.expected_frames)


def test_a_flush_ends_the_segment(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=8)))
    for text in (" ", "hello to ", "the", " world.", "  ", "This", " is a test"):
        queue.flush()
        queue.push(text)
        queue.flush()
        queue.flush()
    assert not queue.exhausted
    queue.end()
    texts = ["hello to", "the", "world.", "This", "is a test"]
    assert pop_token_ids(queue) == [tokenizer.encode(text) for text in texts]
    assert queue.exhausted


def test_the_length_of_a_segment_counts_from_the_flush(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=12)))
    queue.push("Hello there. ")
    queue.flush()
    queue.push("Hello. Hello. Hello.")
    queue.end()
    texts = ["Hello there.", "Hello. Hello.", "Hello."]
    assert pop_token_ids(queue) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("text", ["", "   ", "\n\n\t\u3000"])
def test_whitespace_gives_no_segment(tokenizer: TextTokenizer, text: str) -> None:
    queue = TextQueue(tokenizer, Splitter())
    queue.push(text)
    assert not queue.exhausted
    queue.end()
    assert queue.exhausted


def test_expected_frames_do_not_depend_on_how_the_text_arrives(tokenizer: TextTokenizer) -> None:
    text = "Hello to you, A B C and 1234. And the other one!"
    lengths: list[float] = []
    for portions in ([text], list(text)):
        queue = TextQueue(tokenizer, Splitter())
        for portion in portions:
            queue.push(portion)
        queue.end()
        segment = queue.front()
        assert segment is not None
        lengths.append(segment.expected_frames)
    assert lengths[0] == pytest.approx(lengths[1])


def test_memory_does_not_grow_with_popped_segments(tokenizer: TextTokenizer) -> None:
    queue, peaks = TextQueue(tokenizer, Splitter()), list[int]()
    tracemalloc.start()
    for _ in range(6):
        for _ in range(100):
            queue.push("Every one of these sentences is to be spoken, in its place. ")
            while (segment := queue.front()) is not None and segment.text_ended:
                queue.pop()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
    tracemalloc.stop()
    assert max(peaks[2:]) < 1.1 * peaks[1]


def test_num_whole_counts_tokens_up_to_the_last_word_boundary(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter())
    whole: list[bytes] = []
    for text in ("hello", ", wo", "rld ", "again"):
        queue.push(text)
        segment = queue.front()
        whole.append(
            b"".join(queue.token_bytes(segment.token_ids[: segment.num_whole])) if segment else b""
        )
    assert whole == [b"", b"hello,", b"hello, world", b"hello, world"]
    queue.end()
    segment = queue.front()
    assert segment is not None and segment.num_whole == len(segment.token_ids)


TABLE = Pronunciations({"GPU": "gee pee you", "é": "accent", "한": "han"})
MARKED = st.lists(
    st.sampled_from(
        [
            "a ", "B. ", " GPU", "(GPU)", "<spell>a1 B</spell>", "<spell>", '<break time="1s"/>',
            "é", "e", "\u0301", "<b>", " ", "한 ", ".",
        ]
    ),
    max_size=12,
).map("".join)  # fmt: skip


def contents(queue: TextQueue) -> list[object]:
    """What a complete text is divided into: breaks, and tokens and replacements of segments."""
    items: list[object] = []
    while not queue.exhausted:
        if (pause := queue.take_break()) is not None:
            items.append(pause.seconds)
            continue
        segment = queue.front()
        assert segment is not None and segment.text_ended
        items.append((segment.token_ids, segment.replacements, round(segment.expected_frames, 6)))
        queue.pop()
    return items


@given(MARKED, st.integers(0, 60))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_marked_text_does_not_depend_on_how_it_arrives(
    tokenizer: TextTokenizer, text: str, cut: int
) -> None:
    queues = [
        TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=8)), Markup(TABLE))
        for _ in range(3)
    ]
    queues[0].push(text, text_ended=True)
    queues[1].push(text[:cut])
    queues[1].push(text[cut:], text_ended=True)
    for char in text:
        queues[2].push(char)
    queues[2].end()
    whole, *others = [contents(queue) for queue in queues]
    assert others == [whole, whole]


@given(MARKED)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replacements_are_where_their_words_are_spoken(tokenizer: TextTokenizer, text: str) -> None:
    queue = TextQueue(tokenizer, Splitter(limits=SplitLimits(sentence=8)), Markup(TABLE))
    queue.push(text, text_ended=True)
    spoken = {
        "GPU": ("gee pee you", "G P U"), "(GPU)": ("(G P U)",), "é": ("accent", "É"),
        "한": ("han",), "a1": ("A 1",), "a": ("A",), "e": ("E",),
    }  # fmt: skip
    while not queue.exhausted:
        if queue.take_break() is None:
            segment = queue.front()
            assert segment is not None
            said = b"".join(queue.token_bytes(segment.token_ids)).decode()
            for start, stop, written in segment.replacements:
                if written in spoken:
                    assert said[start:stop] in spoken[written]
            queue.pop()


def test_a_break_ends_a_segment_and_comes_between_segments(tokenizer: TextTokenizer) -> None:
    queue = TextQueue(tokenizer, Splitter())
    queue.push('<break time="1s"/> hello <break time="2s"/><break time="3s"/>to the')
    assert queue.front() is None and queue.needs_no_slot and queue.take_break() == Break(1.0)
    assert queue.take_break() is None and not queue.needs_no_slot, "the segment comes first"
    segment = queue.front()
    assert segment is not None and segment.text_ended
    assert segment.token_ids == tokenizer.encode("hello")
    queue.pop()
    assert [queue.take_break(), queue.take_break()] == [Break(2.0), Break(3.0)]
    assert queue.take_break() is None and not queue.exhausted and not queue.needs_no_slot
    queue.push(" world.<break/>.", text_ended=True)
    assert pop_token_ids(queue) == [tokenizer.encode("to the world.")]
    assert not queue.exhausted and queue.take_break() == Break(0.5) and queue.exhausted
    assert queue.needs_no_slot
    queue.close()
    assert not queue.needs_no_slot


def test_a_respelling_that_is_split_belongs_to_its_first_part(tokenizer: TextTokenizer) -> None:
    limits = SplitLimits(sentence=4, clause=4, space=4, anywhere=40)
    table = Pronunciations({"it": "one two three four five"})
    queue = TextQueue(tokenizer, Splitter(limits=limits), Markup(table))
    queue.push("So it, is", text_ended=True)
    written = [[r.written for r in segment.replacements] for segment in pop_segments(queue)]
    assert [*chain(*written)].count("it") == 1 and len(written) > 2
    assert all(set(words) <= {"it", ""} for words in written)
