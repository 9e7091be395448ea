"""Checks of arguments at the public boundary."""


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Checks the type of an argument.

    Args:
        name: Name of the argument.
        value: Its value.
        kind: The allowed type or types; a bool is never allowed.
        expected: The allowed values in words, for the message.

    Raises:
        TypeError: The value has another type.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be {expected}.")
