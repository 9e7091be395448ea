"""The words to say for a written text: numbers, dates, abbreviations, addresses and the like.

Each space-separated word of the text has its own list of spoken words, so that word times refer to
the written text. A spoken letter is marked (`SPELLED`), because `A` alone would be an article.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from examples.train_voice import spoken_spanish
from examples.train_voice.numerals import digits, ordinal, roman, spell, year
from examples.train_voice.symbols import (
    ABBREVIATIONS,
    ACRONYMS,
    CURRENCIES,
    MAGNITUDES,
    MONTHS,
    SYMBOLS,
    UNITS,
    WEEKDAYS,
    letters,
)

_SHAPE = re.compile(r"([\"'“‘«(\[{*_¿¡]*)(.*?)([\"'”’»)\]},;:!?…*_—.-]*)")
_NUMBER = r"\d{1,3}(?:,\d{3})+|\d+"
_YEAR = re.compile(r"(1[1-9]|20)\d\d")
_ROYAL = re.compile(
    r"(Henry|Louis|Elizabeth|George|Edward|Charles|William|Richard|James|Philip|Catherine|John|"
    r"Paul|Pius|Benedict|Gregory|Napoleon|Alexander|Frederick|Peter|Nicholas|Ramesses)$"
)
_DATE_CUES = {"on", "by", "due", "date", "since", "until", "from", "to", "before", "after", "for"}
_FRACTIONS = {2: "half", 3: "third", 4: "quarter", 5: "fifth", 8: "eighth", 10: "tenth"}
_LEVELS = {"com", "org", "net", "info", "biz", "app", "dev", "shop", "co", "gov", "mail"}


@dataclass(frozen=True)
class _Word:
    """A written word without its punctuation, between its neighbours."""

    core: str
    before: str
    after: str
    dot: bool  # whether a full stop follows it
    last: bool  # of the text


def spoken_words(text: str, language: str) -> list[list[str]]:
    """Words to say for each space-separated word of a text.

    Args:
        text: The written text.
        language: `english` or `spanish`.

    Returns:
        For each word its spoken words, with the punctuation that the teacher reads. The list is
        empty for a word that is only a mark, such as a bullet.
    """
    words = text.split()
    bare = [_split(word)[1] for word in words]
    read = spoken_spanish.read if language == "spanish" else _read
    return [_say(words, bare, i, read) for i in range(len(words))]


def _split(word: str) -> tuple[str, str, str]:
    """A word between the punctuation before and after it."""
    match = _SHAPE.fullmatch(word)
    assert match is not None
    before, core, after = match.groups()
    return before, core, after


def _say(words: list[str], bare: list[str], i: int, read: Callable[..., str]) -> list[str]:
    before, core, after = _split(words[i])
    before, after = re.sub(r"[*_]", "", before), re.sub(r"[*_]", "", after)
    if not core:
        return ["—"] if set(before + after) & set("—–-") and 0 < i < len(words) - 1 else []
    previous = bare[i - 1] if i else ""
    if core.isalpha() and previous and words[i - 1][-1] in ",;:!?":
        previous = ""  # of another phrase
    last = i == len(words) - 1
    following = "" if last or after.startswith(".,") else bare[i + 1]
    word = _Word(core, previous, following, after.startswith("."), last)
    said = read(word) or core
    if word.dot and not word.last and said != core and _is_abbreviation(word, said):
        after = after.removeprefix(".")
    after = re.sub(r"\.{2,}", "…", after).replace("--", "—").replace("-", "")
    before = re.sub(r"[\[{]", "(", before)
    after = re.sub(r"[\]}]", ")", after)
    return f"{before}{said}{after}".split()


def _is_abbreviation(word: _Word, said: str) -> bool:
    """Whether the full stop after a word belongs to it and ends no sentence."""
    core, starts = word.core, word.after[:1].isupper()
    if core.lower() in ("a.m", "p.m", "am", "pm", "etc", "inc", "jr", "ltd", "co"):
        return not starts
    if re.fullmatch(r"[A-Z]", core):
        return starts and word.before[:1].isupper()
    if core in UNITS:
        return not starts
    initials = re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]", core)
    known = core == "EE" or core.lower() in ABBREVIATIONS
    return bool(initials) or known or (core.isalpha() and said.isalpha())


def _read(word: _Word) -> str:
    """Words for an English word; empty if it is said as it is written."""
    core = word.core
    for rule in (_symbol, _address, _time, _date, _money, _telephone, _number, _abbreviation):
        said = rule(word)
        if said:
            return said
    if re.search(r"[—–/=+&]|\w-\w|…", core):
        return _compound(word)
    return _mixed(core)


def _part(text: str, before: str = "", after: str = "") -> str:
    """Words for a part of a written word."""
    start, core, end = _split(text)
    if not core:
        return ""
    said = _read(_Word(core, before, after, dot=False, last=False)) or core
    return f"{start}{said}{end}"


def _symbol(word: _Word) -> str:
    if word.core in SYMBOLS:
        return SYMBOLS[word.core]
    if match := re.fullmatch(r"#(\d+)", word.core):
        return f"number {_integer(match[1])}"
    if match := re.fullmatch(r"#([A-Za-z]\w+)", word.core):
        return f"hashtag {_mixed(match[1]) or match[1]}"
    if match := re.fullmatch(r"@([A-Za-z]\w+)", word.core):
        return f"at {_name(match[1])}"
    if match := re.fullmatch(r"[~≈](.+)", word.core):
        return f"about {_part(match[1], after=word.after)}"
    if match := re.fullmatch(r"([<>≤≥])(.+)", word.core):
        return f"{SYMBOLS[match[1]]} {_part(match[2], after=word.after)}"
    return ""


def _address(word: _Word) -> str:
    """E-mail addresses, URLs and file names."""
    core = word.core
    if match := re.fullmatch(r"([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)", core):
        return f"{_name(match[1])} at {_name(match[2])}"
    url = re.fullmatch(r"(?:https?://)?((?:[\w-]+\.)+[a-zA-Z]{2,})(:\d+)?(/[^\s]*)?", core)
    if url and (core.startswith("http") or "/" in core or url[1].islower() or "www" in core):
        if re.fullmatch(r"(?:[a-z]\.)+[a-z]{1,2}", url[1]) and not url[3]:
            return ""  # e.g, a.m
        path = (url[3] or "").rstrip("/")
        return _name(url[1]) + (f" {_name(path)}" if path else "")
    if re.fullmatch(r"[\w-]+\.(pdf|docx?|xlsx?|txt|py|js|csv|zip|jpe?g|png|mp3|json|html)", core):
        return _name(core)
    if re.fullmatch(r"[A-Z]\w+\.(js|io|ai|com|net|org)", core):
        return _name(core)
    return ""


def _name(text: str) -> str:
    """Words for a name in an address."""
    said: list[str] = []
    for piece in re.findall(r"[A-Za-z]+|\d+|[^A-Za-z\d]", text):
        if piece.isdigit():
            said.append(spell(int(piece)) if len(piece) < 3 and piece[0] != "0" else _run(piece))
        elif not piece.isalpha():
            said.append(SYMBOLS.get(f"url{piece}", ""))
        elif piece.lower() in _LEVELS:
            said.append(piece)
        elif len(piece) <= 3 and (len(piece) <= 2 or not re.search(r"[aeiouy]", piece.lower())):
            said.append(letters(piece))
        elif piece.lower() in ("pdf", "csv", "png", "edu", "api", "docx", "xlsx", "html"):
            said.append(letters(piece))
        else:
            said.append(_mixed(piece) or piece)
    return " ".join(filter(None, said))


def _time(word: _Word) -> str:
    match = re.fullmatch(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s?([AaPp]\.?[Mm])?", word.core)
    if match and int(match[1]) < 25:
        hour, minute, half = int(match[1]), int(match[2]), match[4]
        half = half or (word.after if re.fullmatch(r"[AaPp]\.?[Mm]", word.after) else "")
        said = spell(hour)
        if minute:
            said += f" {'oh ' if minute < 10 else ''}{spell(minute)}"
        elif not half:
            said += " hundred" if hour > 12 else " o'clock"
        if match[3]:
            said += f" and {spell(int(match[3]))} seconds"
        return said + (f" {letters(match[4])}" if match[4] else "")
    if match := re.fullmatch(r"(\d+):(\d+)", word.core):
        return f"{spell(int(match[1]))} to {spell(int(match[2]))}"
    if match := re.fullmatch(r"(\d{1,2})([AaPp]\.?[Mm])", word.core):
        return f"{spell(int(match[1]))} {letters(match[2])}"
    if re.fullmatch(r"[AaPp]\.[Mm]|[AP]M", word.core):
        return letters(word.core)
    if word.core in ("am", "pm") and re.search(r"\d$", word.before):
        return letters(word.core)
    return ""


def _date(word: _Word) -> str:
    core = word.core
    if match := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", core):
        return _day(int(match[2]), int(match[3]), match[1])
    if match := re.fullmatch(r"(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)", core):
        return _day(int(match[1]), int(match[2]), match[3])
    match = re.fullmatch(r"(\d{1,2})/(\d{1,2})", core)
    if match and word.before.lower() in _DATE_CUES and int(match[1]) <= 12:
        return _day(int(match[1]), int(match[2]), "")
    if re.fullmatch(r"[1-9]|[12]\d|3[01]", core) and _is_month(word.before):
        return ordinal(int(core))
    if re.fullmatch(_YEAR, core):
        return "" if word.after.lower() in UNITS else year(int(core))
    if match := re.fullmatch(r"(\d{2,4})(s)", core):
        number = int(match[1])
        said = year(number) if number > 99 else spell(number)
        return said[:-1] + "ies" if said.endswith("y") else said + "s"
    if match := re.fullmatch(r"['’]?(\d\d)s", core):
        return re.sub("y$", "ies", spell(int(match[1])))
    key = core.lower()
    if key in MONTHS and (word.dot or re.match(r"\d", word.after)) and core[0].isupper():
        return MONTHS[key]
    if key in WEEKDAYS and word.dot and core[0].isupper() and not word.last:
        return WEEKDAYS[key]
    return ""


def _is_month(word: str) -> bool:
    key = word.lower()
    return word[:1].isupper() and (key in MONTHS or key.capitalize() in MONTHS.values())


def _day(month: int, day: int, written_year: str) -> str:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return ""
    said = f"{list(MONTHS.values())[month - 1]} {ordinal(day)}"
    if not written_year:
        return said
    full = int(written_year) + (2000 if len(written_year) == 2 else 0)
    return f"{said}, {year(full)}"


def _money(word: _Word) -> str:
    pattern = rf"(-?)([$£€¥])({_NUMBER})(?:\.(\d+))?(k|K|m|M|bn|B|b)?(?:/(\w+))?\+?"
    match = re.fullmatch(pattern, word.core)
    if match:
        sign, mark, whole, cents, size, per = match.groups()
    elif match := re.fullmatch(rf"(-?)({_NUMBER})(?:[.,](\d+))?([€¥£])", word.core):
        sign, whole, cents, mark = match.groups()
        size = per = None
    else:
        after_money = re.fullmatch(rf"[$£€¥](?:{_NUMBER})(?:\.\d+)?", word.before)
        if after_money and word.core in MAGNITUDES.values():
            return f"{word.core} {CURRENCIES[word.before[0]][1]}"
        return ""
    one, many, part, parts = CURRENCIES[mark]
    amount = int(whole.replace(",", ""))
    said = spell(amount)
    magnitude = MAGNITUDES.get(size or "", "")
    if magnitude or word.after in MAGNITUDES.values():
        said += f" point {digits(cents)}" if cents else ""
        said += f" {magnitude} {many}" if magnitude else ""
    else:
        said += f" {one if amount == 1 else many}"
        if cents and int(cents):
            count = int(cents.ljust(2, "0")[:2])
            said = "" if not amount else f"{said} and "
            said += f"{spell(count)} {part if count == 1 else parts}"
    said = f"minus {said}" if sign else said
    return f"{said} per {UNITS.get(per, (per, per))[0]}" if per else said


def _telephone(word: _Word) -> str:
    core = word.core
    if re.fullmatch(r"(\+?\d{1,3}[-.])?(\(?\d{3}\)?[-.])?\d{3}[-.]\d{4}|\d{3}\)?", core) and (
        len(core) > 6 or re.fullmatch(r"\d{3}-\d{4}", word.after)
    ):
        plus = "plus " if core.startswith("+") else ""
        return plus + ", ".join(digits(g) for g in re.findall(r"\d+", core))
    if re.fullmatch(r"\+\d{1,3}", core) and re.match(r"\(?\d", word.after):
        return f"plus {digits(core)}"
    if re.fullmatch(r"\d{3}-\d{2}-\d{4}|\d{4}-\d{4}(-\d{4})*", core):
        return ", ".join(digits(g) for g in core.split("-"))
    return ""


def _abbreviation(word: _Word) -> str:
    core, key = word.core, word.core.lower()
    if core in ("St", "st") and word.dot:
        numbered = re.search(r"\d", word.before)
        saint = word.after[:1].isupper() and not numbered
        return "Saint" if saint else "Street"
    if core == "Dr" and word.dot and not word.after[:1].isupper():
        return "Drive"
    if key == "no" and word.dot and re.match(r"\d", word.after):
        return "number"
    plain = {"vs", "w/", "mr", "mrs", "dr", "ctrl", "phd", "phds"}  # also without a full stop
    if key in ABBREVIATIONS and (word.dot or "." in key or key in plain):
        return ABBREVIATIONS[key]
    if re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]|[A-Z](?:-[A-Z])+", core):
        return letters(core)
    if core == "A" and re.fullmatch(r"[A-Z]|as", word.after):
        return letters(core)  # in a spelling
    starts = word.after[:1].isupper()
    if re.fullmatch(r"[B-HJ-Zb-hj-z]", core) or (core in "AI" and word.dot and starts):
        value = roman(core)
        if value and word.before.lower() in ("chapter", "part", "volume", "act", "war"):
            return spell(value)
        return letters(core)
    value = roman(core) if len(core) > 1 else 0
    if value and value < 50 and word.before[:1].isupper():
        return f"the {ordinal(value)}" if _ROYAL.match(word.before) else spell(value)
    return ""


def _number(word: _Word) -> str:
    core = word.core
    if match := re.fullmatch(r"(\d[\d,]*)(st|nd|rd|th)", core):
        return ordinal(int(match[1].replace(",", "")))
    if match := re.fullmatch(r"(\d+)/(\d+)", core):
        over, under = int(match[1]), int(match[2])
        if over < under and under in _FRACTIONS:
            return f"{spell(over)} {_FRACTIONS[under]}{'s' if over > 1 else ''}".replace(
                "halfs", "halves"
            )
        return f"{spell(over)} {'out of' if over < under else ''} {spell(under)}"
    if match := re.fullmatch(r"(\d)['′](\d{1,2})[\"″]?", core):
        return f"{spell(int(match[1]))} foot {spell(int(match[2]))}"
    pattern = rf"([-−+]?)({_NUMBER})?((?:\.\d+)*)(%|°[CF]?|[A-Za-zµ]+(?:/[a-z]+)?|[x×])?(\+?)"
    match = re.fullmatch(pattern, core)
    is_code = word.before.lower() in ("is", "in", "code", "pin", "number", "ending")
    if re.fullmatch(r"\d{4,}", core) and (len(core) > 4 or is_code):
        return digits(core)
    if match and (match[2] or match[3]):
        sign, whole, tail, unit, more = match.groups()
        unit = unit or ""
        if unit and unit not in UNITS and unit not in MAGNITUDES and unit not in "x×":
            return ""
        if unit == "K" and len(whole or "") == 1 and not tail:
            return ""  # 4K
        said = _integer(whole) if whole else "zero"
        for piece in tail.split(".")[1:]:
            said += f" point {digits(piece)}"
        said = {"-": "minus ", "−": "minus ", "+": "plus "}.get(sign, "") + said
        if unit in MAGNITUDES and unit not in ("m", "b"):
            return f"{said} {MAGNITUDES[unit]}"
        if unit in ("x", "×"):
            return f"{said} times"
        if unit:
            said += f" {UNITS[unit][0 if said == 'one' else 1]}"
        return said + (" plus" if more else "")
    quantity = rf"\d+/\d+|[-−~≈<>]?(?:{_NUMBER})(?:\.\d+)?"
    if core in UNITS and re.fullmatch(quantity, word.before):
        return UNITS[core][0 if word.before == "1" else 1]
    return ""


def _integer(text: str) -> str:
    """Words for digits with or without separators."""
    plain = text.replace(",", "")
    if (len(plain) > 6 and "," not in text) or (len(plain) > 1 and plain[0] == "0"):
        return digits(plain)
    return spell(int(plain))


def _run(text: str) -> str:
    """Words for the digits of a code: pairs as a number, longer ones digit by digit."""
    return spell(int(text)) if len(text) < 3 and text[0] != "0" else digits(text)


def _compound(word: _Word) -> str:
    """Words for parts that are joined by hyphens, dashes, slashes and signs."""
    core = word.core
    span = re.fullmatch(
        r"(\$?[\d.,:]+(?:[ap]m)?%?)\s?[–-]\s?(\$?[\d.,:]+(?:[ap]m)?%?(?:[a-z]+)?)", core
    )
    if span:
        first, last = span.groups()
        if re.fullmatch(_YEAR, first) and len(last) == 2:
            return f"{year(int(first))} to {spell(int(last))}"
        return f"{_part(first)} to {_part(last, after=word.after)}"
    said: list[str] = []
    for piece in re.split(r"([—–/=+&]|(?<=\w)-(?=\w)|…|\.\.+)", core):
        if not piece or piece == "-":
            continue
        if piece in "—–":
            said.append("—")
        elif piece == "…" or piece.startswith(".."):
            said.append("…")
        elif piece == "/":
            per = re.search(r"\d", core) and not re.search(r"/\d", core)
            said.append("per" if per else "slash" if not core.isascii() else "")
        elif piece in SYMBOLS:
            said.append(SYMBOLS[piece])
        else:
            said.append(_part(piece))
    joined = " ".join(filter(None, said))
    return re.sub(r"\s([—…])", r" \1", joined)


def _mixed(core: str) -> str:
    """Words for initialisms, codes of letters and digits, and names with inner capitals."""
    base, ending = core, ""
    if match := re.fullmatch(r"([A-Z]{2,}|[A-Z\d]+)(s|'s|’s)", core):
        base, ending = match.groups()
    if re.fullmatch(r"[A-Z]{2,5}", base) and base not in ACRONYMS:
        return letters(base) + ending.replace("’", "'")
    if re.fullmatch(r"[A-Z]{2,}", base):
        return base.capitalize() + ending if base in ACRONYMS else ""
    if re.search(r"\d", core) and re.fullmatch(r"[A-Za-z\d]+", core):
        said: list[str] = []
        for piece in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", core):
            if piece.isdigit():
                said.append(_run(piece))
            elif len(piece) < 3 or piece.isupper():
                said.append(letters(piece))
            else:
                said.append(piece)
        return " ".join(said)
    if re.fullmatch(r"[a-z][A-Z][a-z]+", core):
        return f"{letters(core[0])} {core[1:]}"
    inner = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", core)
    name = re.match(r"(Mc|Mac|De|Di|La|Le|Van)", core)
    if len(inner) > 1 and "".join(inner) == core and not name:
        return " ".join(letters(p) if p.isupper() and p not in ACRONYMS else p for p in inner)
    return ""
