"""Numbers in words, English and Spanish."""

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"))
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip
_ONES_ES = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
_TENS_ES = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_HUNDREDS_ES = (
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos "
    "novecientos"
).split()
_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def spell(n: int) -> str:
    """Spells a number in English: 1042 is `one thousand and forty two`."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f" {_ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{_ONES[n // 100]} hundred" + (f" and {spell(n % 100)}" if n % 100 else "")
    size, name = next(scale for scale in _SCALES if n >= scale[0])
    rest = n % size
    joint = " and " if 0 < rest < 100 else " "
    return f"{spell(n // size)} {name}" + (f"{joint}{spell(rest)}" if rest else "")


def ordinal(n: int) -> str:
    """Spells an ordinal number in English."""
    *first, last = spell(n).split()
    if last in _ORDINALS:
        last = _ORDINALS[last]
    else:
        last = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return " ".join([*first, last])


def year(n: int) -> str:
    """Spells a year as it is read: 1905 is `nineteen oh five`."""
    century, rest = divmod(n, 100)
    if rest == 0 and century % 10:
        return f"{spell(century)} hundred"
    if rest == 0 or (century % 10 == 0 and rest < 10):
        return spell(n).replace(" and ", " ")
    return f"{spell(century)} {'oh ' if rest < 10 else ''}{spell(rest)}"


def digits(text: str) -> str:
    """Spells the digits of a text one by one."""
    return " ".join(_ONES[int(c)] for c in text if c.isdigit())


def roman(numeral: str) -> int:
    """Value of a Roman numeral, 0 if it is not one."""
    if not numeral or set(numeral) - set(_ROMAN):
        return 0
    values = [_ROMAN[c] for c in numeral]
    signs = [-v if v < max(values[i:]) else v for i, v in enumerate(values)]
    total = sum(signs)
    return total if numeral == to_roman(total) else 0


def to_roman(n: int) -> str:
    """A Roman numeral."""
    pairs = (
        (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
        (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    )  # fmt: skip
    numeral = ""
    for value, letters in pairs:
        count, n = divmod(n, value)
        numeral += letters * count
    return numeral


def spell_es(n: int) -> str:
    """Spells a number below 10^12 in Spanish."""
    if n < 30:
        return _ONES_ES[n]
    if n < 100:
        return _TENS_ES[n // 10 - 3] + (f" y {_ONES_ES[n % 10]}" if n % 10 else "")
    if n == 100:
        return "cien"
    if n < 1000:
        return _HUNDREDS_ES[n // 100 - 1] + (f" {spell_es(n % 100)}" if n % 100 else "")
    size = 1000 if n < 1_000_000 else 1_000_000
    count, rest = divmod(n, size)
    tail = f" {spell_es(rest)}" if rest else ""
    if size == 1000:
        return ("mil" if count == 1 else f"{apocopate(spell_es(count))} mil") + tail
    return ("un millón" if count == 1 else f"{apocopate(spell_es(count))} millones") + tail


def apocopate(number: str) -> str:
    """The form of a Spanish number before a masculine noun."""
    if number.endswith("veintiuno"):
        return number[: -len("uno")] + "ún"
    return number[:-1] if number.endswith("uno") else number


def digits_es(text: str) -> str:
    """Spells the digits of a text one by one in Spanish."""
    return " ".join(_ONES_ES[int(c)] for c in text if c.isdigit())
