"""`TTS`, the main class of the public API: loads a model, speaks, streams, clones voices."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Generator, Mapping
from functools import partial

import torch

from megakernel_common.checks import check_type
from megakernel_common.devices import pick_device
from megakernel_common.process import check_torch, detect_forks
from megakernel_tts.audio import Recording, read_reference
from megakernel_tts.backends.select import pick_dtype
from megakernel_tts.checks import check_text
from megakernel_tts.description import MODEL_TYPES, describe
from megakernel_tts.errors import TextError, VoiceError
from megakernel_tts.info import ModelInfo, model_info
from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model import hub
from megakernel_tts.open_queue import OpenQueue
from megakernel_tts.request import Request, TextLayout
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import (
    MAX_BLOCKING_CHARACTERS,
    MAX_PUSH_CHARACTERS,
    AudioChunk,
    ChunkPolicy,
    Finish,
    Session,
)
from megakernel_tts.speech import Speech, collect, iterate_chunks, log_early_end, outcome
from megakernel_tts.text.prompt import PromptLayout
from megakernel_tts.text.splitter import SplitLimits
from megakernel_tts.text.text_queue import TextQueue
from megakernel_tts.voice import Voice
from megakernel_tts.warmup import warm_up

detect_forks()
_log = logging.getLogger("megakernel_tts")
_OPTIONAL_INT = (int, type(None))
# Chunks of `say`: sizes that grow with the speed would change samples of plain torch by one step.
_EQUAL_CHUNKS = ChunkPolicy(first=8, largest=8)
_SENTENCES = SplitLimits(sentence=1)  # live text in the full layout is spoken sentence by sentence


class TTS:
    """A loaded model and its engine. Use `TTS.load`; close it, or use it in a `with` block.

    Threads and tasks may share one TTS. As many streams as it has slots run together; others wait.
    """

    def __init__(self, loaded: LoadedModel, info: ModelInfo) -> None:
        self._loaded = loaded
        self._info = info
        self._open_queue = OpenQueue(loaded.engine.pending_open)
        self._warm = False

    describe = staticmethod(describe)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "demo",
        device: str = "auto",
        dtype: str = "auto",
        slots: int = 8,
        cache_positions: int | None = None,
        prefill_positions: int | None = None,
    ) -> "TTS":
        """Loads a model.

        Args:
            model: `demo`, a checkpoint's folder, or a hub id (`owner/name`, `owner/name@revision`).
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            dtype: `auto` (bfloat16 on a GPU, float32 on a CPU), `bfloat16` or `float32`.
            slots: Streams that can speak at once; further ones wait (`Session.slot_wait_s`).
            cache_positions: Positions of all streams together in the kernels' KV cache, at least
                2,048; by default 2,048 for each slot, or what fits into the GPU's memory. Streams
                wait while it is full. Plain torch has memory for all positions.
            prefill_positions: Positions of prompts between frames of other streams; 128 if None.

        Raises:
            CheckpointError: The model is missing or broken.
            ValueError: An argument is invalid, or memory cannot hold slots or KV cache.
            ForkedProcessError: This process was forked after torch had run in its parent.
            TypeError: An argument has another type.
        """
        check_type("model", model, MODEL_TYPES, "demo, a folder or a hub id")
        check_type("device", device, (str, torch.device), "auto, cpu, cuda or cuda:N")
        check_type("slots", slots, int, "a whole number")
        check_type("cache_positions", cache_positions, _OPTIONAL_INT, "a whole number or None")
        check_type("prefill_positions", prefill_positions, _OPTIONAL_INT, "a whole number or None")
        check_torch()
        torch_device = pick_device(device)
        torch_dtype = pick_dtype(dtype, torch_device)
        folder = hub.find_checkpoint(model)
        loaded = load_checkpoint(
            folder, torch_device, torch_dtype, slots, cache_positions, prefill_positions
        )
        info = model_info(loaded.config, model)
        _log.info("%s on %s through %s", model, torch_device, loaded.engine.backend.name)
        if info.note:
            _log.warning(info.note)
        return cls(loaded, info)

    @property
    def voices(self) -> Mapping[str, tuple[str, ...]]:
        """Named voices and the languages of each; empty for Base and VoiceDesign models."""
        return self._info.voices

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        return self._info

    @property
    def aligned(self) -> bool:
        """Whether word times come from attention (`calibrate`); otherwise they are estimates."""
        return self._loaded.engine.alignment is not None

    @property
    def sampling(self) -> Sampling:
        """The model's default sampling parameters."""
        return self._loaded.sampling

    @property
    def slots(self) -> int:
        """Number of streams that can speak at once."""
        return self._loaded.engine.backend.num_slots

    @property
    def running(self) -> bool:
        """Whether the engine can speak: it was not closed and has not failed."""
        return self._loaded.engine.running

    @property
    def frame_step_s(self) -> float:
        """Predicted seconds of a frame of the streams of the last step; 0 before one."""
        return self._loaded.engine.frame_step_s

    def say(
        self,
        text: str,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        *,
        speed: float = 1.0,
        pronunciations: Mapping[str, str] | None = None,
        retries: int = 0,
    ) -> Speech:
        """Synthesises a text and returns all of its speech.

        Args:
            text: Any length. Its tags are not spoken; see `Session.push_text`.
            voice: A named voice (None: the model's first), or a cloned voice for a Base model.
            language: One of the model's languages, or `auto`.
            instruct: Manner of speaking (1.7B-CustomVoice), or the voice (VoiceDesign).
            layout: Where the text goes in the prompt: `full` (also `auto`), or `streaming`.
            sampling: Sampling parameters; the model's if None.
            speed: From 0.5 to 2, at the same pitch.
            pronunciations: Respellings of words; see `Pronunciations`. `Word.text` stays the word
                as it is written.
            retries: How often a segment of the text that the guard stopped is spoken again, with
                the next seed.

        Raises:
            TextError: The text is empty, or not Unicode text.
            VoiceError: The model has no such voice or language.
            InstructionError: It takes no instruction, or needs one; or the instruction is too long,
                or not Unicode text.
            SpeedError: The speed is outside its range.
            MissingExtraError: The speed is not 1, and the extra `speed` is not installed.
            PronunciationError: An entry of the table is invalid.
            EngineBusyError: Too many sessions are open.
            EngineClosedError: The model was closed.
            ForkedProcessError: This process was forked after the model was loaded.
            SynthesisError: Synthesis failed.
        """
        style = voice, language, instruct, layout, sampling
        request = Request(*style, _EQUAL_CHUNKS, speed, pronunciations, retries)
        session = self._open_with_text(text, request)
        groups = self._loaded.config.talker.num_groups
        return collect(session, groups, self._loaded.engine.decoder.sample_rate)

    def stream(
        self,
        text: str,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        chunks: ChunkPolicy | None = None,
        *,
        speed: float = 1.0,
        pronunciations: Mapping[str, str] | None = None,
    ) -> Generator[AudioChunk, None, Finish]:
        """Synthesises a text and yields each chunk of audio as soon as it exists.

        Leaving the iteration stops the speech. The generator returns the `Finish`.

        Args:
            text: As in `say`.
            voice: As in `say`.
            language: As in `say`.
            instruct: As in `say`.
            layout: As in `say`.
            sampling: As in `say`.
            chunks: Sizes of the chunks.
            speed: As in `say`.
            pronunciations: As in `say`.

        Raises:
            MegakernelTTSError: As `say`; errors of the arguments are raised at the call.
        """
        style = voice, language, instruct, layout, sampling
        request = Request(*style, chunks, speed, pronunciations)
        return iterate_chunks(self._open_with_text(text, request))

    async def astream(
        self,
        text: str,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        chunks: ChunkPolicy | None = None,
        *,
        speed: float = 1.0,
        pronunciations: Mapping[str, str] | None = None,
    ) -> AsyncIterator[AudioChunk]:
        """As `stream`, for asyncio; see `aopen`."""
        # Short texts stay on this thread: a burst of threads delays the event loop by far more.
        style = voice, language, instruct, layout, sampling, chunks
        session = await self.aopen(*style, speed=speed, pronunciations=pronunciations, text=text)
        with session:
            async for event in session:
                if isinstance(event, AudioChunk):
                    yield event
        log_early_end(outcome(session))

    def open(
        self,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        chunks: ChunkPolicy | None = None,
        *,
        speed: float = 1.0,
        pronunciations: Mapping[str, str] | None = None,
        text: str | None = None,
        priority: int = 0,
    ) -> Session:
        """Opens a session for text that is still being written, or for a whole text.

        Args:
            voice: As in `say`.
            language: As in `say`.
            instruct: As in `say`.
            layout: `streaming` (also `auto`) speaks from the first word on, one token per frame;
                `full` speaks sentence by sentence. With a cloned voice that has a transcript,
                `streaming` waits for as many tokens as the recording has frames beyond it.
            sampling: As in `say`.
            chunks: Sizes of the chunks.
            speed: As in `say`.
            pronunciations: As in `say`.
            text: A whole text, which is spoken as `say` speaks it; the session's text is ended.
            priority: Streams with a lower number get slots first. If none is free, they take the
                slot of one with a higher number, which continues later.

        Raises:
            TextError: `text` is empty, or not Unicode text.
            VoiceError: As for `say`.
            InstructionError: As for `say`.
            SpeedError: As for `say`.
            MissingExtraError: As for `say`.
            PronunciationError: As for `say`.
            EngineBusyError: Too many sessions are open.
            EngineClosedError: The model was closed.
            ForkedProcessError: This process was forked after the model was loaded.
        """
        style = voice, language, instruct, layout, sampling
        request = Request(*style, chunks, speed, pronunciations, priority=priority)
        if text is not None:
            return self._open_with_text(text, request)
        self._loaded.engine.check_process()
        request.check()
        limits = _SENTENCES if layout == "full" else None
        text_queue = request.text_queue(self._loaded.tokenizer, limits)
        return self._open(text_queue, request, "full" if layout == "full" else "streaming")

    async def aopen(
        self,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        chunks: ChunkPolicy | None = None,
        *,
        speed: float = 1.0,
        pronunciations: Mapping[str, str] | None = None,
        text: str | None = None,
        priority: int = 0,
    ) -> Session:
        """As `open`, for asyncio: long texts and cloned voices are prepared on another thread.

        Of the others a few are opened in each iteration of the event loop, so that it is not late.
        """
        open_session = partial(
            self.open,
            voice,
            language,
            instruct,
            layout=layout,
            sampling=sampling,
            chunks=chunks,
            speed=speed,
            pronunciations=pronunciations,
            text=text,
            priority=priority,
        )
        if len(text or "") > MAX_BLOCKING_CHARACTERS or isinstance(voice, Voice):
            return await asyncio.to_thread(open_session)
        return await self._open_queue.open(open_session)

    def check_voice(
        self,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
    ) -> None:
        """Checks that the model can speak in a voice, as `open` does, without opening a session.

        Args:
            voice: As in `say`.
            language: As in `say`.
            instruct: As in `say`.

        Raises:
            VoiceError: As for `say`, or the voice leaves no position for text.
            InstructionError: As for `say`.
        """
        builder = self._loaded.engine.prompt_builder
        builder.check(self._default_voice(voice), language, instruct)

    def _default_voice(self, voice: str | Voice | None) -> str | Voice | None:
        return next(iter(self.voices), None) if voice is None else voice

    def clone(self, wav: Recording, text: str | None = None) -> Voice:
        """Makes a voice from a recording, for a Base model.

        Args:
            wav: A path or open file that soundfile reads, or (samples, rate); at most 60 s.
            text: Its transcript; with it the voice is closer to the recording.

        Raises:
            VoiceError: The model does not clone voices.
            TextError: The transcript is not Unicode text.
            ForkedProcessError: This process was forked after the model was loaded.
            ReferenceAudioError: The recording is unreadable, silent, clipped, too long or short.
        """
        self._loaded.engine.check_process()
        cloner = self._loaded.cloner
        if cloner is None:
            raise VoiceError(
                f"This model is {self._info.kind}, and only Base models clone voices; load one, "
                "such as Qwen/Qwen3-TTS-12Hz-0.6B-Base."
            )
        if text is not None:
            check_text(text)
        wave = torch.from_numpy(read_reference(wav, cloner.sample_rate))
        x_vector = cloner.speaker.embed(wave).float().cpu()
        if text is None or not text.strip():
            return Voice(x_vector)
        return Voice(x_vector, cloner.encoder.encode(wave).cpu(), text.strip())

    def warmup(self) -> None:
        """Runs every path that a request can take, so that the first request has full speed.

        The paths are: every kind of voice and instruction, both layouts, sampled and greedy, one
        stream and all slots. The prefix cache then holds the prefixes of the named voices in
        language `auto`; those of other languages, instructions and clones are cached at first use.
        """
        warm_up(self, self._loaded)
        self._warm = True

    async def awarmup(self) -> None:
        """As `warmup`, for asyncio, on another thread."""
        await asyncio.to_thread(self.warmup)

    @property
    def warm(self) -> bool:
        """Whether `warmup` has run."""
        return self._warm

    def close(self) -> None:
        """Stops every stream and the engine; may be called twice."""
        self._loaded.engine.close()

    def __enter__(self) -> "TTS":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_with_text(self, text: str, request: Request) -> Session:
        """Opens a session for a whole text."""
        engine = self._loaded.engine
        engine.check_process()
        check_text(text)
        request.check()
        first, rest = text[:MAX_PUSH_CHARACTERS], text[MAX_PUSH_CHARACTERS:]
        with engine.pending_open():
            # The session opens with its text, so that the engine is woken once.
            text_queue = request.text_queue(self._loaded.tokenizer, None)
            text_queue.push(first, text_ended=not rest)
            if text_queue.exhausted or not text.strip():
                raise TextError(
                    "There is nothing to say: the text is empty, or has only whitespace or tags."
                )
            layout = "streaming" if request.layout == "streaming" else "full"
            session = self._open(text_queue, request, layout)
        if rest:
            session.push_text(rest)
            session.end()
        return session

    def _open(self, text_queue: TextQueue, request: Request, layout: PromptLayout) -> Session:
        engine, voice = self._loaded.engine, self._default_voice(request.voice)
        prefix = engine.prompt_builder.prefix(voice, request.language, request.instruct)
        return engine.open(
            text_queue,
            prefix,
            voice if isinstance(voice, Voice) else None,
            layout,
            (request.sampling or self.sampling).seeded(),
            request.chunks or ChunkPolicy(),
            max_retries=request.retries,
            speed=request.speed,
            priority=request.priority,
        )
