"""Messages of Cartesia's WebSocket, as its clients send them."""

from typing import Any

_OUTPUT = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}


def cartesia_message(text: str, **fields: Any) -> dict[str, Any]:
    """Returns a message with a text.

    Args:
        text: The text.
        **fields: Further fields, such as `context_id`, which every message needs.
    """
    voice = {"mode": "id", "id": "alloy"}  # of OpenAI; the server maps it to a voice of the model
    base = {"model_id": "sonic-3", "transcript": text, "voice": voice, "output_format": _OUTPUT}
    return base | fields
