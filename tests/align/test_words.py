from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.align.words import Transcript, split_words
from tests.align.texts import Spelling, transcript, words_of


def test_words_know_their_clause_and_their_script() -> None:
    text = "Well, I – said “no.” 你好。"
    written = split_words(text)
    assert [text[w.start : w.stop] for w in written] == [w.text for w in written]
    words = [w for w in written if w.spoken]
    assert [w.text for w in words] == ["Well,", "I", "said", "“no.”", "你", "好。"]
    assert [w.ends_clause for w in words] == [True, False, False, True, False, True]
    assert [w.unspaced for w in words] == [False] * 4 + [True] * 2
    assert [w.text for w in written if not w.spoken] == ["–"]


@pytest.mark.parametrize(
    ("tokens", "words", "firsts", "silent", "word"),
    [
        (["Hel", "lo", ",", " you"], ["Hello,", "you"], [0, 1, 2, 3], "..s.", [0, 0, 0, 1]),
        (['"', "Well", '"', "."], ['"Well".'], [0, 1, 2], "s.s", [-1, 0, 0]),
        (["so", " ", "–", " it"], ["so –", "it"], [0, 1, 3], ".s.", [0, 0, 1]),
        # Characters that share a token are one word; those that do not are words of their own.
        (["你好", "，", "世", "界"], ["你好，", "世", "界"], [0, 1, 2, 3], ".s..", [0, 0, 1, 2]),
        # Tokens that end a character belong to the one that begins it.
        ([b"\xe4\xbd", b"\xa0", "!"], ["你!"], [0, 2], ".s", [0, 0]),
        # A tag may be passed over; it is a word nevertheless.
        (["a", " [", "laugh", "]", " b"], ["a", "[laugh]", "b"], [0, 1, 4], ".s.", [0, 0, 2]),
        (["a", " <", "3"], ["a", "<3"], [0, 1], ".s", [0, 0]),
        (["1", " < ", "2"], ["1 <", "2"], [0, 1, 2], ".s.", [0, 0, 1]),
    ],
)
def test_tokens_become_units_and_words(
    tokens: list[str | bytes], words: list[str], firsts: list[int], silent: str, word: list[int]
) -> None:
    text = transcript(*tokens)
    assert text.unit_starts == firsts
    assert text.unit_silent == [c == "s" for c in silent]
    assert words_of(text) == words
    assert text.unit_words == word


def test_what_stands_alone_belongs_to_a_word_once_nothing_can_join_it() -> None:
    spelling = Spelling()
    text = Transcript(spelling.spell)
    ids = spelling.ids("so", " ", "–")
    text.update(ids, 0)
    assert words_of(text) == ["so"], "the dash may begin a word"
    for more, words in ((" ", ["so –"]), ("4", ["so", "–4"])):
        other = Transcript(spelling.spell)
        other.update([*ids, *spelling.ids(more)], 0)
        assert words_of(other) == words


def test_a_word_is_complete_once_something_follows_it() -> None:
    spelling = Spelling()
    text = Transcript(spelling.spell)
    ids = spelling.ids("Hel", "lo")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello"], 0), "a comma may come"
    ids += spelling.ids(",")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello,"], 0)
    ids += spelling.ids(" you")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello,", "you"], 1)
    text.update(ids, len(ids))
    assert text.num_complete == 2, "whitespace is known to follow"


TOKENS = st.sampled_from(["a", " b", "c", " ", ",", " (", ")", "你", "好吗", "。", "7", " [x", "]"])


@given(st.lists(TOKENS, min_size=1, max_size=30), st.data())
def test_text_in_portions_gives_what_the_whole_gives(
    tokens: list[str], data: st.DataObject
) -> None:
    whole, spelling = transcript(*tokens), Spelling()
    text, ids = Transcript(spelling.spell), spelling.ids(*tokens)
    known = 0
    done: list[str] = []
    while known < len(ids):
        known += data.draw(st.integers(1, len(ids) - known))
        text.update(ids[:known], 0)
        for then, now in zip(done, words_of(text), strict=False):  # but for what follows alone
            assert now.startswith(then) and split_words(now)[0].text == split_words(then)[0].text
        done = words_of(text)[: text.num_complete]
    text.update(ids, len(ids))
    assert (text.unit_starts, text.unit_silent, text.unit_words) == (
        whole.unit_starts,
        whole.unit_silent,
        whole.unit_words,
    )
    assert words_of(text) == words_of(whole)
    assert all(any(c.isalnum() for c in word) for word in words_of(whole))
    assert len(whole.unit_starts) == len(whole.unit_silent) == len(whole.unit_words)
    assert whole.unit_words == sorted(whole.unit_words) and whole.unit_words[-1] <= len(whole) - 1


@given(st.lists(TOKENS, min_size=1, max_size=30))
def test_words_are_all_that_is_written_from_the_first_sound_on(tokens: list[str]) -> None:
    text = transcript(*tokens)
    joined = "".join("".join(words_of(text)).split())
    assert "".join("".join(tokens).split()).endswith(joined)


def test_text_that_is_written_meanwhile_is_not_lost() -> None:
    """The writer's thread adds tokens while those before are being read."""
    spelling = Spelling()
    ids = spelling.ids("a", " b")

    def spell(some: Sequence[int]) -> list[bytes]:
        found = spelling.spell(some)
        if len(ids) == 2:
            ids.extend(spelling.ids(" c"))
        return found

    text = Transcript(spell)
    text.update(ids, 0)
    text.update(ids, 3)
    assert words_of(text) == ["a", "b", "c"]
