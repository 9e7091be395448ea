"""Settings of a server."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megakernel_tts import Pronunciations, Voice
from megakernel_tts.server.keys import ApiKey, read_api_keys


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        api_keys: Keys of which a request must have one; without any, every request is served.
        allowed_hosts: Names of hosts for which requests are served, in addition to addresses and to
            names of this machine; None for all names.
        voices: Cloned voices by name, for a Base model.
        voice_dir: A folder that keeps uploaded voices; None to keep them in memory.
        uploads: Whether clients may upload voices, which is of no use where the next request may
            reach another server.
        pronunciations: Respellings of words in all requests.
        max_queue: Streams that may be open in addition to the engine's slots.
        queue_timeout_s: Seconds from the end (or a flush) of a request's text to its first audio,
            after which the request is refused.
        max_connections: Connections that may be open at each address, WebSockets included.
        drain_timeout_s: Seconds that open streams have to finish after a stop signal.
    """

    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: Collection[str] | None = None
    voices: Mapping[str, Voice] = field(default_factory=dict[str, Voice])
    voice_dir: Path | None = None
    uploads: bool = True
    pronunciations: Pronunciations = field(default_factory=Pronunciations)
    max_queue: int = 32
    queue_timeout_s: float = 5.0
    max_connections: int = 1000
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.voice_dir is not None and not self.voice_dir.is_dir():
            raise ValueError(f"voice_dir {self.voice_dir} is not a folder; create it.")
        if self.max_queue < 0:
            raise ValueError(f"max_queue is {self.max_queue}; it must be 0 or more.")
        if self.max_connections < 1:
            raise ValueError(f"max_connections is {self.max_connections}; it must be 1 or more.")
        if not self.queue_timeout_s > 0:
            raise ValueError(f"queue_timeout_s is {self.queue_timeout_s}; it must be above 0.")


def check_access(reached: str | None, *, keys: bool, no_auth: bool) -> None:
    """Checks that clients need keys, or that it was said that they need none.

    Args:
        reached: What other machines reach, such as a host; None if they do not reach the server.
        keys: Whether there are keys (the option `api-key-file`).
        no_auth: Whether clients need none (the option `no-auth`).

    Raises:
        ValueError: Both options contradict each other, or one of them is missing.
    """
    if keys and no_auth:
        raise ValueError("api-key-file and no-auth contradict each other; give one of them")
    if reached is not None and not (keys or no_auth):
        raise ValueError(
            f"other machines reach {reached}; give api-key-file with keys, or no-auth if all of "
            "them may use this server"
        )


def read_settings(
    *,
    api_key_file: Path | None,
    voice: Iterable[str],
    voice_dir: Path | None,
    pronunciations: Path | None,
    max_queue: int,
    queue_timeout: float,
    max_connections: int = ServerSettings.max_connections,
    allowed_hosts: Collection[str] | None = None,
) -> ServerSettings:
    """Makes settings from options of these names, and reads the files that they name.

    Args:
        api_key_file: A TOML file with the keys of clients; None to serve every request.
        voice: Cloned voices, as `NAME=FILE`.
        voice_dir: As in `ServerSettings`.
        pronunciations: A file of `Pronunciations`, or None.
        max_queue: As in `ServerSettings`.
        queue_timeout: In seconds.
        max_connections: As in `ServerSettings`.
        allowed_hosts: As in `ServerSettings`.

    Raises:
        ValueError: An option or a file is invalid.
        OSError: A file cannot be read.
    """
    return ServerSettings(
        api_keys=read_api_keys(api_key_file) if api_key_file else (),
        allowed_hosts=allowed_hosts,
        voices=dict(map(_read_voice, voice)),
        voice_dir=voice_dir,
        pronunciations=Pronunciations.load(pronunciations) if pronunciations else Pronunciations(),
        max_queue=max_queue,
        queue_timeout_s=queue_timeout,
        max_connections=max_connections,
    )


def _read_voice(option: str) -> tuple[str, Voice]:
    name, separator, file = option.partition("=")
    if not (name.strip() and separator and file):
        raise ValueError(f"voice {option!r} must be NAME=FILE")
    return name, Voice.load(file)
