"""Abbreviations, units and signs, and the words to say for them."""

SPELLED = "·"  # before a letter that is said by its name

MONTHS = {
    "jan": "January", "feb": "February", "mar": "March", "apr": "April", "may": "May",
    "jun": "June", "jul": "July", "aug": "August", "sept": "September", "oct": "October",
    "nov": "November", "dec": "December", "sep": "September",
}  # fmt: skip
WEEKDAYS = {
    "mon": "Monday", "tue": "Tuesday", "tues": "Tuesday", "wed": "Wednesday", "thu": "Thursday",
    "thurs": "Thursday", "fri": "Friday", "sat": "Saturday", "sun": "Sunday",
}  # fmt: skip
ABBREVIATIONS = {
    "mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor",
    "jr": "junior", "sr": "senior", "vs": "versus", "etc": "et cetera", "e.g": "for example",
    "i.e": "that is", "approx": "approximately", "dept": "department", "inc": "incorporated",
    "corp": "corporation", "ltd": "limited", "co": "company", "ave": "avenue",
    "blvd": "boulevard", "rd": "road", "apt": "apartment", "gov": "governor", "capt": "captain",
    "sgt": "sergeant", "lt": "lieutenant", "gen": "general", "sen": "senator",
    "rep": "representative", "rev": "reverend", "col": "colonel",
    "maj": "major", "mt": "mount", "ft": "feet", "est": "established",
    "fig": "figure", "vol": "volume", "pp": "pages", "p.s": f"{SPELLED}P {SPELLED}S",
    "ph.d": f"{SPELLED}P {SPELLED}H {SPELLED}D", "w/": "with", "tel": "telephone",
    "ext": "extension", "max": "maximum", "min": "minimum", "univ": "university",
    "hr": "hour", "hrs": "hours", "mins": "minutes", "sec": "seconds", "lbs": "pounds",
    "oz": "ounces", "tbsp": "tablespoons", "tsp": "teaspoons", "ctrl": "control",
    "phd": f"{SPELLED}P {SPELLED}H {SPELLED}D", "phds": f"{SPELLED}P {SPELLED}H {SPELLED}Ds",
}  # fmt: skip
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "sen", "sen"),
}
MAGNITUDES = {
    "k": "thousand", "K": "thousand", "m": "million", "M": "million", "bn": "billion",
    "B": "billion", "b": "billion", "tn": "trillion", "T": "trillion", "hundred": "hundred",
}  # fmt: skip
UNITS = {
    "km": ("kilometer", "kilometers"), "m": ("meter", "meters"),
    "cm": ("centimeter", "centimeters"), "mm": ("millimeter", "millimeters"),
    "kg": ("kilogram", "kilograms"), "g": ("gram", "grams"), "mg": ("milligram", "milligrams"),
    "l": ("liter", "liters"), "L": ("liter", "liters"), "ml": ("milliliter", "milliliters"),
    "mL": ("milliliter", "milliliters"), "lb": ("pound", "pounds"), "lbs": ("pound", "pounds"),
    "oz": ("ounce", "ounces"), "ft": ("foot", "feet"), "mi": ("mile", "miles"),
    "mph": ("mile per hour", "miles per hour"),
    "km/h": ("kilometer per hour", "kilometers per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"),
    "°C": ("degree Celsius", "degrees Celsius"),
    "°F": ("degree Fahrenheit", "degrees Fahrenheit"), "°": ("degree", "degrees"),
    "%": ("percent", "percent"), "kb": ("kilobyte", "kilobytes"), "KB": ("kilobyte", "kilobytes"),
    "MB": ("megabyte", "megabytes"), "GB": ("gigabyte", "gigabytes"),
    "TB": ("terabyte", "terabytes"), "Mbps": ("megabit per second", "megabits per second"),
    "GHz": ("gigahertz", "gigahertz"), "MHz": ("megahertz", "megahertz"),
    "Hz": ("hertz", "hertz"), "kHz": ("kilohertz", "kilohertz"), "W": ("watt", "watts"),
    "kW": ("kilowatt", "kilowatts"), "kWh": ("kilowatt hour", "kilowatt hours"),
    "V": ("volt", "volts"), "ms": ("millisecond", "milliseconds"), "s": ("second", "seconds"),
    "sec": ("second", "seconds"), "min": ("minute", "minutes"), "mins": ("minute", "minutes"),
    "h": ("hour", "hours"), "hr": ("hour", "hours"), "hrs": ("hour", "hours"),
    "kcal": ("kilocalorie", "kilocalories"), "cal": ("calorie", "calories"),
    "tbsp": ("tablespoon", "tablespoons"), "tsp": ("teaspoon", "teaspoons"),
    "yr": ("year", "years"), "yrs": ("year", "years"), "mo": ("month", "months"),
}  # fmt: skip
SYMBOLS = {
    "&": "and", "+": "plus", "=": "equals", "@": "at", "%": "percent", "#": "number",
    "<": "less than", ">": "greater than", "≤": "at most", "≥": "at least", "×": "times",
    "÷": "divided by", "→": "to", "§": "section", "$": "dollars", "°": "degrees",
    "w/": "with", "w/o": "without", "Wi-Fi": "why fie", "WiFi": "why fie", "wifi": "why fie",
    "url.": "dot", "url-": "dash", "url_": "underscore", "url/": "slash", "url+": "plus",
    "url?": "question mark", "url=": "equals", "url&": "and", "url#": "hash", "url:": "colon",
    "url@": "at", "url~": "tilde",
}  # fmt: skip
ACRONYMS = frozenset(
    "NASA NATO UNESCO UNICEF OPEC FIFA COVID AIDS LASER RADAR RAM PIN SIM GIF JPEG ZIP SWAT SCUBA "
    "OK HELLO NO YES STOP NOT THE AND ALL NEW NOW YOU ARE FOR BUT CAN MUST NEVER ALWAYS ONLY VERY "
    "IMPORTANT PLEASE WARNING NOTE TIP DO IS IT IN ON AT OR IF TO".split()
)


def letters(text: str) -> str:
    """The names of a text's letters, marked, as spoken words."""
    return " ".join(SPELLED + c.upper() for c in text if c.isalpha())
