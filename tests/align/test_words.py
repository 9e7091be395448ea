from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.align.words import Transcript, has_spoken_words, split_words
from megakernel_tts.text.markup import Replacement
from tests.align.texts import GrowingVocabulary, transcript, words_of


def test_words_are_classified_by_clause_end_and_script() -> None:
    text = "Well, I – said “no.” 你好。"
    written = split_words(text)
    assert [text[w.start : w.stop] for w in written] == [w.text for w in written]
    words = [w for w in written if w.spoken]
    assert [w.text for w in words] == ["Well,", "I", "said", "“no.”", "你", "好。"]
    assert [w.ends_clause for w in words] == [True, False, False, True, False, True]
    assert [w.unspaced for w in words] == [False] * 4 + [True] * 2
    assert [w.text for w in written if not w.spoken] == ["–"]


@pytest.mark.parametrize(
    ("tokens", "words", "unit_starts", "unit_silent", "unit_words"),
    [
        (["Hel", "lo", ",", " you"], ["Hello,", "you"], [0, 1, 2, 3], "..s.", [0, 0, 0, 1]),
        (['"', "Well", '"', "."], ['"Well".'], [0, 1, 2], "s.s", [-1, 0, 0]),
        (["so", " ", "–", " it"], ["so –", "it"], [0, 1, 3], ".s.", [0, 0, 1]),
        # Characters that share a token are one word; characters of different tokens are not.
        (["你好", "，", "世", "界"], ["你好，", "世", "界"], [0, 1, 2, 3], ".s..", [0, 0, 1, 2]),
        # Tokens that complete a character belong to the token that begins it.
        ([b"\xe4\xbd", b"\xa0", "!"], ["你!"], [0, 2], ".s", [0, 0]),
        # A tag is silent; it is still a word.
        (["a", " [", "laugh", "]", " b"], ["a", "[laugh]", "b"], [0, 1, 4], ".s.", [0, 0, 2]),
        (["a", " <", "3"], ["a", "<3"], [0, 1], ".s", [0, 0]),
        (["1", " < ", "2"], ["1 <", "2"], [0, 1, 2], ".s.", [0, 0, 1]),
    ],
)
def test_tokens_become_units_and_words(
    tokens: list[str | bytes],
    words: list[str],
    unit_starts: list[int],
    unit_silent: str,
    unit_words: list[int],
) -> None:
    text = transcript(*tokens)
    assert text.unit_starts == unit_starts
    assert text.unit_silent == [char == "s" for char in unit_silent]
    assert words_of(text) == words
    assert text.unit_words == unit_words


def test_tags_are_not_divided_and_are_no_words() -> None:
    text = 'So.<break time="1 s"/> A<b>B</b>, <emotion value="x y"/> 你<emotion/>好 x<y <z <brea'
    written = split_words(text)
    assert [text[w.start : w.stop] for w in written] == [w.text for w in written]
    assert [(w.text, w.spoken, w.ends_clause, w.in_tag) for w in written] == [
        ('So.<break time="1 s"/>', True, True, False),
        ("A<b>B</b>,", True, True, False),
        ('<emotion value="x y"/>', False, False, False),
        ("你<emotion/>", True, False, False),
        ("好", True, False, False),
        ("x<y", True, False, False),
        ("<z", True, False, False),
        ("<brea", False, False, True),
    ]
    assert split_words("a <break/>")[1].ends_clause


def test_a_tag_may_be_in_place_of_a_space() -> None:
    text = "Hi.<break/>How are<emotion/>you?<b>Fine</b>, wor<b>ld</b> 7<break/>. (<emotion/>x"
    assert [word.text for word in split_words(text)] == [
        "Hi.<break/>", "How", "are<emotion/>", "you?<b>", "Fine</b>,", "wor<b>ld</b>",
        "7<break/>", ".", "(<emotion/>x",
    ]  # fmt: skip


@pytest.mark.parametrize("tag", ['<break time="1 s"/>', "<<m|a>>", "<b a='x y' c=\"z\">", "</b>"])
def test_a_tag_that_is_not_complete_is_one_word_up_to_the_end(tag: str) -> None:
    for stop in range(1, len(tag)):
        *_, last = split_words(f"one two, {tag[:stop]}")
        assert (last.text, last.in_tag, last.spoken) == (tag[:stop], True, False)
    *_, last = split_words(f"one two, {tag}")
    assert (last.text, last.in_tag, last.spoken) == (tag, False, False)


@pytest.mark.parametrize("silent", ["", " \n", "… – (", '<break time="1 s"/>', "<<m|a>> <bre"])
def test_a_text_has_spoken_words_from_the_first_letter_or_digit_outside_tags(silent: str) -> None:
    assert not has_spoken_words(silent)
    for word in ("a", "7", "你"):
        assert has_spoken_words(f"{word} {silent}")
        assert has_spoken_words(f"<break/> … {word}<emotion/>{silent}")


def test_what_is_spoken_in_place_of_a_word_is_that_word() -> None:
    """Tokens of `so (gee pee you), it's aye bee`, written as `so (GPU), it's AB`."""
    tokens = ["so", " (", "gee", " pee", " you", "),", " it", "'s", " aye", " bee"]
    replacements = [Replacement(4, 15, "GPU"), Replacement(23, 30, "AB")]
    vocabulary = GrowingVocabulary()
    ids = vocabulary.ids(*tokens)
    text = Transcript(vocabulary.token_bytes)
    num_complete = []
    for num_known, num_whole in enumerate([1, 1, 3, 4, 4, 6, 6, 8, 9, 10], start=1):
        text.update(ids[:num_known], num_whole, replacements)
        num_complete.append(text.num_complete)
        words = words_of(text)[: text.num_complete]
        assert words == ["so", "(GPU),", "it's", "AB"][: len(words)]
    # Within a replacement its word is not complete, although its spoken words are whole.
    assert num_complete == [1, 1, 1, 1, 1, 2, 2, 3, 3, 4]
    assert [text.spoken(i) for i in range(len(text))] == [
        "so", "(gee pee you),", "it's", "aye bee",
    ]  # fmt: skip
    assert text.unit_words == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3]


def test_a_replacement_in_a_script_without_spaces_joins_the_tokens_it_covers() -> None:
    """Tokens of one character, and one token for the end of a word and the next one."""
    for tokens, words in (
        (["在", "崇", "庆", "。", "住"], ["在", "重庆。", "住"]),
        (["在崇", "庆", "住"], ["在", "重庆", "住"]),
        (["在", "崇", "庆住"], ["在", "重庆住"]),
    ):
        vocabulary = GrowingVocabulary()
        ids = vocabulary.ids(*tokens)
        text = Transcript(vocabulary.token_bytes)
        text.update(ids, len(ids), [Replacement(1, 3, "重庆")])
        assert words_of(text) == words


def test_the_rest_of_a_word_of_the_segment_before_is_no_word() -> None:
    vocabulary = GrowingVocabulary()
    ids = vocabulary.ids("pee", " you", ",", " and")
    text = Transcript(vocabulary.token_bytes)
    text.update(ids, len(ids), [Replacement(0, 7, "")])
    assert words_of(text) == ["and"]
    assert text.unit_words == [-1, -1, -1, 0]


def test_punctuation_joins_a_word_when_it_cannot_begin_another() -> None:
    vocabulary = GrowingVocabulary()
    text = Transcript(vocabulary.token_bytes)
    ids = vocabulary.ids("so", " ", "–")
    text.update(ids, 0)
    assert words_of(text) == ["so"], "the dash may begin a word"
    for more, words in ((" ", ["so –"]), ("4", ["so", "–4"])):
        other = Transcript(vocabulary.token_bytes)
        other.update([*ids, *vocabulary.ids(more)], 0)
        assert words_of(other) == words


def test_word_is_complete_when_another_follows() -> None:
    vocabulary = GrowingVocabulary()
    text = Transcript(vocabulary.token_bytes)
    ids = vocabulary.ids("Hel", "lo")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello"], 0), "a comma may follow"
    ids += vocabulary.ids(",")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello,"], 0)
    ids += vocabulary.ids(" you")
    text.update(ids, 0)
    assert (words_of(text), text.num_complete) == (["Hello,", "you"], 1)
    text.update(ids, len(ids))
    assert text.num_complete == 2, "the tokens end at a word boundary"


TOKENS = st.sampled_from(["a", " b", "c", " ", ",", " (", ")", "你", "好吗", "。", "7", " [x", "]"])


@given(st.lists(TOKENS, min_size=1, max_size=30), st.data())
def test_portions_give_the_same_words_as_the_complete_text(
    tokens: list[str], data: st.DataObject
) -> None:
    whole, vocabulary = transcript(*tokens), GrowingVocabulary()
    text, ids = Transcript(vocabulary.token_bytes), vocabulary.ids(*tokens)
    num_known = 0
    complete: list[str] = []
    while num_known < len(ids):
        num_known += data.draw(st.integers(1, len(ids) - num_known))
        text.update(ids[:num_known], 0)
        for then, now in zip(complete, words_of(text), strict=False):  # punctuation may follow
            assert now.startswith(then) and split_words(now)[0].text == split_words(then)[0].text
        complete = words_of(text)[: text.num_complete]
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


@given(st.lists(st.text("aB7_ .,-(\n]>", max_size=4), max_size=20))
def test_ascii_outside_tags_is_read_as_other_text_is(tokens: list[str]) -> None:
    """A letter that is not of ASCII at the end of the text makes no difference."""
    texts = (transcript(*tokens, " ", letter) for letter in "eé")
    one, other = ((t.unit_starts, t.unit_silent, t.unit_words, words_of(t)[:-1]) for t in texts)
    assert one == other


@given(st.lists(TOKENS, min_size=1, max_size=30))
def test_words_contain_all_text_from_the_first_letter(tokens: list[str]) -> None:
    text = transcript(*tokens)
    joined = "".join("".join(words_of(text)).split())
    assert "".join("".join(tokens).split()).endswith(joined)


def test_tokens_that_are_appended_during_an_update_are_not_lost() -> None:
    """The session's thread may append tokens while the engine thread reads them."""
    vocabulary = GrowingVocabulary()
    ids = vocabulary.ids("a", " b")

    def token_bytes(new_ids: Sequence[int]) -> list[bytes]:
        result = vocabulary.token_bytes(new_ids)
        if len(ids) == 2:
            ids.extend(vocabulary.ids(" c"))
        return result

    text = Transcript(token_bytes)
    text.update(ids, 0)
    text.update(ids, 3)
    assert words_of(text) == ["a", "b", "c"]
