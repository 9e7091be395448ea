"""Token ids to text and words."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from megakernel_common.errors import CheckpointError
from megakernel_stt import Token, Transcript
from megakernel_stt.network.transducer import Emission
from megakernel_stt.text.tokenizer import Tokenizer
from megakernel_stt.text.words import TokenReader
from tests.stt.conftest import LoadModel, MakeCheckpoint

PIECES = ["<unk>", "▁a", "b", ".", "<0xC3>", "<0xA9>", "▁", "<en-US>", "</s>", "<de-DE>"]


def reader(*, durations: bool = False) -> TokenReader:
    return TokenReader(Tokenizer(PIECES, frozenset({0, 8})), durations)


def emissions(*ids: int, duration: int = 1) -> list[Emission]:
    return [Emission(token, 2 * i, duration, 0.1 * (i + 1)) for i, token in enumerate(ids)]


def transcript(*ids: int) -> Transcript:
    return Transcript(tuple(reader().read(emissions(*ids))[1]), 1.0)


def test_words_begin_at_spaces_and_have_times_and_the_lowest_confidence() -> None:
    result = transcript(1, 2, 1, 3, 2)
    assert result.text == "ab a.b"
    assert [word.text for word in result.words] == ["ab", "a.b"]
    first, second = result.words
    assert (first.start, first.end) == (0.0, pytest.approx(0.24))
    assert (second.start, second.end) == (pytest.approx(0.32), pytest.approx(0.72))
    assert first.confidence == 0.1 and second.confidence == pytest.approx(0.3)


def test_a_space_of_its_own_begins_the_next_word() -> None:
    assert [word.text for word in transcript(1, 6, 2).words] == ["a", "b"]
    assert transcript(1, 6).text == "a" and len(transcript(1, 6).words) == 1


def test_bytes_form_a_character_also_across_chunks() -> None:
    assert transcript(1, 4, 5, 2).text == "aéb"
    first, head = reader().read(emissions(1, 4))
    _, tail = first.read(emissions(5, 2))
    assert [token.text for token in [*head, *tail]] == [" a", "", "é", "b"]
    assert [token.text for token in reader().read(emissions(4, 1))[1]] == ["", "\ufffd a"]


def test_a_reader_is_not_changed_by_reading() -> None:
    """A fork of a stream reads on without effect on the stream."""
    first, _ = reader().read(emissions(4))
    again = [first.read(emissions(5))[1][0].text for _ in range(2)]
    assert again == ["é", "é"]


def test_special_tokens_and_language_tags_are_not_spoken() -> None:
    result = transcript(7, 1, 0, 8, 2)
    assert result.text == "ab" and [word.text for word in result.words] == ["ab"]
    assert len(result.tokens) == 5 and result.words[0].start == pytest.approx(0.16)


def test_the_language_is_that_of_the_last_tag() -> None:
    assert transcript(7, 1, 9, 2).language == "de-DE"
    assert transcript(7, 1, 2).language == "en-US"
    assert transcript(1, 2).language is None
    assert [token.language for token in transcript(1, 7).tokens] == [None, "en-US"]


def test_punctuation_with_durations_takes_the_end_of_the_token_before() -> None:
    _, tokens = reader(durations=True).read(emissions(1, 3, 2, duration=3))
    assert (tokens[1].start, tokens[1].end) == (tokens[0].end, tokens[0].end)
    assert tokens[2].end - tokens[2].start == pytest.approx(0.24)
    _, plain = reader().read(emissions(1, 3))
    assert plain[1].start == pytest.approx(0.16)


def test_no_tokens_are_an_empty_transcript() -> None:
    assert transcript().text == "" and transcript().words == ()
    assert Transcript((Token(7, "", 0, 0, 1),), 1).words == ()


def test_text_is_that_of_the_tokenizers_library(
    recogniser: MakeCheckpoint, load: LoadModel
) -> None:
    library = Library.from_file(str(recogniser() / "tokenizer.json"))
    ours = TokenReader(load().tokenizer, False)
    ids = [8, 9, 3, 11, 12, 5, 6, 4, 20, 1, 30, 2]
    _, tokens = ours.read(emissions(*ids))
    assert "".join(token.text for token in tokens) == library.decode(ids)


@pytest.mark.parametrize(
    "content", [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\x80" * 12, b"", b"\x0a\x02\x0a\x09", b"\x09ab"]
)
def test_a_damaged_sentencepiece_model_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        Tokenizer.from_sentencepiece(content, Path("x"), 3, 2)
