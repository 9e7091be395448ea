"""Checks of arguments at the public boundary."""

from megakernel_tts.errors import TextError


def check_text(text: str, name: str = "The text") -> None:
    """Refuses what is no Unicode text.

    Args:
        text: What was given.
        name: What the errors call it.

    Raises:
        TextError: No string, or one with a lone surrogate.
    """
    if not isinstance(text, str):
        raise TextError(f"{name} must be a string, found {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"{name} has the lone surrogate U+{ord(text[error.start]):04X}, half of a character, "
            f"as character {error.start}: it was decoded wrongly; give valid Unicode."
        ) from None


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises a TypeError with a sentence if an argument is of the wrong type.

    Args:
        name: Of the argument.
        value: What was given.
        kind: The type or types that are allowed; a bool is never one.
        expected: The allowed values in words, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be {expected}.")
