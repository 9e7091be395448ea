"""Limits and checks of arguments at the public boundary."""

from megakernel_tts.errors import TextError

MAX_POSITIONS = 2048  # of a slot, for prompt and frames: about 160 s of speech


def check_text(text: object, name: str = "The text") -> None:
    """Checks that an argument is Unicode text.

    Args:
        text: The argument.
        name: Its name in the error message.

    Raises:
        TextError: It is not a string, or has a lone surrogate.
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
