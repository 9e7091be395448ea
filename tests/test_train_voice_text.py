"""The voice's corpus: what is said for written text, templates, prose, held-out sentences."""

import random
import re
import struct
import zlib
from itertools import chain
from pathlib import Path

import pytest

from examples.train_voice import sources
from examples.train_voice.grammar import Grammar, articles, plural
from examples.train_voice.judge import errors, normalised_words, text_errors, words_of
from examples.train_voice.numerals import ordinal, roman, spell, spell_es, to_roman, year
from examples.train_voice.phonemes import LANGUAGES, VOICES
from examples.train_voice.replies import Replies
from examples.train_voice.sample import sentences
from examples.train_voice.slots import Slots
from examples.train_voice.spoken import spoken_words
from examples.train_voice.symbols import SPELLED
from examples.train_voice.text import (
    contains_held_out,
    held_out,
    held_out_corpus,
    is_suitable,
    language_of,
)

WORDS = ["apple", "river", "letter", "window", "Alice", "Boston"]


def said(text: str, language: str = "english") -> str:
    """What is said, words separated by blanks, spelled letters in capitals."""
    groups = spoken_words(text, language)
    return " ".join(" ".join(group) for group in groups).replace(SPELLED, "")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("$1,234.56", "one thousand two hundred and thirty four dollars and fifty six cents"),
        ("$3.5 million", "three point five million dollars"),
        ("€2.5M", "two point five million euros"),
        ("$5/month", "five dollars per month"),
        ("3/4 cup", "three quarters cup"),
        ("due 3/4/2025", "due March fourth, twenty twenty five"),
        ("on 3/4", "on March fourth"),
        ("Jan. 5, 2026", "January fifth, twenty twenty six"),
        ("the 1990s", "the nineteen nineties"),
        ("5:30 p.m.", "five thirty P M."),
        ("7:05am", "seven oh five A M"),
        ("12:00 PM", "twelve P M"),
        ("14:00", "fourteen hundred"),
        ("555-0142", "five five five, zero one four two"),
        ("72°F", "seventy two degrees Fahrenheit"),
        ("800 m.", "eight hundred meters."),
        ("1 kg", "one kilogram"),
        ("42 Main St. is", "forty two Main Street is"),
        ("St. Paul's", "Saint Paul's"),
        ("7 Oak St., Apt. 3", "seven Oak Street, apartment three"),
        ("Col. Lee", "colonel Lee"),
        ("Dr. Smith", "doctor Smith"),
        ("Henry VIII", "Henry the eighth"),
        ("World War II", "World War two"),
        ("Chapter IV", "Chapter four"),
        ("an API", "an A P I"),
        ("two PhDs and TVs.", "two P H Ds and T Vs."),
        ("NASA", "Nasa"),
        ("MP3", "M P three"),
        ("UA238", "U A two three eight"),
        ("2019–2021", "twenty nineteen to twenty twenty one"),
        ("9am-5pm", "nine A M to five P M"),
        ("state-of-the-art", "state of the art"),
        ("John F. Kennedy", "John F Kennedy"),
        ("vitamin B. Then", "vitamin B. Then"),
        ("No. 5", "number five"),
        ("No. It", "No. It"),
        ("a.smith42@example.com", "A dot smith forty two at example dot com"),
        ("https://www.acme.io/help.", "W W W dot acme dot I O slash help."),
        ("budget2.csv", "budget two dot C S V"),
        ("Wait... no", "Wait… no"),
        ("**very** [sic]", "very (sic)"),
        ("~20 min", "about twenty minutes"),
        ("PIN is 4555", "Pin is four five five five"),
        ('the "Settings"', 'the "Settings"'),
    ],
)
def test_english_is_said_in_words(written: str, expected: str) -> None:
    assert said(written) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("15,50 €", "quince con cincuenta euros"),
        ("las 10:30", "las diez y media"),
        ("21 personas", "veintiuna personas"),
        ("21 libros", "veintiún libros"),
        ("1.500 libros", "mil quinientos libros"),
        ("hace -3 °C hoy", "hace menos tres grados hoy"),
        ("un 45%", "un cuarenta y cinco por ciento"),
        ("el 5/3/2025", "el cinco de marzo de dos mil veinticinco"),
        ("el Sr. García", "el señor García"),
        ("en EE. UU.", "en Estados Unidos."),
        ("siglo XXI", "siglo veintiuno"),
        ("ana@ejemplo.es", "ana arroba ejemplo punto es"),
        ("el DNI", "el de ene i"),
        ("¿Y qué?", "¿Y qué?"),
    ],
)
def test_spanish_is_said_in_words(written: str, expected: str) -> None:
    assert said(written, "spanish") == expected


@pytest.mark.parametrize("language", LANGUAGES)
def test_everything_that_templates_write_is_said_without_figures(language: str) -> None:
    """Every written word has its spoken words, in which no figure or sign remains."""
    replies = Replies(language, seed=3)
    for text in chain(*((replies.reply(), replies.notation()) for _ in range(2000))):
        groups = spoken_words(text, language)
        assert len(groups) == len(text.split())
        assert not re.search(r"[\d@#%&=_<>{}$€£°/*]", " ".join(" ".join(g) for g in groups)), text
        assert all(groups[i] for i, word in enumerate(text.split()) if re.search(r"\w", word))


def test_no_sentence_begins_after_an_abbreviation() -> None:
    """`e.g. A cat` would not be written, so the voice would not learn `e.g. a cat`."""
    replies = Replies("english", seed=4)
    texts = [text for _ in range(3000) for text in (replies.reply(), replies.notation())]
    found = [m[1] for text in texts for m in re.finditer(r"\b(?:e\.g|i\.e|[ap]\.m)\. (\w)", text)]
    assert len(found) > 50
    assert sum(c.isupper() for c in found) < 0.1 * len(found)  # names, and new sentences


def test_slots_are_seeded_and_all_used() -> None:
    one, two = (Slots(random.Random(5), "english") for _ in range(2))
    assert all(one.makers[n]() == two.makers[n]() for n in sorted(one.makers) for _ in range(20))
    folder = Path(sources.__file__).parent
    files = "assistant.toml", "notation.toml", "slots.py"
    templates = "".join((folder / file).read_text() for file in files)
    assert not [name for name in one.makers if f"{{{name}}}" not in templates]


def test_the_grammar_is_seeded_and_forms_plurals_and_articles() -> None:
    one, two = (Grammar(WORDS, 5) for _ in range(2))
    assert [one.utterance() for _ in range(50)] == [two.utterance() for _ in range(50)]
    plurals = [plural(n) for n in ("city", "box", "day", "child")]
    assert plurals == ["cities", "boxes", "days", "children"]
    assert articles("A apple, a unit and a hour") == "An apple, a unit and an hour"


def test_numbers_are_spelled() -> None:
    assert spell(17_342) == "seventeen thousand three hundred and forty two"
    assert spell(2_000_001) == "two million and one"
    assert spell_es(1_021_101) == "un millón veintiún mil ciento uno"
    assert [ordinal(n) for n in (1, 12, 20, 33)] == [
        "first",
        "twelfth",
        "twentieth",
        "thirty third",
    ]
    years = {1905: "nineteen oh five", 2000: "two thousand", 2007: "two thousand seven"}
    assert all(year(n) == words for n, words in years.items())
    assert all(roman(to_roman(n)) == n for n in range(1, 200)) and roman("IIII") == 0


def test_held_out_sentences_are_distinct_and_cover_all_voices() -> None:
    texts = [text for _, text in held_out()]
    assert len(texts) >= 300 and len(set(texts)) == len(texts)
    assert all(is_suitable(text) for text in texts)
    categories = {category for category, _ in held_out()}
    assert categories > {"numbers", "money", "dates", "addresses", "words", "paragraph", "spanish"}
    assert {voice for voice, _ in held_out_corpus()} == set(VOICES)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) == 1 and max(lengths) >= 40


def test_held_out_sentences_are_excluded() -> None:
    for _, text in held_out():
        assert contains_held_out(text.upper())
        assert contains_held_out(f"Well. {text}") == (len(text.split()) > 3)
    assert not contains_held_out("Tomorrow is fine.")


def test_words_are_compared_as_they_are_said() -> None:
    def compare(one: str, other: str) -> int:
        return errors(normalised_words(one, "english"), normalised_words(other, "english"))

    assert (
        compare("It's $64.50 at 7:45pm.", "it's sixty-four dollars and fifty cents at 7:45 PM") == 0
    )
    assert compare("Our API, in the living room", "our A.P.I. in the livingroom") == 0
    assert compare("one hundred twenty", "120") == 0
    assert compare("on March 3, 2021", "on March 3rd, 2021") == 0
    assert compare("It is 8%.", "It is 9%.") == 1
    assert text_errors("¿Qué hora es?", "Que hora es.", "spanish") == 0


@pytest.mark.parametrize(
    ("written", "transcript", "wrong"),
    [
        ("Could we talk at 8:15 tomorrow?", "Could we talk at 815 tomorrow?", 0),
        ("between 6:30 and 10 AM", "between 6.30 and 10 a.m.", 0),
        ("at 11:40 p.m.", "at 11.40pm.", 0),
        ("came to $2,375", "came to $2,300 and $75", 0),
        ("In 1969, 3.75 tons", "In 1969, 3.75 tons", 0),
        ("at 8:15", "at 8:50", 1),
    ],
)
def test_figures_are_read_in_the_way_that_fits(written: str, transcript: str, wrong: int) -> None:
    assert text_errors(written, transcript, "english") == wrong


def test_word_errors_are_counted() -> None:
    assert words_of("It's 'Anna', isn't it?") == ["it's", "anna", "isn't", "it"]
    assert errors("a b c d".split(), "a x c".split()) == 2
    assert errors([], ["a"]) == 1 and errors(["a"], []) == 1


def test_paragraphs_are_divided_into_sentences() -> None:
    paragraph = '"Is it?" she asked. Mr. Knightley left. "No!" He came back.'
    found = ['"Is it?" she asked.', "Mr. Knightley left.", '"No!"', "He came back."]
    assert sources.sentences(paragraph) == found


def test_novels_and_verses_are_read_from_their_packages(tmp_path: Path) -> None:
    lines = ["It was a truth universally", "acknowledged--and _so_ on it went.", "", "CHAPTER I"]
    elements = b"".join(b"\0\4\0\x09" + struct.pack(">I", len(t)) + t.encode() for t in lines)
    novel = tmp_path / sources._AUSTEN
    novel.parent.mkdir(parents=True)
    novel.write_bytes(struct.pack(">I", len(elements)) + zlib.compress(elements))
    expected = ["It was a truth universally acknowledged—and so on it went."]
    assert list(sources.novels(tmp_path)) == expected

    book = '<div sID="a" type="x-p"/><w>He</w> said<note>x</note> this to <w>them</w>, twice.'
    packed = zlib.compress(book.encode())
    for language, folder in sources._SWORD.items():
        (tmp_path / folder).mkdir(parents=True)
        for part in ("ot", "nt"):
            (tmp_path / folder / f"{part}.bzz").write_bytes(packed)
            index = struct.pack("<III", 0, len(packed), len(book))
            (tmp_path / folder / f"{part}.bzs").write_bytes(index)
        assert list(sources.verses(language, tmp_path)) == 2 * ["He said this to them, twice."]


def test_definitions_and_examples_are_read_from_wordnet(tmp_path: Path) -> None:
    folder = tmp_path / sources._WORDNET
    folder.mkdir(parents=True)
    line = '001 03 n 02 big_cat 0 001 @ 002 n 0000 | a large cat; "the big cat slept all day"\n'
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{part}").write_text("  licence\n" + (line if part == "noun" else ""))
    assert list(sources.definitions(tmp_path)) == [
        ("example", "big cat", "the big cat slept all day"),
        ("noun", "big cat", "a large cat"),
    ]


def test_the_sample_has_every_voice_in_its_language_and_ten_different_sentences() -> None:
    chosen = sentences()
    category = {text: category for category, text in held_out()}
    assert len({text for _, text in chosen}) == 10
    assert {voice for voice, _ in chosen} == {*VOICES}
    assert all(VOICES[voice].language == language_of(category[text]) for voice, text in chosen)
