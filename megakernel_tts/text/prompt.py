"""Builds prompts: the talker's input vectors of a voice, an instruction and a text.

The vector of a position is the sum of a text vector and a codec vector. Two layouts of the text are
supported, as in the official package. In `full` the whole text is part of the prompt. In
`streaming` the prompt contains the first token, and each frame adds the next one. Prompts are
built on the host: row look-ups and additions take less time than kernel launches.
"""

import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.checks import MAX_POSITIONS, check_text
from megakernel_tts.errors import InstructionError, TextError, VoiceError
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Embeddings
from megakernel_tts.text.text_embedding import TextEmbedding
from megakernel_tts.text.tokenizer import TextTokenizer
from megakernel_tts.voice import Voice

PromptLayout = Literal["full", "streaming"]


@dataclass(frozen=True)
class Prefix:
    """The part of a prompt that does not depend on the text.

    Attributes:
        vectors: [positions, hidden]: instruction, role, language and speaker, up to codec_pad.
        reference_text: [tokens, hidden], text vectors of the transcript of an in-context reference.
        reference_codes: [1 + frames, hidden], codec vectors of codec_bos and of the reference.
    """

    vectors: Tensor
    reference_text: Tensor | None = None
    reference_codes: Tensor | None = None


@dataclass(frozen=True)
class Prompt:
    """The prompt of a segment.

    Attributes:
        prefill: [positions, hidden], the talker's input vectors.
        num_common: Number of leading positions that are the same for every text.
        leading_text: [tokens, hidden], text vectors to feed before those of the text: the rest of a
            transcript that is longer than its recording.
        num_tokens: Number of the text's tokens in the prompt; the others are fed frame by frame.
        text_start: Position of the text's first token. The other tokens follow it, in the prompt or
            in the frames after it.
        text_complete: Whether the prompt contains the end of the text; only padding follows then.
    """

    prefill: Tensor
    num_common: int
    leading_text: Tensor
    num_tokens: int
    text_start: int
    text_complete: bool

    @property
    def num_positions(self) -> int:
        """Positions of the prompt."""
        return self.prefill.shape[0]  # `len` of a tensor is a function in Python


class PromptBuilder:
    """Builds prompts from a model's embeddings. All returned vectors are in host memory.

    Attributes:
        config: Of the model.
        device: Of the codec embeddings.
        pad: [1, hidden], the text vector of tts_pad.
        eos: [1, hidden], the text vector of tts_eos, which ends a text.
    """

    def __init__(
        self, embeddings: Embeddings, config: ModelConfig, tokenizer: TextTokenizer
    ) -> None:
        """Creates the text embedding (see `TextEmbedding`).

        Args:
            embeddings: The text table may be on any device; the codec tables on the model's.
            config: Of the model.
            tokenizer: Of the model.
        """
        self.config = config
        self.device = embeddings.codec.device
        self._embeddings = embeddings
        self._codec_table = embeddings.codec.cpu()
        self._text_embedding = TextEmbedding(embeddings)
        proxy = weakref.proxy(self)  # avoids a reference cycle with the caches
        self._cached_prefix = lru_cache(maxsize=64)(partial(PromptBuilder._prefix, proxy))
        self._embed_recording = lru_cache(maxsize=32)(
            partial(PromptBuilder._sum_code_embeddings, proxy)
        )
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n")
        text, control = config.text, config.talker.control
        self._codec_bos = self._embed_codec(control.bos)
        self._codec_pad = self._embed_codec(control.pad)
        with torch.inference_mode():
            self.pad, self._bos, self.eos = self.embed_text([text.pad, text.bos, text.eos]).split(1)
            self._text_end = torch.cat([self.eos + self._codec_pad, self.pad + self._codec_bos])

    def embed_text(self, ids: list[int]) -> Tensor:
        """Text vectors of tokens, [tokens, hidden]."""
        return self._text_embedding(ids)

    def _embed_codec(self, *ids: int) -> Tensor:
        return self._codec_table[torch.tensor(ids)]

    def _sum_code_embeddings(self, codes: bytes) -> Tensor:
        """Embeds a recording's frames. Bytes are hashable, so that the result can be cached.

        Args:
            codes: The content of an int64 array [frames, num_groups].

        Returns:
            [frames, hidden].
        """
        frames = np.frombuffer(codes, np.int64).reshape(-1, self.config.talker.num_groups)
        return self._embeddings.embed_frames(torch.tensor(frames, device=self.device)).cpu()

    def prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        """Builds the part of a prompt before the text.

        Args:
            voice: CustomVoice: a speaker's name, or None for no speaker. Base: a cloned voice.
                VoiceDesign: None.
            language: A language of the model, or `auto`.
            instruct: How to speak; for VoiceDesign a description of the voice.

        Raises:
            VoiceError: The model does not have this voice or language.
            InstructionError: It takes no instruction, or needs one; or the instruction is too long,
                or not Unicode text.
        """
        arguments = (voice, language, instruct)
        if all(isinstance(argument, str | None) for argument in arguments):
            return self._cached_prefix(*arguments)
        return self._prefix(*arguments)  # not cached: the tensors of a cloned voice may change

    @torch.inference_mode()
    def check(self, voice: str | Voice | None, language: str, instruct: str | None) -> None:
        """Checks the arguments of `prefix`, without embedding a recording.

        Raises:
            VoiceError: See `prefix`.
            InstructionError: See `prefix`.
        """
        self._check_size(self._voice_vectors(voice, language, instruct), voice)

    @torch.inference_mode()
    def _prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        vectors = self._voice_vectors(voice, language, instruct)
        transcript = self._check_size(vectors, voice)
        if not isinstance(voice, Voice) or voice.codes is None:
            return Prefix(vectors)
        recording = self._embed_recording(voice.codes.tobytes())
        return Prefix(
            vectors,
            reference_text=self.embed_text(transcript),
            reference_codes=torch.cat([self._codec_bos, recording]),
        )

    def _voice_vectors(
        self, voice: str | Voice | None, language: str, instruct: str | None
    ) -> Tensor:
        """The vectors of `Prefix`."""
        config, text = self.config, self.config.text
        control = config.talker.control
        speaker, speaker_vector = self._speaker(voice)
        self._check_instruct(instruct)
        language_id = self._language_id(language, speaker)
        control_ids = (
            [control.nothink, control.think_bos, control.think_eos]
            if language_id is None
            else [control.think, control.think_bos, language_id, control.think_eos]
        )
        codec = [self._embed_codec(*control_ids)]
        if speaker_vector is not None:
            codec.append(speaker_vector[None])
        codec.append(self._codec_pad)
        codec_vectors = torch.cat(codec)
        text_vectors = torch.cat([self.pad.expand(len(codec_vectors) - 1, -1), self._bos])
        role = [text.im_start, text.assistant, *self._newline]
        sections = [self.embed_text(role), text_vectors + codec_vectors]
        if instruct and instruct.strip():
            user = self._tokenizer.encode(f"user\n{instruct.strip()}")
            if len(user) >= MAX_POSITIONS:
                raise InstructionError(
                    f"The instruction has {len(user):,} tokens, and a prompt has at most "
                    f"{MAX_POSITIONS:,} positions; use a shorter one."
                )
            instruction = [text.im_start, *user, text.im_end, *self._newline]
            sections.insert(0, self.embed_text(instruction))
        return torch.cat(sections)

    def _check_size(self, vectors: Tensor, voice: str | Voice | None) -> list[int]:
        """Checks that a position is left for text; gives the tokens of the voice's transcript."""
        num_positions, transcript = len(vectors) + len(self._codec_bos), list[int]()
        if isinstance(voice, Voice) and voice.codes is not None and voice.text is not None:
            transcript = self._tokenizer.encode(voice.text.strip())
            if len(transcript) >= MAX_POSITIONS:
                raise VoiceError(
                    f"The voice's transcript has {len(transcript):,} tokens, and a prompt has at "
                    f"most {MAX_POSITIONS:,} positions; clone the voice from a shorter recording."
                )
            num_positions += len(voice.codes)
        if num_positions >= MAX_POSITIONS:  # a text needs at least one more
            size = f"takes {num_positions:,} positions, and a prompt with text has at most "
            if isinstance(voice, Voice):
                raise VoiceError(f"The voice {size}{MAX_POSITIONS:,}; use a shorter recording.")
            raise InstructionError(f"The instruction {size}{MAX_POSITIONS:,}; use a shorter one.")
        return transcript

    def _speaker(self, voice: str | Voice | None) -> tuple[str | None, Tensor | None]:
        """The speaker's name and the vector [hidden] of the speaker position, if any."""
        kind = self.config.kind
        if kind == "base":
            return None, self._cloned_speaker(voice)
        if isinstance(voice, Voice):
            raise VoiceError(
                f"A cloned voice needs a Base model, and this one is {kind}; "
                f"{self._voice_choices()}"
            )
        if kind == "voice_design":
            if voice is not None:
                raise VoiceError(
                    f"A VoiceDesign model has no named voices (found {voice!r}); describe the "
                    "voice with instruct='...'."
                )
            return None, None
        if voice is None:
            return None, None
        if not isinstance(voice, str):
            raise VoiceError(
                f"voice is of type {type(voice).__name__}; it must be a name or a Voice."
            )
        name, speakers = voice.strip().lower(), self.config.talker.speakers
        if name not in speakers:
            raise VoiceError(f"There is no voice {voice!r}; {self._voice_choices()}")
        return name, self._embed_codec(speakers[name])[0]

    def _cloned_speaker(self, voice: str | Voice | None) -> Tensor:
        """The x-vector of a cloned voice."""
        hidden = self.config.talker.stack.hidden_size
        if not isinstance(voice, Voice):
            found = "no voice was given" if voice is None else f"found {voice!r}"
            raise VoiceError(
                f"A Base model needs a cloned voice ({found}); create one with "
                "TTS.clone('recording.wav') or load one with Voice.load('voice.safetensors')."
            )
        if len(voice.x_vector) != hidden:
            raise VoiceError(
                f"The voice's x-vector has {len(voice.x_vector)} values and this model needs "
                f"{hidden}; clone the voice again with this model."
            )
        if voice.codes is not None and not self._codes_fit(voice.codes):
            raise VoiceError(
                "The voice's codes are not those of this model's codec; clone the voice again."
            )
        return torch.tensor(voice.x_vector).to(self._codec_table)

    def _codes_fit(self, codes: NDArray[np.int64]) -> bool:
        groups, vocab = self.config.talker.num_groups, self.config.predictor.vocab_size
        return codes.shape[1] == groups and 0 <= int(codes.min()) and int(codes.max()) < vocab

    def _voice_choices(self) -> str:
        if self.config.kind == "voice_design":
            return "describe the voice with instruct='...'."
        return "choose one of: " + ", ".join(self.config.talker.speakers) + "."

    def _check_instruct(self, instruct: str | None) -> None:
        if instruct is not None:
            try:
                check_text(instruct, "instruct")
            except TextError as error:
                raise InstructionError(str(error)) from None
        has_instruct = bool(instruct and instruct.strip())
        if has_instruct and not self.config.takes_instruct:
            raise InstructionError(
                "This model supports no instruction; 1.7B-CustomVoice and 1.7B-VoiceDesign do. "
                "Leave instruct out."
            )
        if not has_instruct and self.config.kind == "voice_design":
            raise InstructionError(
                "A VoiceDesign model needs instruct='...': a description of the voice."
            )

    def _language_id(self, language: str, speaker: str | None) -> int | None:
        """The language's id; None if the model detects the language."""
        talker = self.config.talker
        if not isinstance(language, str):
            raise VoiceError(f"language is {language!r}; it must be auto or a language's name.")
        name = language.strip().lower()
        dialect = talker.dialects.get(speaker) if speaker else None
        if dialect and name in ("auto", "chinese", dialect):
            return talker.languages[dialect]
        if name == "auto":
            return None
        if name not in talker.spoken_languages:
            raise VoiceError(
                f"There is no language {language!r}; choose auto or one of: "
                + ", ".join(talker.spoken_languages)
                + "."
            )
        return talker.languages[name]

    def build(
        self, prefix: Prefix, ids: list[int], layout: PromptLayout, *, text_ended: bool
    ) -> Prompt | None:
        """Builds the prompt of a text; called in inference mode.

        Args:
            prefix: From `prefix`.
            ids: The text's tokens so far, at least one.
            layout: `full` requires the whole text.
            text_ended: Whether the segment has all of its text.

        Returns:
            The prompt, or None if it needs more text.
        """
        if layout == "full":
            return self._full(prefix, ids) if text_ended else None
        if prefix.reference_codes is not None and prefix.reference_text is not None:
            return self._streaming_reference(prefix, ids, text_ended)
        prefill = torch.cat([prefix.vectors, self.embed_text(ids[:1]) + self._codec_bos])
        num_common = len(prefix.vectors)
        return Prompt(
            prefill,
            num_common,
            self.pad[:0],
            num_tokens=1,
            text_start=num_common,
            text_complete=False,
        )

    def _full(self, prefix: Prefix, ids: list[int]) -> Prompt:
        text, text_start, end = self.embed_text(ids), len(prefix.vectors), self._text_end
        if prefix.reference_codes is not None and prefix.reference_text is not None:
            text = torch.cat([prefix.reference_text, text])
            text_start += len(prefix.reference_text)
            end = torch.cat([end[:1], self.pad + prefix.reference_codes])
        prefill = torch.cat([prefix.vectors, text + self._codec_pad, end])
        return Prompt(
            prefill,
            text_start,
            self.pad[:0],
            num_tokens=len(ids),
            text_start=text_start,
            text_complete=True,
        )

    def _streaming_reference(
        self, prefix: Prefix, ids: list[int], text_ended: bool
    ) -> Prompt | None:
        """Adds transcript and text to the reference's codes; the remaining text is fed later."""
        codes, transcript = prefix.reference_codes, prefix.reference_text
        assert codes is not None and transcript is not None
        num_free = len(codes) - len(transcript)  # code positions without a transcript token
        if not text_ended and len(ids) < num_free:
            return None
        num_tokens = max(0, min(len(ids), num_free))
        text_complete = text_ended and num_free > len(ids)
        end = [self.eos] if text_complete else []
        text = torch.cat([transcript, self.embed_text(ids[:num_tokens]), *end])
        text_vectors = text[: len(codes)]
        padding = self.pad.expand(len(codes) - len(text_vectors), -1)
        prefill = torch.cat([prefix.vectors, torch.cat([text_vectors, padding]) + codes])
        text_start = len(prefix.vectors) + len(transcript)
        # With a long transcript the prompt has no position of the text.
        num_common = min(text_start, len(prefix.vectors) + len(codes), len(prefill) - 1)
        return Prompt(
            prefill,
            num_common,
            text[len(codes) :],
            num_tokens=num_tokens,
            text_start=text_start,
            text_complete=text_complete,
        )
