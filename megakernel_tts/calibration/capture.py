"""Captures the attention scores of all heads while a model repeats given speech."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.align.words import Transcript
from megakernel_tts.audio import pcm16
from megakernel_tts.backends.reference import Reference
from megakernel_tts.calibration.ground_truth import TimedSpeech
from megakernel_tts.calibration.ranking import CapturedSpeech
from megakernel_tts.checks import MAX_POSITIONS
from megakernel_tts.errors import TextError
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.prompt import Prefix, PromptLayout
from megakernel_tts.tts import TTS
from megakernel_tts.voice import Voice

LAYOUTS: tuple[PromptLayout, ...] = ("full", "streaming")


class SpeechCapture:
    """Runs the reference backend on speech whose codes are given (teacher forcing)."""

    def __init__(
        self, loaded: LoadedModel, voice: str | Voice | None, instruct: str | None
    ) -> None:
        """Allocates one slot.

        Args:
            loaded: In float32, so that its backend is the reference.
            voice: Of speeches without a voice: a named one, or a cloned one for a Base model.
            instruct: How to speak; for VoiceDesign a description of the voice.
        """
        backend = loaded.engine.backend
        assert isinstance(backend, Reference)
        self._loaded = loaded
        self._voice, self._instruct = voice, instruct
        self._prompt_builder = prompt_builder = loaded.engine.prompt_builder
        self._reference = Reference(
            backend.model,
            loaded.config,
            prompt_builder.pad[0].to(prompt_builder.device),
            num_slots=1,
            max_positions=MAX_POSITIONS,
        )

    def capture_attention(self, speech: TimedSpeech) -> list[CapturedSpeech]:
        """Captures a speech in each of the `LAYOUTS`.

        Raises:
            TextError: The number of word starts is not that of the text's words.
        """
        tokenizer = self._loaded.tokenizer
        ids = tokenizer.encode(tokenizer.normalize(speech.text.strip()))
        self._check_words(self._transcript(ids), speech)
        prefix = self._prompt_builder.prefix(speech.voice or self._voice, "auto", self._instruct)
        codes = torch.from_numpy(speech.codes)
        samples = self._samples(codes)
        transcript = partial(self._transcript, ids)
        return [
            CapturedSpeech(scores.numpy(), samples, transcript, speech.starts)
            for scores in (self._scores(prefix, ids, codes, layout) for layout in LAYOUTS)
        ]

    def _transcript(self, ids: Sequence[int]) -> Transcript:
        transcript = Transcript(self._loaded.tokenizer.token_bytes)
        transcript.update(ids, len(ids))
        return transcript

    def _check_words(self, transcript: Transcript, speech: TimedSpeech) -> None:
        words = [transcript[i] for i in range(len(transcript))]
        if speech.starts is not None and len(speech.starts) != len(words):
            raise TextError(
                f"{speech.text!r} has {len(words)} words ({', '.join(words)}) and "
                f"{len(speech.starts)} starts; give one start for each word."
            )

    @torch.inference_mode()
    def _samples(self, codes: Tensor) -> NDArray[np.int16]:
        decoder = self._loaded.engine.decoder
        state = decoder.start()
        wave, _ = decoder.decode(codes[None].to(state.position.device), state)
        return pcm16(wave[0].float().cpu().numpy()).reshape(len(codes), -1)

    @torch.inference_mode()
    def _scores(
        self, prefix: Prefix, ids: list[int], codes: Tensor, layout: PromptLayout
    ) -> Tensor:
        """The scores [frames, layers, heads, tokens] of the text's positions."""
        prompt_builder = self._prompt_builder
        prompt = prompt_builder.build(prefix, ids, layout, text_ended=True)
        assert prompt is not None
        text = [prompt.leading_text]
        if not prompt.text_complete:
            text += [prompt_builder.embed_text(ids[prompt.num_tokens :]), prompt_builder.eos]
        layers = self._reference.capture_attention(
            prompt.prefill, torch.cat(text), codes, prompt.text_start, len(ids)
        )
        return torch.stack(layers).permute(2, 0, 1, 3)


def synthesise(
    tts: TTS, sentences: Sequence[str], voice: str | Voice | None, instruct: str | None
) -> Iterator[TimedSpeech]:
    """Synthesises sentences with different seeds. The word times are unknown."""
    for seed, sentence in enumerate(sentences):
        sampling = replace(tts.sampling, seed=seed)
        speech = tts.say(sentence, voice, instruct=instruct, sampling=sampling)
        yield TimedSpeech(sentence, None, speech.codes, None)
