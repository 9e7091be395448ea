"""The words to say for a written Spanish word: numbers, dates, abbreviations, addresses."""

import re
from typing import Protocol

from examples.train_voice.numerals import apocopate, digits_es, roman, spell_es

_LETTERS = dict(
    zip(
        "ABCDEFGHIJKLMNÑOPQRSTUVWXYZ",
        "a be ce de e efe ge hache i jota ka ele eme ene eñe o pe cu erre ese te u uve "
        "uve_doble equis i_griega zeta".split(),
        strict=True,
    )
)
_ABBREVIATIONS = {
    "sr": "señor", "sra": "señora", "srta": "señorita", "dr": "doctor", "dra": "doctora",
    "ud": "usted", "uds": "ustedes", "vd": "usted", "d": "don", "dña": "doña", "av": "avenida",
    "avda": "avenida", "c/": "calle", "pza": "plaza", "etc": "etcétera", "aprox":
    "aproximadamente", "tel": "teléfono", "pág": "página", "núm": "número", "n.º": "número",
    "nº": "número", "p.ej": "por ejemplo", "ee.uu": "Estados Unidos", "máx": "máximo",
    "mín": "mínimo", "min": "minutos", "izq": "izquierda", "dpto": "departamento",
}  # fmt: skip
_UNITS = {
    "km": "kilómetros", "m": "metros", "cm": "centímetros", "kg": "kilos", "g": "gramos",
    "l": "litros", "ml": "mililitros", "km/h": "kilómetros por hora", "°C": "grados", "º": "",
    "°": "grados", "%": "por ciento", "€": "euros", "$": "dólares", "GB": "gigas", "h": "horas",
    "MB": "megas", "min": "minutos",
}  # fmt: skip
_FEMININE = {
    "horas", "personas", "veces", "semanas", "páginas", "libras", "habitaciones", "mesas",
    "noches", "entradas", "opciones", "llamadas", "cosas", "preguntas", "toneladas",
}  # fmt: skip
_ADDRESS = {"@": "arroba", ".": "punto", "-": "guion", "_": "guion bajo", "/": "barra"}
_READ_AS_WORDS = {"ONU", "OTAN", "OVNI", "SIDA", "OK", "UNESCO", "UNICEF", "NASA", "PIN", "FIFA"}
_NUMBER = r"\d{1,3}(?:\.\d{3})+|\d+"
_MONTH = re.compile(
    r"enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre"
)
_MONTHS = _MONTH.pattern.split("|")


class _Word(Protocol):
    """A written word without its punctuation, between its neighbours."""

    @property
    def core(self) -> str: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def dot(self) -> bool: ...


def read(word: _Word) -> str:
    """Words for a word; empty if it is said as it is written."""
    core = word.core
    if core in ("&", "+"):
        return "y" if core == "&" else "más"
    for rule in (_address, _time, _date, _money, _telephone, _number, _abbreviation):
        said = rule(word)
        if said:
            return said
    if re.search(r"[—–/]|\w-\w|…", core):
        pieces = re.sub(r"([—–…])", r" \1 ", re.sub(r"(?<=\w)-(?=\w)|/", " ", core)).split()
        return " ".join(_Spoken.of(piece) for piece in pieces)
    return ""


class _Spoken:
    """A part of a written word."""

    def __init__(self, core: str) -> None:
        self.core, self.before, self.after, self.dot = core, "", "", False

    @classmethod
    def of(cls, text: str) -> str:
        """Words for the part."""
        return text if text in "—–…" else read(cls(text)) or text


def _address(word: _Word) -> str:
    core = word.core
    if match := re.fullmatch(r"([\w-]+)\.(pdf|docx|xlsx|txt|csv|zip|jpg|png|json)", core):
        name = re.sub(r"[-_]", " ", match[1])
        parts = [_number(_Spoken(p)) or p for p in re.findall(r"[^\W\d]+|\d+", name)]
        return " ".join([*parts, "punto", _spelled(match[2])])
    url = re.fullmatch(r"(?:https?://)?((?:[\w-]+\.)+(?:com|org|net|es|mx|edu|io))(/\S*)?", core)
    if not re.fullmatch(r"[\w.+-]+@[\w-]+(\.[\w-]+)+", core) and not url:
        return ""
    text = url[1] + (url[2] or "").rstrip("/") if url else core
    said: list[str] = []
    for piece in re.findall(r"[^\W\d_]+|\d+|[^\w]|_", text):
        if piece.isdigit():
            said.append(spell_es(int(piece)) if len(piece) < 3 else digits_es(piece))
        elif piece == "www":
            said.append("triple uve doble")
        elif piece.isalpha():
            said.append(piece if len(piece) > 2 or piece in ("es", "mi") else _spelled(piece))
        else:
            said.append(_ADDRESS.get(piece, ""))
    return " ".join(filter(None, said))


def _spelled(text: str) -> str:
    return " ".join(_LETTERS.get(c.upper(), c).replace("_", " ") for c in text)


def _time(word: _Word) -> str:
    match = re.fullmatch(r"(\d{1,2}):([0-5]\d)", word.core)
    if not match:
        return ""
    hour = re.sub("un[oó]$|ún$", "una", spell_es(int(match[1])))
    minute = int(match[2])
    special = {0: "en punto", 15: "y cuarto", 30: "y media"}
    return f"{hour} {special.get(minute, '') if int(match[1]) < 13 else ''}".rstrip() + (
        "" if minute in special and int(match[1]) < 13 else f" {spell_es(minute)}"
    )


def _date(word: _Word) -> str:
    match = re.fullmatch(r"(\d{1,2})/(\d{1,2})(?:/(\d{4}))?", word.core)
    if match and 1 <= int(match[2]) <= 12 and int(match[1]) <= 31:
        said = f"{spell_es(int(match[1]))} de {_MONTHS[int(match[2]) - 1]}"
        return said + (f" de {spell_es(int(match[3]))}" if match[3] else "")
    return ""


def _money(word: _Word) -> str:
    mark = r"([€$])"
    number = rf"({_NUMBER})(?:,(\d\d))?"
    match = re.fullmatch(number + mark, word.core)
    if match:
        whole, cents, sign = match.groups()
    elif match := re.fullmatch(mark + number, word.core):
        sign, whole, cents = match.groups()
    elif word.after in ("€", "$") and (match := re.fullmatch(number, word.core)):
        whole, cents = match.groups()
        return _amount(whole, cents, "")
    else:
        return ""
    return _amount(whole, cents, _UNITS[sign])


def _amount(whole: str, cents: str | None, unit: str) -> str:
    n = int(whole.replace(".", ""))
    one = unit[:-1] if unit == "euros" else "dólar"
    said = apocopate(spell_es(n))
    if unit:
        said += f" {one if n == 1 else unit}"
    if cents and int(cents):
        said += f" con {spell_es(int(cents))}"
    return said


def _telephone(word: _Word) -> str:
    core = word.core
    if re.fullmatch(r"\+?\d{2,3}(-\d{2,4}){2,}", core) or re.fullmatch(r"\d{5,}", core):
        return ", ".join(digits_es(group) for group in re.findall(r"\d+", core))
    if re.fullmatch(r"\+\d{1,3}", core) and word.after[:1].isdigit():
        return f"más {digits_es(core)}"
    return ""


def _number(word: _Word) -> str:
    core = word.core
    match = re.fullmatch(rf"([-−+]?)({_NUMBER})(?:,(\d+))?(%|°C|°|[A-Za-z]+(?:/h)?)?", core)
    if match and (not match[4] or match[4] in _UNITS):
        sign, whole, decimals, unit = match.groups()
        plain = whole.replace(".", "")
        if len(plain) > 1 and plain[0] == "0":
            said = digits_es(plain)
        else:
            said = spell_es(int(plain))
            if word.after.lower() in _FEMININE:
                said = re.sub("uno$", "una", said).replace("cientos", "cientas")
            elif word.after and not unit and not _follows_number(word.after):
                said = apocopate(said)
        if decimals:
            small = decimals[0] == "0"
            said += f" coma {digits_es(decimals) if small else spell_es(int(decimals))}"
        said = {"-": "menos ", "−": "menos ", "+": "más "}.get(sign, "") + said
        return f"{said} {_UNITS[unit]}" if unit else said
    if match := re.fullmatch(r"(\d{1,2})\.?([ºª])", core):
        names = "primer segund tercer cuart quint sext séptim octav noven décim".split()
        n = int(match[1])
        return names[n - 1] + ("o" if match[2] == "º" else "a") if 0 < n < 11 else spell_es(n)
    if core in _UNITS and re.fullmatch(rf"[-−]?(?:{_NUMBER})(?:,\d+)?", word.before):
        return _UNITS[core]
    if match := re.fullmatch(r"(\d+)-(\d+)", core):
        return f"{spell_es(int(match[1]))} a {spell_es(int(match[2]))}"
    return ""


def _follows_number(word: str) -> bool:
    return word.lower() in ("de", "y", "o", "a", "por", "en", "%", "con", "que", "es", "se", "más")


def _abbreviation(word: _Word) -> str:
    core, key = word.core, word.core.lower()
    if key in _ABBREVIATIONS and (word.dot or "." in key or key in ("c/", "nº")):
        return _ABBREVIATIONS[key]
    if re.fullmatch(r"[ap]\.?\s?m", key) and word.before[-1:].isdigit():
        return _spelled(key.replace(".", ""))
    if core == "EE" and word.dot and word.after == "UU":
        return "Estados"
    if core == "UU" and word.before == "EE":
        return "Unidos"
    value = roman(core) if len(core) > 1 or word.before.lower() == "siglo" else 0
    if value and value < 40 and (word.before[:1].isupper() or word.before.lower() == "siglo"):
        return spell_es(value)
    if re.fullmatch(r"[A-ZÑ]{2,6}", core):
        return core.capitalize() if core in _READ_AS_WORDS else _spelled(core)
    if re.fullmatch(r"[B-DF-NP-TV-XZÑ]", core):
        return _spelled(core)
    if re.search(r"\d", core) and re.fullmatch(r"[A-Z]+\d+|\d+[A-Z]+", core):
        pieces = re.findall(r"[A-Z]+|\d+", core)
        return " ".join(spell_es(int(p)) if p.isdigit() else _spelled(p) for p in pieces)
    return ""
