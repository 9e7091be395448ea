"""Tokens and voice -> what the talker is fed: the prefill's vectors, and the text after it.

Every position holds a text-side and a codec-side vector, summed. Both text layouts of the release
are here: in `full` the whole text stands in the prefill; in `streaming` the first token does, and
each frame is given one more. All of it happens on the host, which looks rows up and adds them: to
tell a GPU what to do would take longer.
"""

import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megakernel_tts.checks import check_text
from megakernel_tts.errors import VoiceError
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Embeddings
from megakernel_tts.text.text_embedding import TextEmbedding
from megakernel_tts.text.tokenizer import TextTokenizer
from megakernel_tts.voice import Voice

Layout = Literal["full", "streaming"]


@dataclass(frozen=True)
class Prefix:
    """The part of a prompt that does not depend on the text.

    Attributes:
        vectors: [positions, hidden]: instruction, role, language and speaker, up to codec_pad.
        reference_text: Text vectors [n, hidden] of an in-context reference's transcript.
        reference_codes: Its codec vectors [1 + frames, hidden], codec_bos first.
    """

    vectors: Tensor
    reference_text: Tensor | None = None
    reference_codes: Tensor | None = None


@dataclass(frozen=True)
class Prompt:
    """What a stream starts with.

    Attributes:
        prefill: [positions, hidden].
        common: How many of them, at its beginning, are the same for every text.
        lead: Text vectors [n, hidden] to feed before the text: the rest of a long transcript.
        taken: How many of the text's tokens it holds; the others are fed frame by frame.
        text_start: The position of the text's first token. The others are at those that follow, in
            the prompt or after it: in every layout a frame takes the next one.
        closed: Whether it holds the end of the text too, so that only padding follows.
    """

    prefill: Tensor
    num_common: int
    leading_text: Tensor
    num_tokens: int
    text_start: int
    text_complete: bool


class PromptBuilder:
    """Builds prompts from a model's embeddings; all vectors that it gives are on the host."""

    def __init__(
        self, embeddings: Embeddings, config: ModelConfig, tokenizer: TextTokenizer
    ) -> None:
        """Projects every token's vector, on a GPU.

        Args:
            embeddings: As `TextEmbedding` takes them, the codec's on the device.
            config: The model's numbers.
            tokenizer: The model's.
        """
        self.config = config
        self.device = embeddings.codec.device
        self._embeddings = embeddings
        self._codec_rows = embeddings.codec.cpu()
        self._text_rows = TextEmbedding(embeddings)
        me = weakref.proxy(self)  # or a prompt_builder and its caches would keep each other
        self._named = lru_cache(maxsize=64)(partial(PromptBuilder._prefix, me))
        self._recording = lru_cache(maxsize=32)(partial(PromptBuilder._sum_of_frames, me))
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n")
        text, control = config.text, config.talker.control
        self._begin, self._fill = self._codec(control.bos), self._codec(control.pad)
        with torch.inference_mode():
            self.pad, self._bos, self.eos = self.embed_text([text.pad, text.bos, text.eos]).split(1)
            self._last = torch.cat([self.eos + self._fill, self.pad + self._begin])

    def embed_text(self, ids: list[int]) -> Tensor:
        """Text vectors [n, hidden]."""
        return self._text_rows(ids)

    def _codec(self, *ids: int) -> Tensor:
        return self._codec_rows[torch.tensor(ids)]

    def _sum_of_frames(self, codes: bytes) -> Tensor:
        """The embeddings [frames, hidden] of a recording, whose codes are given by content."""
        table = np.frombuffer(codes, np.int64).reshape(-1, self.config.talker.num_groups)
        return self._embeddings.embed_frames(torch.tensor(table, device=self.device)).cpu()

    def prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        """Everything before the text.

        Args:
            voice: A speaker of a CustomVoice model (None takes none), a cloned voice for a Base
                model, None for a VoiceDesign model.
            language: One of the model's, or `auto`.
            instruct: How to speak, or for VoiceDesign who.

        Raises:
            VoiceError: This model has no such voice or language, or takes no instruction.
        """
        names = (voice, language, instruct)
        if all(isinstance(name, str | None) for name in names):
            return self._named(*names)
        return self._prefix(*names)  # a cloned voice is no key: its tensors may change

    @torch.inference_mode()
    def _prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        config, text = self.config, self.config.text
        control = config.talker.control
        speaker, vector = self._speaker(voice)
        self._check_instruct(instruct)
        tongue = self._language(language, speaker)
        tags = (
            [control.nothink, control.think_bos, control.think_eos]
            if tongue is None
            else [control.think, control.think_bos, tongue, control.think_eos]
        )
        codec = [self._codec(*tags)]
        if vector is not None:
            codec.append(vector[None])
        codec.append(self._fill)
        codec_side = torch.cat(codec)
        text_side = torch.cat([self.pad.expand(len(codec_side) - 1, -1), self._bos])
        role = [text.im_start, text.assistant, *self._newline]
        parts = [self.embed_text(role), text_side + codec_side]
        if instruct and instruct.strip():
            user = self._tokenizer.encode(f"user\n{instruct.strip()}")
            parts.insert(0, self.embed_text([text.im_start, *user, text.im_end, *self._newline]))
        vectors = torch.cat(parts)
        if not isinstance(voice, Voice) or voice.codes is None or voice.text is None:
            return Prefix(vectors)
        reference = self._recording(voice.codes.numpy(force=True).tobytes())
        return Prefix(
            vectors,
            reference_text=self.embed_text(self._tokenizer.encode(voice.text.strip())),
            reference_codes=torch.cat([self._begin, reference]),
        )

    def _speaker(self, voice: str | Voice | None) -> tuple[str | None, Tensor | None]:
        """The speaker's name, and the vector of the speaker position."""
        talker, kind = self.config.talker, self.config.kind
        hidden = talker.stack.hidden_size
        if kind == "base":
            if not isinstance(voice, Voice):
                found = "no voice was given" if voice is None else f"{voice!r} is none"
                raise VoiceError(
                    f"A Base model speaks with a cloned voice, and {found}; make one with "
                    "TTS.clone('recording.wav') or load one with Voice.load('voice.safetensors')."
                )
            if len(voice.x_vector) != hidden:
                raise VoiceError(
                    f"The voice's x-vector has {len(voice.x_vector)} values and this model takes "
                    f"{hidden}; clone the voice again with this model."
                )
            if voice.codes is not None and not self._codes_fit(voice.codes):
                raise VoiceError("The voice's codes are not of this model's codec; clone it again.")
            return None, voice.x_vector.to(self._codec_rows)
        if isinstance(voice, Voice):
            raise VoiceError(
                f"A cloned voice needs a Base model, and this one is {kind}; {self._choices()}"
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
            raise VoiceError(f"A voice is a name or a Voice, found {type(voice).__name__}.")
        name = voice.strip().lower()
        if name not in talker.speakers:
            raise VoiceError(f"There is no voice {voice!r}; {self._choices()}")
        return name, self._codec(talker.speakers[name])[0]

    def _codes_fit(self, codes: Tensor) -> bool:
        groups, vocab = self.config.talker.num_groups, self.config.predictor.vocab_size
        return codes.shape[1] == groups and 0 <= int(codes.min()) and int(codes.max()) < vocab

    def _choices(self) -> str:
        if self.config.kind == "voice_design":
            return "describe the voice with instruct='...'."
        return "choose one of: " + ", ".join(self.config.talker.speakers) + "."

    def _check_instruct(self, instruct: str | None) -> None:
        if instruct is not None:
            check_text(instruct, "instruct")
        given = bool(instruct and instruct.strip())
        if given and not self.config.takes_instruct:
            raise VoiceError(
                "This model follows no instruction; those that do are 1.7B-CustomVoice and "
                "1.7B-VoiceDesign. Leave instruct out."
            )
        if not given and self.config.kind == "voice_design":
            raise VoiceError(
                "A VoiceDesign model needs instruct='...': a description of the voice."
            )

    def _language(self, language: str, speaker: str | None) -> int | None:
        """The language's id; None lets the model find out."""
        talker = self.config.talker
        if not isinstance(language, str):
            raise VoiceError(f"language is {language!r}; it must be auto or a language's name.")
        name = language.strip().lower()
        dialect = talker.dialects.get(speaker) if speaker else None
        if dialect and name in ("auto", "chinese", dialect):
            return talker.languages[dialect]
        if name == "auto":
            return None
        if name not in spoken_languages(self.config):
            raise VoiceError(
                f"There is no language {language!r}; choose auto or one of: "
                + ", ".join(spoken_languages(self.config))
                + "."
            )
        return talker.languages[name]

    @torch.inference_mode()
    def build(
        self, prefix: Prefix, ids: list[int], layout: Layout, *, ended: bool
    ) -> Prompt | None:
        """The prompt of a text, or None if more of the text must be known first.

        Args:
            prefix: Of the voice.
            ids: The text's tokens so far, at least one.
            layout: Where the text goes; `full` needs all of it.
            ended: Whether the tokens are all.
        """
        if layout == "full":
            return self._full(prefix, ids) if ended else None
        if prefix.reference_codes is not None and prefix.reference_text is not None:
            return self._streaming_reference(prefix, ids, ended)
        prefill = torch.cat([prefix.vectors, self.embed_text(ids[:1]) + self._begin])
        at = len(prefix.vectors)
        return Prompt(prefill, at, self.pad[:0], num_tokens=1, text_start=at, text_complete=False)

    def _full(self, prefix: Prefix, ids: list[int]) -> Prompt:
        text, text_start, last = self.embed_text(ids), len(prefix.vectors), self._last
        if prefix.reference_codes is not None and prefix.reference_text is not None:
            text = torch.cat([prefix.reference_text, text])
            text_start += len(prefix.reference_text)
            last = torch.cat([last[:1], self.pad + prefix.reference_codes])
        prefill = torch.cat([prefix.vectors, text + self._fill, last])
        return Prompt(
            prefill,
            text_start,
            self.pad[:0],
            num_tokens=len(ids),
            text_start=text_start,
            text_complete=True,
        )

    def _streaming_reference(self, prefix: Prefix, ids: list[int], ended: bool) -> Prompt | None:
        """Transcript and text run beside the reference's codes; what is left over is fed later."""
        codes, reference = prefix.reference_codes, prefix.reference_text
        assert codes is not None and reference is not None
        room = len(codes) - len(reference)
        if not ended and len(ids) < room:
            return None
        taken = max(0, min(len(ids), room))
        closed = ended and room > len(ids)
        text = torch.cat([reference, self.embed_text(ids[:taken]), *([self.eos] if closed else [])])
        beside = text[: len(codes)]
        padding = self.pad.expand(len(codes) - len(beside), -1)
        prefill = torch.cat([prefix.vectors, torch.cat([beside, padding]) + codes])
        text_start = len(prefix.vectors) + len(reference)
        # A long transcript leaves no position to the text.
        common = min(text_start, len(prefix.vectors) + len(codes), len(prefill) - 1)
        lead = text[len(codes) :]
        return Prompt(
            prefill, common, lead, num_tokens=taken, text_start=text_start, text_complete=closed
        )


def spoken_languages(config: ModelConfig) -> tuple[str, ...]:
    """The languages that may be asked for: dialects come with their speakers."""
    names = config.talker.languages
    return tuple(name for name in names if not name.endswith("dialect"))
