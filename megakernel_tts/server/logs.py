"""The server's log: one line per record, as text or as a JSON object."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        entry: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as time, level, message, and `name=value` for each of its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, and a traceback if there is an exception."""
        parts = [_time_of(record), record.levelname, record.getMessage()]
        parts += [f"{name}={_quoted(value)}" for name, value in _fields_of(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(log_format: LogFormat) -> None:
    """Has the handlers of the root logger write the server's log.

    Args:
        log_format: Format of a record.
    """
    formatter = JsonFormatter() if log_format == "json" else TextFormatter()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.getLogger("megakernel_tts.server").setLevel(logging.INFO)


def _time_of(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller has passed as `extra={"fields": ...}`."""
    return getattr(record, "fields", {})


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and " " not in text else json.dumps(text)
