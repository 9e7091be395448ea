"""The service with an engine behind `megakernel-tts serve`; it needs no torch."""

import ssl
from contextlib import suppress
from typing import Any

from loguru import logger
from pipecat.services.settings import TTSSettings

from megakernel_tts import MissingExtraError, ModelInfo, check_speed
from pipecat_service.arguments import check_keywords, check_settings
from pipecat_service.connection import ServerConnection
from pipecat_service.errors import ServerError
from pipecat_service.remote_messages import model_info, request_fields
from pipecat_service.remote_session import RemoteSession
from pipecat_service.settings import MegakernelTTSSettings, SettingsCheck, default_settings
from pipecat_service.tts import SynthesizerTTSService


class MegakernelRemoteTTSService(SynthesizerTTSService):
    """Text-to-speech in a Pipecat pipeline with an engine behind `megakernel-tts serve`.

    It behaves as `MegakernelTTSService`. Each service has one WebSocket, on which each turn is a
    context. A lost connection fails the turn that is spoken, and the next turn connects again.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        settings: MegakernelTTSSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates a service, which connects while the pipeline is set up.

        Args:
            url: Address of the server: `http://host:port`, `https://host`, or the same with `ws` or
                `wss`. A path is that of a proxy before the server.
            api_key: A key of the server, if it needs one.
            ssl_context: For a server whose certificate is of an authority of one's own.
            settings: Initial settings; the default of each is the model's. `model` is the server's.
            **kwargs: For `TTSService`, such as `sample_rate` and `text_transforms`.

        Raises:
            TypeError: An argument is unknown or of another type, or the service sets it itself.
            ValueError: `url` is no such address, the settings name a model, or
                `text_aggregation_mode` is `TOKEN`.
        """
        check_keywords(kwargs, type(self), self.Settings)
        check_settings(settings, type(self), TTSSettings)
        chosen = default_settings(None)
        if settings is not None:
            chosen.apply_update(settings)
        if chosen.model is not None:
            raise ValueError(
                f"Settings.model is {chosen.model!r}; the server has one model, so leave it out."
            )
        synthesizer = RemoteSynthesizer(ServerConnection(url, api_key, ssl_context))
        super().__init__(synthesizer, chosen, **kwargs)


class RemoteSynthesizer:
    """Opens sessions of a server; see `Synthesizer`."""

    def __init__(self, connection: ServerConnection) -> None:
        """Sends no request yet.

        Args:
            connection: To the server; it is closed with the synthesizer.
        """
        self._connection = connection
        self._check: SettingsCheck | None = None  # as of the latest description of the server

    @property
    def aligned(self) -> bool:
        """See `Synthesizer`; False until a word was spoken."""
        return self._connection.aligned

    async def load(self, settings: MegakernelTTSSettings) -> None:
        """See `Synthesizer`. Without an answer, the request is repeated when a turn begins.

        Raises:
            ServerError: The server refuses the key, or is no such server.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        try:
            await self._connect(settings)
        except ServerError as error:
            if error.category.is_permanent:
                raise
            logger.warning(f"{error} The first turn tries again.")

    async def _connect(self, settings: MegakernelTTSSettings) -> None:
        """Connects to the server, and checks the settings for its present model and voices."""
        info, check = await self._describe()
        settings.model = info.name
        check.complete(settings)
        await self._connection.connect()

    async def _describe(self) -> tuple[ModelInfo, SettingsCheck]:
        """Requests the server's model and voices."""
        info, cloned = model_info(await self._connection.get_status(), self._connection.url)
        names = {name: name for name in cloned}
        self._check = SettingsCheck(info, names, _accept_voice, _check_speed)
        return info, self._check

    async def settings_check(self) -> SettingsCheck | None:
        """See `Synthesizer`; for the voices that the server has now, if it answers."""
        try:
            return (await self._describe())[1]
        except ServerError as error:
            logger.warning(f"{error} New settings are checked for the voices known before.")
            return self._check

    async def open(self, settings: MegakernelTTSSettings) -> RemoteSession:
        """See `Synthesizer`. A lost connection is opened again.

        Raises:
            ServerError: The server cannot be reached, or refuses the connection.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        if not self._connection.connected:
            await self._connect(settings)
        return self._connection.open_session(request_fields(settings))

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()


def _accept_voice(voice: object, language: str, instruct: str | None) -> None:
    """As `TTS.check_voice`: the server checks in a turn what the model's description omits."""


def _check_speed(speed: float) -> None:
    """As `megakernel_tts.check_speed`; the server has the extra, or refuses the turn."""
    with suppress(MissingExtraError):
        check_speed(speed)
