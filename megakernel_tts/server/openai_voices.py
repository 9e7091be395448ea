"""`/v1/audio/voices`: the list of voices, uploads and deletions, as in vLLM-Omni."""

import time

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.http import read_form
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.voice_library import UploadedVoice

MAX_RECORDING_BYTES = 10 << 20
MAX_FIELD_CHARACTERS = 4096


class VoiceEndpoints:
    """The endpoints, over the cloned voices of a server."""

    def __init__(self, streams: SpeechStreams) -> None:
        self._catalog = streams.catalog
        self._library = streams.library
        self._cloner = streams.cloner
        self._uploads = streams.settings.uploads

    def routes(self) -> list[Route]:
        """The routes below `/v1`."""
        return [
            Route("/audio/voices", self._list),
            Route("/audio/voices", self._upload, methods=["POST"]),
            Route("/audio/voices/{name}", self._delete, methods=["DELETE"]),
        ]

    async def _list(self, _: Request) -> Response:
        uploaded = [upload.describe() for upload in self._library.uploaded]
        return JSONResponse({"voices": self._catalog.voices, "uploaded_voices": uploaded})

    async def _upload(self, request: Request) -> Response:
        self._cloner.check()
        if not self._uploads:
            raise RequestError(
                "Other servers at this address would not have the voice; send the recording with "
                "each request (ref_audio), or have the servers started with the voice.",
                400,
                "uploads_unsupported",
            )
        form = await read_form(request, MAX_RECORDING_BYTES)
        try:
            recording, mime_type = await _recording(form)
        finally:
            await form.close()
        name, consent = _field(form, "name"), _field(form, "consent")
        for field, value in (("name", name), ("consent", consent)):
            if not value:
                raise RequestError(f"The form needs the field {field}.", parameter=field)
        self._library.check_name(name)
        text = _field(form, "ref_text") or None
        upload = UploadedVoice(
            name=name,
            voice=await self._cloner.clone(recording, text, parameter="audio_sample"),
            consent=consent,
            created_at=int(time.time()),
            file_size=len(recording),
            mime_type=mime_type,
            speaker_description=_field(form, "speaker_description") or None,
        )
        await self._library.add(upload)
        return JSONResponse({"success": True, "voice": upload.describe()})

    async def _delete(self, request: Request) -> Response:
        removed = await self._library.remove(request.path_params["name"])
        message = f"The voice {removed.name!r} was deleted."
        return JSONResponse({"success": True, "message": message})


async def _recording(form: FormData) -> tuple[bytes, str]:
    """The content and the MIME type of the uploaded file."""
    file = form.get("audio_sample")
    if not isinstance(file, UploadFile):
        raise RequestError(
            "The form needs the file audio_sample: a recording of the voice.",
            parameter="audio_sample",
        )
    return await file.read(), file.content_type or "application/octet-stream"


def _field(form: FormData, name: str) -> str:
    """A text field without surrounding white space; empty if it is missing."""
    value = form.get(name, "")
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not a file.", parameter=name)
    if len(value) > MAX_FIELD_CHARACTERS:
        raise RequestError(
            f"{name} has {len(value):,} characters; at most {MAX_FIELD_CHARACTERS:,} are allowed.",
            parameter=name,
        )
    return value.strip()
