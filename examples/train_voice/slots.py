"""Random numbers, dates, addresses and names as they are written, for templates."""

import random
from collections.abc import Callable

from examples.train_voice.numerals import to_roman

_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_MONTHS_ES = (
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_DAYS_ES = "lunes martes miércoles jueves viernes sábado domingo".split()
_DOMAINS = "example.com example.org mail.com shop.net acme.io northwind.com bluesky.app".split()
_DOMAINS_ES = "ejemplo.com ejemplo.es correo.es tienda.com empresa.net".split()
_FILES = "report invoice notes budget summary photo backup readme agenda contract".split()
_TYPES = "pdf docx txt csv xlsx png jpg zip json".split()
_PAGES = "help pricing docs about contact blog faq support login status orders".split()
_UNITS = "km cm mm m kg g mg lb oz ft mph GB MB TB GHz kWh W ml L mi °C °F km/h".split()
_UNITS_ES = "km cm m kg g l ml km/h GB °C".split()
_CODES = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_RULERS = "Henry Louis Edward Charles George Elizabeth Richard James William Philip".split()
_STREETS = "Main Oak Maple Cedar Park Lake Hill Elm Washington Pine Church River Mill".split()
_ENDINGS = "St. Ave. Rd. Blvd. Street Avenue Road Lane Drive".split()


class Slots:
    """Values by their names in templates, in one language."""

    def __init__(self, rng: random.Random, language: str) -> None:
        self._rng, self._spanish = rng, language == "spanish"
        names = [n.removeprefix("slot_") for n in dir(self) if n.startswith("slot_")]
        self.makers: dict[str, Callable[[], str]] = {n: getattr(self, f"slot_{n}") for n in names}

    def _int(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def _grouped(self, n: int) -> str:
        return f"{n:,}".replace(",", ".") if self._spanish else f"{n:,}"

    def slot_n(self) -> str:
        """A count of things, more than one."""
        return str(self._int(2, self._rng.choice((9, 12, 30, 100))))

    def slot_hundreds(self) -> str:
        """A larger count."""
        n = self._int(100, self._rng.choice((999, 5000, 90_000, 1_000_000)))
        return self._grouped(n) if n > 999 else str(n)

    def slot_big(self) -> str:
        """A very large count."""
        return self._grouped(self._int(10_000, self._rng.choice((900_000, 9_000_000))))

    def slot_decimal(self) -> str:
        """A number with a fractional part."""
        text = f"{self._rng.uniform(0, 100):.{self._int(1, 2)}f}"
        return text.replace(".", ",") if self._spanish else text

    def slot_percent(self) -> str:
        """A percentage."""
        whole = self._rng.random() < 0.7
        text = str(self._int(1, 100)) if whole else f"{self._rng.uniform(0, 99):.1f}"
        return (text.replace(".", ",") if self._spanish else text) + "%"

    def slot_price(self) -> str:
        """An amount of money."""
        whole, cents = self._int(1, self._rng.choice((20, 99, 999, 4000))), self._int(1, 99)
        text = self._grouped(whole)
        if self._rng.random() < 0.5:
            text += f"{',' if self._spanish else '.'}{cents:02d}"
        if self._spanish:
            return f"{text} €" if self._rng.random() < 0.8 else f"${text}"
        return self._rng.choice("$$$$$$$$£€") + text

    def slot_fortune(self) -> str:
        """A large amount of money."""
        n = self._int(2, 90)
        if self._spanish:
            return f"{n} millones de euros"
        mark = self._rng.choice("$$$$£€")
        return self._rng.choice(
            (f"{mark}{n} million", f"{mark}{n / 10:.1f} billion", f"{mark}{n}M", f"{mark}{n}k")
        )

    def slot_large_price(self) -> str:
        """An amount of money of thousands to millions, in figures."""
        step = self._rng.choice((1, 100, 1000, 1000, 10_000))
        text = self._grouped(self._int(1, 999) * step + self._rng.choice((1000, 1000, 100_000)))
        return f"{text} €" if self._spanish else self._rng.choice("$$$$£€") + text

    def slot_clock(self) -> str:
        """A time of day."""
        hour, minute = self._int(1, 12), self._rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50, 55))
        if self._rng.random() < 0.3:
            minute = self._int(1, 59)
        if self._spanish:
            return f"{self._rng.choice((hour, hour, hour + 11))}:{minute:02d}"
        half = self._rng.choice(("AM", "PM", "a.m.", "p.m.", "am", "pm"))
        return self._rng.choice(
            (f"{hour}:{minute:02d}", f"{hour}:{minute:02d} {half}", f"{hour} {half}",
             f"{hour}:{minute:02d}{half[0].lower()}m", f"{hour}{half[0].lower()}m",
             f"{hour + 11}:{minute:02d}", f"{hour} o'clock")
        )  # fmt: skip

    def slot_weekday(self) -> str:
        """A day of the week."""
        return self._rng.choice(_DAYS_ES if self._spanish else _DAYS)

    def slot_month(self) -> str:
        """A month."""
        return self._rng.choice(_MONTHS_ES if self._spanish else _MONTHS)

    def slot_year(self) -> str:
        """A year."""
        return str(self._int(*self._rng.choice(((1950, 2035), (2000, 2030), (1500, 1949)))))

    def slot_decade(self) -> str:
        """A decade."""
        return f"{self._int(180, 202)}0s"

    def slot_date(self) -> str:
        """A day of the year."""
        day, number, year = self._int(1, 28), self._int(1, 12), self.slot_year()
        month = self.slot_month()
        if self._spanish:
            return self._rng.choice(
                (f"{day} de {month}", f"{day} de {month}", f"{day} de {month} de {year}",
                 f"{day}/{number}/{year}")
            )  # fmt: skip
        suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return self._rng.choice(
            (f"{month} {day}", f"{month} {day}, {year}", f"{month} {day}{suffix}",
             f"the {day}{suffix} of {month}", f"{month[:3]}. {day}" if month != "May" else "May 5",
             f"{number}/{day}/{year}", f"{self.slot_weekday()}, {month} {day}",
             f"{year}-{number:02d}-{day:02d}")
        )  # fmt: skip

    def slot_ordinal(self) -> str:
        """An ordinal number in figures."""
        n = self._int(1, self._rng.choice((10, 31, 120)))
        if self._spanish:
            return f"{n % 10 + 1}.º"
        suffix = "th" if 10 < n % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
        return f"{n}{suffix}"

    def slot_range(self) -> str:
        """A range of numbers."""
        low = self._int(1, 60)
        dash = "-" if self._spanish else self._rng.choice("-–")
        return f"{low}{dash}{low + self._int(1, 40)}"

    def slot_measure(self) -> str:
        """A quantity with a unit."""
        n = self._rng.choice((self._int(2, 20), self._int(2, 120), self._int(2, 900)))
        unit = self._rng.choice(_UNITS_ES if self._spanish else _UNITS)
        text = self.slot_decimal() if self._rng.random() < 0.2 else str(n)
        return f"{text}{self._rng.choice((' ', ' ', ''))}{unit}"

    def slot_volume(self) -> str:
        """A volume of a liquid."""
        n = self._int(1, 19) * self._rng.choice((5, 10, 25, 50))
        return f"{n}{self._rng.choice((' ', ' ', ''))}ml"

    def slot_degrees(self) -> str:
        """A temperature, often below zero."""
        number = f"{self._rng.choice(('', '-', '-'))}{self._int(1, 40)}"
        unit = "°C" if self._spanish else self._rng.choice(("°C", "°F"))
        return f"{number}{self._rng.choice((' ', ''))}{unit}"

    def slot_fraction(self) -> str:
        """A fraction."""
        return self._rng.choice("1/2 1/4 3/4 1/3 2/3 1/8 3/8 1/5".split())

    def slot_phone(self) -> str:
        """A telephone number."""
        a, b, c = self._int(200, 989), self._int(200, 999), self._int(0, 9999)
        if self._spanish:
            return f"{a}-{b}-{c % 1000:03d}"
        return self._rng.choice(
            (f"{a}-{b}-{c:04d}", f"({a}) {b}-{c:04d}", f"{b}-{c:04d}", f"1-800-{b}-{c:04d}")
        )

    def slot_digits(self) -> str:
        """A code of digits."""
        return "".join(str(self._int(0, 9)) for _ in range(self._rng.choice((4, 6, 7, 8))))

    def slot_code(self) -> str:
        """A code of letters and digits, such as a flight or an order."""
        first = "".join(self._rng.choices(_CODES, k=self._int(1, 3)))
        number = self._int(1, self._rng.choice((9, 99, 999, 9999)))
        return f"{first}{number}" if self._rng.random() < 0.7 else f"{first}-{number}"

    def slot_email(self) -> str:
        """An e-mail address; `{first}` and `{last}` are filled in by the templates."""
        joint = self._rng.choice((".", "_", "-", ""))
        number = str(self._int(1, 99)) if self._rng.random() < 0.3 else ""
        domains = _DOMAINS_ES if self._spanish else _DOMAINS
        box = self._rng.choice(("{user}" + joint + "{user}", "{user}", "info", "support", "sales"))
        return f"{box}{number}@{self._rng.choice(domains)}"

    def slot_url(self) -> str:
        """An address of a web page."""
        domain = self._rng.choice(_DOMAINS_ES if self._spanish else _DOMAINS)
        start = self._rng.choice(("", "", "www.", "https://", "https://www."))
        page = self._rng.choice(("", "", f"/{self._rng.choice(_PAGES)}"))
        return f"{start}{domain}{page}"

    def slot_file(self) -> str:
        """A file name."""
        number = self._rng.choice(("", "", "2", "_v3", "-2024"))
        return f"{self._rng.choice(_FILES)}{number}.{self._rng.choice(_TYPES)}"

    def slot_version(self) -> str:
        """A version of a program."""
        return f"{self._int(1, 20)}.{self._int(0, 30)}" + self._rng.choice(("", ".1", ".0", ".7"))

    def slot_roman(self) -> str:
        """A Roman numeral."""
        return to_roman(self._int(2, 20))

    def slot_ruler(self) -> str:
        """A ruler with a number."""
        return f"{self._rng.choice(_RULERS)} {to_roman(self._int(2, 16))}"

    def slot_street(self) -> str:
        """A street address."""
        return f"{self._int(1, 2500)} {self._rng.choice(_STREETS)} {self._rng.choice(_ENDINGS)}"

    def slot_sum(self) -> str:
        """A calculation."""
        a, b = self._int(2, 99), self._int(2, 99)
        return self._rng.choice((f"{a} + {b} = {a + b}", f"{a} plus {b} is {a + b}"))

    def slot_initials(self) -> str:
        """An initialism of random letters."""
        return "".join(self._rng.choices(_CODES + "AEIO", k=self._int(2, 4)))
