import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel_tts.text.splitter import Limits, Splitter
from megakernel_tts.text.text_queue import TextQueue, TextSegment
from megakernel_tts.text.tokenizer import TextTokenizer


@pytest.fixture
def tokenizer(checkpoint: Callable[..., Path]) -> TextTokenizer:
    return TextTokenizer(checkpoint(), 10_000)


def pieces_of(script: TextQueue) -> list[TextSegment]:
    pieces = []
    while (piece := script.front()) is not None:
        assert piece.ended
        pieces.append(piece)
        script.pop()
    return pieces


def spoken(script: TextQueue) -> list[list[int]]:
    return [piece.token_ids for piece in pieces_of(script)]


def test_each_piece_has_the_ids_of_its_own_text(tokenizer: TextTokenizer) -> None:
    script = TextQueue(tokenizer, Splitter(limits=Limits(hard=1)))
    for char in "  One two.  Three!\n\n Four ":
        script.push(char)
    script.end()
    assert spoken(script) == [tokenizer.encode(t) for t in ("One two.", "Three!", "Four")]
    assert script.done


def test_a_piece_grows_while_its_text_arrives(tokenizer: TextTokenizer) -> None:
    script = TextQueue(tokenizer, Splitter())
    script.push("hello")
    assert script.front() is None
    script.push(" wor")
    piece = script.front()
    assert piece is not None and piece.token_ids == tokenizer.encode("hello") and not piece.ended
    script.end()
    assert piece.token_ids == tokenizer.encode("hello wor") and piece.ended
    assert not script.done
    script.pop()
    assert script.done


@given(st.text(alphabet="ab AB.\u0301 \n12é한", max_size=40), st.integers(0, 40))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_that_is_known_to_end_has_the_same_tokens(
    tokenizer: TextTokenizer, text: str, cut: int
) -> None:
    known, live = (TextQueue(tokenizer, Splitter(limits=Limits(hard=8))) for _ in range(2))
    known.push(text[:cut])
    known.push(text[cut:], last=True)
    for char in text:
        live.push(char)
    live.end()
    assert known.ended
    for one, other in zip(pieces_of(known), pieces_of(live), strict=True):
        assert (one.token_ids, one.num_whole) == (other.token_ids, other.num_whole)
        assert one.expected_frames == pytest.approx(other.expected_frames)


@pytest.mark.parametrize("text", ["", "   ", "\n\n\t\u3000"])
def test_whitespace_is_nothing_to_say(tokenizer: TextTokenizer, text: str) -> None:
    script = TextQueue(tokenizer, Splitter())
    script.push(text)
    assert not script.done
    script.end()
    assert script.done


def test_a_text_takes_as_long_however_it_arrives(tokenizer: TextTokenizer) -> None:
    text = "Hello to you, A B C and 1234. And the other one!"
    lengths: list[float] = []
    for portions in ([text], list(text)):
        script = TextQueue(tokenizer, Splitter())
        for portion in portions:
            script.push(portion)
        script.end()
        piece = script.front()
        assert piece is not None
        lengths.append(piece.expected_frames)
    assert lengths[0] == pytest.approx(lengths[1])


def test_memory_does_not_grow_with_what_was_spoken(tokenizer: TextTokenizer) -> None:
    script, peaks = TextQueue(tokenizer, Splitter()), list[int]()
    tracemalloc.start()
    for _ in range(6):
        for _ in range(100):
            script.push("Every one of these sentences is to be spoken, in its place. ")
            while (piece := script.front()) is not None and piece.ended:
                script.pop()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
    tracemalloc.stop()
    assert max(peaks[2:]) < 1.1 * peaks[1]


def test_it_is_told_how_many_tokens_end_whole_words(tokenizer: TextTokenizer) -> None:
    script = TextQueue(tokenizer, Splitter())
    whole: list[bytes] = []
    for text in ("hello", ", wo", "rld ", "again"):
        script.push(text)
        piece = script.front()
        whole.append(b"".join(script.spell(piece.token_ids[: piece.num_whole])) if piece else b"")
    assert whole == [b"", b"hello,", b"hello, world", b"hello, world"]
    script.end()
    piece = script.front()
    assert piece is not None and piece.num_whole == len(piece.token_ids)
