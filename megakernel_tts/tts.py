"""The public face: load a model, say something, stream it, clone a voice."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Generator, Mapping
from dataclasses import replace
from typing import Literal

import torch

from megakernel_tts.audio import Recording, read_reference
from megakernel_tts.backends.select import pick_device, pick_dtype
from megakernel_tts.checks import check_text, check_type
from megakernel_tts.errors import TextError, VoiceError
from megakernel_tts.info import ModelInfo, model_info
from megakernel_tts.loader import Loaded, load_checkpoint
from megakernel_tts.model import hub
from megakernel_tts.model.config import read_model_config
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import MAX_PUSH_CHARACTERS, AudioChunk, ChunkPolicy, Finish, Session
from megakernel_tts.speech import Speech, collect, iterate_chunks, log_early_end, outcome
from megakernel_tts.text.splitter import SplitLimits, Splitter
from megakernel_tts.text.text_queue import TextQueue
from megakernel_tts.voice import Voice

TextLayout = Literal["auto", "full", "streaming"]

_log = logging.getLogger("megakernel_tts")
_WARM = Sampling(seed=0, max_frames=16, guard=False)
_MODEL = (str, os.PathLike)
_SENTENCES = SplitLimits(sentence=1)  # live text in the full layout is spoken sentence by sentence


class TTS:
    """A loaded model and its engine. Use `TTS.load`; close it, or use it in a `with` block.

    Any number of threads and tasks may speak through one TTS at once; as many streams as it has
    slots run together, others wait.
    """

    def __init__(self, loaded: Loaded, info: ModelInfo) -> None:
        self._loaded = loaded
        self._info = info
        self._warm = False

    @staticmethod
    def describe(model: str | os.PathLike[str] = "demo") -> ModelInfo:
        """What a model can do, without loading its weights.

        Raises:
            CheckpointError: There is no such model, or its config is broken.
        """
        check_type("model", model, _MODEL, "demo, a folder or a hub id")
        return model_info(read_model_config(hub.find_checkpoint(model) / "config.json"), model)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "demo",
        device: str = "auto",
        dtype: str = "auto",
        slots: int = 8,
    ) -> "TTS":
        """Loads a model.

        Args:
            model: `demo`, a checkpoint's folder, or a hub id (`owner/name`, `owner/name@revision`).
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            dtype: `auto` (bfloat16 on a GPU, float32 on a CPU), `bfloat16` or `float32`.
            slots: How many streams can speak at once.

        Raises:
            CheckpointError: The model is missing or broken.
            ValueError: No such device or type, or more slots than memory can hold.
            TypeError: An argument is of another type.
        """
        check_type("model", model, _MODEL, "demo, a folder or a hub id")
        check_type("device", device, (str, torch.device), "auto, cpu, cuda or cuda:N")
        check_type("slots", slots, int, "a whole number")
        chosen = pick_device(device)
        number = pick_dtype(dtype, chosen)
        loaded = load_checkpoint(hub.find_checkpoint(model), chosen, number, slots)
        info = model_info(loaded.config, model)
        _log.info("%s on %s through %s", model, chosen, loaded.engine.backend.name)
        if info.note:
            _log.warning(info.note)
        return cls(loaded, info)

    @property
    def voices(self) -> Mapping[str, tuple[str, ...]]:
        """The named voices and the languages that each speaks; empty for Base and VoiceDesign."""
        return self._info.voices

    @property
    def info(self) -> ModelInfo:
        """What the model can do."""
        return self._info

    @property
    def aligned(self) -> bool:
        """Whether words' times come from the model's attention, which `calibrate` prepares.

        They are estimates otherwise.
        """
        return self._loaded.engine.alignment is not None

    @property
    def sampling(self) -> Sampling:
        """The model's own sampling parameters, used where none are given."""
        return self._loaded.sampling

    def say(
        self,
        text: str,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        *,
        retries: int = 0,
    ) -> Speech:
        """Says a text and gives back the whole of it.

        Args:
            text: Of any length.
            voice: A named voice (None takes the model's first), or a cloned one for a Base model.
            language: One of the model's, or `auto`.
            instruct: How to speak (1.7B-CustomVoice), or who (VoiceDesign).
            layout: Where the text goes: `full` (so does `auto`), or `streaming`.
            sampling: How codes are drawn.
            retries: How often a piece of the text that the guard stopped is said again, with the
                next seed.

        Raises:
            TextError: There is nothing to say, or it is no Unicode text.
            VoiceError: The model has no such voice or language, or takes no instruction.
            EngineBusyError: Too many streams wait already.
            EngineClosedError: The model was closed.
            SynthesisError: It failed on the way.
        """
        check_type("retries", retries, int, "a whole number")
        session = self._speak(text, voice, language, instruct, layout, sampling, None, retries)
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
    ) -> Generator[AudioChunk, None, Finish]:
        """Says a text and gives each chunk of audio as soon as it exists; arguments as `say`.

        Leaving the iteration stops the speech. How it ended is what the generator returns.
        """
        session = self._speak(text, voice, language, instruct, layout, sampling, chunks)
        return iterate_chunks(session)

    async def astream(
        self,
        text: str,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        layout: TextLayout = "auto",
        sampling: Sampling | None = None,
        chunks: ChunkPolicy | None = None,
    ) -> AsyncIterator[AudioChunk]:
        """As `stream`, for asyncio: nothing runs on the event loop but the hand-over."""
        session = await asyncio.to_thread(
            self._speak, text, voice, language, instruct, layout, sampling, chunks
        )
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
    ) -> Session:
        """Opens a session for text that is still being written.

        Args:
            voice: As in `say`.
            language: As in `say`.
            instruct: As in `say`.
            layout: `streaming` (so does `auto`) speaks from the first word on, a token a frame;
                `full` speaks sentence by sentence. With a cloned voice that has a transcript,
                `streaming` waits until as much text is known as stands beside the recording.
            sampling: As in `say`.
            chunks: How many frames leave together.

        Raises:
            VoiceError: The model has no such voice or language, or takes no instruction.
            EngineBusyError: Too many streams wait already.
            EngineClosedError: The model was closed.
        """
        sentences = _SENTENCES if layout == "full" else None
        live = "streaming" if layout == "auto" else layout
        script = TextQueue(self._loaded.tokenizer, Splitter(_name(language), sentences))
        return self._open(script, voice, language, instruct, live, sampling, chunks)

    def clone(self, wav: Recording, text: str | None = None) -> Voice:
        """Makes a voice from a recording, for a Base model.

        Args:
            wav: A path or open file that soundfile reads, or (samples, rate); at most 60 s.
            text: What is said in it; with it the voice is closer to the recording.

        Raises:
            VoiceError: This model clones no voices.
            TextError: What is said is no Unicode text.
            ReferenceAudioError: The recording is unreadable, silent, clipped, too long or short.
        """
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
        """Runs every path that a request can take, so that the first one is as fast as any.

        That is: every kind of voice and instruction, both layouts, drawn and greedy, alone and with
        every slot taken. What prompts of the named voices begin with (in language `auto`) is kept
        from then on; of other languages, instructions and cloned voices it is from their first use.
        """
        for name in self.voices:
            self.say("Hello.", name, sampling=replace(_WARM, max_frames=1))
        for voice, instruct in self._manners():
            for sampling in (_WARM, replace(_WARM, temperature=0.0, predictor_temperature=0.0)):
                for layout in ("full", "streaming"):
                    self.say("Hello.", voice, "auto", instruct, layout, sampling)
        voice, instruct = self._manners()[0]
        slots = self._loaded.engine.backend.num_slots
        sessions = [
            self._speak("Hello.", voice, "auto", instruct, "full", _WARM, None)
            for _ in range(slots)
        ]
        for session in sessions:
            list(session)
        self._warm = True

    async def awarmup(self) -> None:
        """As `warmup`, for asyncio: the event loop goes on."""
        await asyncio.to_thread(self.warmup)

    @property
    def warm(self) -> bool:
        """Whether it was warmed up."""
        return self._warm

    def _manners(self) -> list[tuple[Voice | None, str | None]]:
        """A voice and an instruction of each kind that the model takes."""
        talker = self._loaded.config.talker
        if self._info.kind == "base":
            x_vector = torch.zeros(talker.stack.hidden_size)
            codes = torch.zeros(2, talker.num_groups, dtype=torch.long)
            return [(Voice(x_vector), None), (Voice(x_vector, codes, "Hi."), None)]
        manners: list[tuple[Voice | None, str | None]] = []
        if self._info.kind == "custom_voice":
            manners.append((None, None))
        if self._info.takes_instruct:
            manners.append((None, "A calm voice."))
        return manners

    def close(self) -> None:
        """Stops every stream and the engine; may be called twice."""
        self._loaded.engine.close()

    def __enter__(self) -> "TTS":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _speak(
        self,
        text: str,
        voice: str | Voice | None,
        language: str,
        instruct: str | None,
        layout: TextLayout,
        sampling: Sampling | None,
        chunks: ChunkPolicy | None,
        retries: int = 0,
    ) -> Session:
        """A session for a text that is known."""
        check_text(text)
        if not text.strip():
            raise TextError("There is nothing to say: the text is empty or only whitespace.")
        known = "full" if layout == "auto" else layout
        portion, rest = text[:MAX_PUSH_CHARACTERS], text[MAX_PUSH_CHARACTERS:]
        with self._loaded.engine.pending_open():
            # With its text from the start: the engine need not be woken for every step of it.
            script = TextQueue(self._loaded.tokenizer, Splitter(_name(language)))
            script.push(portion, last=not rest)
            manner = voice, language, instruct, known
            session = self._open(script, *manner, sampling, chunks, retries)
        if rest:
            session.push_text(rest)
            session.end()
        return session

    def _open(
        self,
        script: TextQueue,
        voice: str | Voice | None,
        language: str,
        instruct: str | None,
        layout: Literal["full", "streaming"],
        sampling: Sampling | None,
        chunks: ChunkPolicy | None,
        retries: int = 0,
    ) -> Session:
        if layout not in ("full", "streaming"):
            raise ValueError(f"layout is {layout!r}; choose auto, full or streaming.")
        check_type("sampling", sampling, (Sampling, type(None)), "a Sampling or None")
        check_type("chunks", chunks, (ChunkPolicy, type(None)), "a ChunkPolicy or None")
        if voice is None:
            voice = next(iter(self.voices), None)
        engine = self._loaded.engine
        prefix = engine.prompt_builder.prefix(voice, language, instruct)
        return engine.open(
            script,
            prefix,
            voice if isinstance(voice, Voice) else None,
            layout,
            (sampling or self.sampling).seeded(),
            chunks or ChunkPolicy(),
            max_retries=retries,
        )


def _name(language: str) -> str:
    """As `Splitter` knows it; what is no name at all is refused with the voice."""
    return language.strip().lower() if isinstance(language, str) else "auto"
