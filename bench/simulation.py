"""A simulated model behind the real engine: a fixed time per frame, and audio that encodes words.

Each word is a tone whose loudness encodes the word's index, so that the words can be read back from
the audio. Words last as long as the estimate of word times assumes.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts import TTS, ModelInfo, Sampling, Voice, VoiceError
from megakernel_tts.align.estimate import INTERVAL_S, spoken_seconds
from megakernel_tts.align.words import split_words
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, PrefillResult
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.codec.decoder import Decoder, State
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.session import FRAME_S
from megakernel_tts.text.prompt import Prefix, Prompt, PromptBuilder, PromptLayout
from megakernel_tts.text.tokenizer import TextTokenizer

RATE = 24_000
# Code i of a frame is 1 + the number of the word in its interval i.
_INTERVALS = round(FRAME_S / INTERVAL_S)  # of a frame
_GROUPS = 16
_MIN_LOUDNESS, _LOUDNESS_STEP = 2000, 20  # of 32767; loudness = minimum + index * step
_NUM_LOUDNESSES = 1000
_WORD_PIECE = re.compile(r"\s*\S+|\s+")
_HALF_PERIOD = 24  # samples: 500 Hz


def word_onsets(pcm: NDArray[np.int16]) -> list[tuple[int, int]]:
    """Returns the words in 24 kHz audio, in order.

    Args:
        pcm: int16 [samples].

    Returns:
        The index of each word, 0 for a session's first, and the sample at which it begins, to
        within 24.
    """
    magnitudes = np.abs(pcm[: len(pcm) // _HALF_PERIOD * _HALF_PERIOD].astype(int))
    loudness = np.median(magnitudes.reshape(-1, _HALF_PERIOD), axis=1)
    audible = np.flatnonzero(loudness > _MIN_LOUDNESS / 2)
    numbers = np.rint((loudness[audible] - _MIN_LOUDNESS) / _LOUDNESS_STEP).astype(int)
    changes = np.flatnonzero(np.diff(numbers, prepend=-1))
    return [(int(numbers[i]), int(audible[i]) * _HALF_PERIOD) for i in changes]


def words_in_audio(pcm: NDArray[np.int16]) -> list[int]:
    """Returns the indices of the words in 24 kHz audio, in order; see `word_onsets`."""
    return [word for word, _ in word_onsets(pcm)]


class CharacterTokenizer(TextTokenizer):
    """One token per character, so that the backend can read the text."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        """Returns the code points."""
        return [ord(char) for char in text]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the UTF-8 bytes of each character."""
        return [chr(i).encode() for i in ids]

    def normalize(self, text: str) -> str:
        """Returns the text."""
        return text

    def stable_length(self, text: str) -> int:
        """Returns the length of the text: no character changes the token of another."""
        return len(text)


class WordTokenizer(CharacterTokenizer):
    """One token per word with the space before it, so that text is as scarce as it can be."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Returns numbers above the code points, one for each word."""
        return [self._id(piece) for piece in _WORD_PIECE.findall(text)]

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = sys.maxunicode + 1 + len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the UTF-8 bytes of each word."""
        return [self._pieces[i - sys.maxunicode - 1].encode() for i in ids]

    def stable_length(self, text: str) -> int:
        """Returns the length of the text before its last word, which may grow."""
        *_, last = _WORD_PIECE.finditer(text)
        return last.start()


class SimulatedPromptBuilder(PromptBuilder):
    """A prompt builder whose vectors are the token ids.

    Attributes:
        opened: Voice, language and instruction of every session.
    """

    def __init__(self, voices: Sequence[str], num_prompt_tokens: int | None) -> None:
        """Records no session yet.

        Args:
            voices: Names of voices.
            num_prompt_tokens: Tokens in a prompt, before those that frames need; None for all.
        """
        self._num_prompt_tokens = num_prompt_tokens
        self.opened: list[tuple[str | Voice | None, str, str | None]] = []
        self.eos = torch.zeros(1, 1)
        self._voices = voices

    def prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        """Records a session and returns an empty prefix."""
        self.check(voice, language, instruct)
        self.opened.append((voice, language, instruct))
        return Prefix(torch.zeros(0, 1))

    def check(self, voice: str | Voice | None, language: str, instruct: str | None) -> None:
        """Refuses unknown names."""
        if isinstance(voice, str) and voice.strip().lower() not in self._voices:
            raise VoiceError(f"There is no voice {voice!r}.")

    def embed_text(self, ids: list[int]) -> Tensor:
        """Returns the token ids as vectors [n, 1]."""
        return torch.tensor(ids, dtype=torch.float64)[:, None]

    def build(
        self, prefix: Prefix, ids: list[int], layout: PromptLayout, *, text_ended: bool
    ) -> Prompt | None:
        """Returns a prompt of the first tokens."""
        text, lead = self.embed_text(ids[: self._num_prompt_tokens]), torch.zeros(0, 1)
        return Prompt(text, 0, lead, num_tokens=len(text), text_start=0, text_complete=False)


def _nearest_interval(seconds: float) -> int:
    """Returns the interval at which `EstimatedWordTimer` places a word, the earlier one of two."""
    return math.ceil(seconds / INTERVAL_S - 0.5 - 1e-6)


@dataclass
class _SimulatedStream:
    """State of one stream.

    Attributes:
        text: Text fed.
        text_complete: Whether no more text follows.
        word_idx: Index of the word being spoken.
        num_intervals_left: Intervals left of it.
        word_end_s: Its exact end in seconds of speech, so that rounding does not accumulate.
        num_silent_intervals: Intervals of silence left before the first word.
        num_trailing_intervals: Intervals of silence left after the last word.
        first_number: Number of the first word.
        words: Complete words of the text.
    """

    text: str
    text_complete: bool = False
    word_idx: int = -1
    num_intervals_left: int = 0
    word_end_s: float = 0.0
    num_silent_intervals: int = 0
    num_trailing_intervals: int = 0
    first_number: int = 0
    words: list[str] = field(default_factory=list[str])

    def feed(self, text: str, text_complete: bool) -> None:
        self.text += text
        self.text_complete = text_complete
        words = [word.text for word in split_words(self.text) if word.spoken]
        # The last word may be incomplete unless something follows it.
        self.words = words if text_complete or not self.text[-1:].isalnum() else words[:-1]

    @property
    def next_word(self) -> str | None:
        more = self.word_idx + 1 < len(self.words)
        return self.words[self.word_idx + 1] if more else None

    @property
    def done(self) -> bool:
        spoken = self.text_complete and not self.num_intervals_left and self.next_word is None
        return spoken and self.num_trailing_intervals <= 0

    def next_interval(self) -> int:
        """Returns 1 + the number of the word in the next interval; 0 for silence."""
        if self.num_silent_intervals:
            self.num_silent_intervals -= 1
            return 0
        if not self.num_intervals_left and (word := self.next_word) is not None:
            self.word_idx += 1
            before, self.word_end_s = self.word_end_s, self.word_end_s + spoken_seconds(word)
            self.num_intervals_left = _nearest_interval(self.word_end_s) - _nearest_interval(before)
        if not self.num_intervals_left:
            self.num_trailing_intervals -= self.text_complete
            return 0
        self.num_intervals_left -= 1
        return self.first_number + self.word_idx + 1


class SimulatedBackend:
    """A backend that takes a fixed time for a frame of any number of streams.

    Attributes:
        frame_seconds: Time of a frame.
        failing_word: A stream fails at the first word that contains it; empty for none.
        num_silent_intervals: Intervals of silence before the words of every segment.
        num_trailing_intervals: Intervals of silence after them.
        distinct_segments: Whether the first word of a segment has another number than the last word
            of the segment before, instead of 0.
        num_made: Frames made, of all streams.
    """

    name = "simulated"
    blocking = False

    def __init__(self, num_slots: int, frame_seconds: float, tokenizer: TextTokenizer) -> None:
        self.num_slots = num_slots
        self.max_streams = num_slots
        self.max_positions = 1 << 20
        self.frame_seconds = frame_seconds
        self.failing_word = ""
        self.num_silent_intervals = 0
        self.num_trailing_intervals = 0
        self.distinct_segments = False
        self.num_made = 0
        self._tokenizer = tokenizer
        self._streams: dict[int, _SimulatedStream] = {}

    @property
    def busy(self) -> int:
        """Number of streams."""
        return len(self._streams)

    def prepare(self) -> None:
        """Does nothing; see `Backend.prepare`."""

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """See `Backend.reserve`; nothing takes memory."""
        return True

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        """See `Backend.prefill`; a prompt takes no time, so it is run whole."""
        for request in requests:
            self._streams[request.slot] = _SimulatedStream(
                "",
                num_silent_intervals=self.num_silent_intervals,
                num_trailing_intervals=self.num_trailing_intervals,
                first_number=request.first_frame * self.distinct_segments,
            )
            self.feed(request.slot, request.prompt, text_complete=False)
        lengths = [len(request.prompt) for request in requests]
        return PrefillResult(lengths, sum(lengths))

    def clear_prefix_cache(self) -> None:
        """See `Backend.clear_prefix_cache`; there is no cache."""

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        """See `Backend.feed`; the end of the text is a 0."""
        pieces = self._tokenizer.token_bytes([int(i) for i in text[:, 0] if i])
        self._streams[slot].feed(b"".join(pieces).decode(), text_complete)

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """See `Backend.step`; makes one frame of each stream."""
        overlap()
        streams = [self._streams[slot] for slot in slots]
        if self.failing_word and any(self.failing_word in (s.next_word or "") for s in streams):
            raise ArithmeticError(f"{self.failing_word} cannot be spoken")
        time.sleep(self.frame_seconds)
        self.num_made += len(slots)
        return [self._frames(s) for s in streams]

    def interrupt(self) -> None:
        """See `Backend.interrupt`; every step is one frame."""

    def clear_interrupt(self) -> None:
        """See `Backend.clear_interrupt`."""

    def _frames(self, stream: _SimulatedStream) -> Frames:
        if stream.done:
            return Frames(torch.zeros(0, _GROUPS, dtype=torch.long), ended=True)
        return Frames(self._frame(stream)[None], ended=False)

    def _frame(self, stream: _SimulatedStream) -> Tensor:
        codes = torch.zeros(_GROUPS, dtype=torch.long)
        codes[:_INTERVALS] = torch.tensor([stream.next_interval() for _ in range(_INTERVALS)])
        return codes

    def release(self, slot: int) -> None:
        """See `Backend.release`."""
        self._streams.pop(slot, None)

    def swap_out(self, slot: int) -> SlotSnapshot[_SimulatedStream]:
        """See `Backend.swap_out`."""
        return SlotSnapshot(self._streams.pop(slot), ())

    def swap_in(self, slot: int, snapshot: SlotSnapshot[_SimulatedStream]) -> None:
        """See `Backend.swap_in`."""
        self._streams[slot] = snapshot.state


class SimulatedDecoder(Decoder):
    """A decoder that makes one tone per word."""

    def __init__(self) -> None:
        self.sample_rate = RATE
        samples = round(INTERVAL_S * RATE)
        wave = np.where(np.arange(samples) // _HALF_PERIOD % 2, -1.0, 1.0)
        self._wave = torch.from_numpy(wave)

    def start(self, batch: int = 1) -> State:
        """Returns an empty state."""
        nothing = torch.zeros(0, batch, 0)
        return State((), nothing, nothing, torch.zeros(batch, dtype=torch.long))

    def decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        """Returns a waveform [batch, samples] and the state."""
        words = codes[:, :, :_INTERVALS].reshape(len(codes), -1)
        loudness = (_MIN_LOUDNESS + (words - 1) % _NUM_LOUDNESSES * _LOUDNESS_STEP) * (words > 0)
        waves = loudness[:, :, None] / 32767 * self._wave
        return waves.reshape(len(codes), -1), state


def simulated_tts(
    num_slots: int = 8,
    frame_seconds: float = 0.005,
    tokenizer: TextTokenizer | None = None,
    kind: Literal["custom_voice", "base"] = "custom_voice",
) -> TTS:
    """Returns a simulated model: with two voices, or a Base model, which has cloned voices only.

    Args:
        num_slots: Number of streams that can speak at once.
        frame_seconds: Time of a frame (80 ms of speech), for any number of streams.
        tokenizer: Tokenizer of the text, a token of which is needed for each frame after the first;
            None for one token per character, of which speech needs more than one per frame.
        kind: Of the model.
    """
    num_prompt_tokens = 1 if tokenizer else None
    tokenizer = tokenizer or CharacterTokenizer()
    languages = ("english", "german", "chinese")
    voices = {} if kind == "base" else {"ryan": languages, "serena": languages}
    info = ModelInfo(kind, voices, languages, True, note=None, name="simulated")
    engine = Engine(
        SimulatedBackend(num_slots, frame_seconds, tokenizer),
        SimulatedPromptBuilder([*voices], num_prompt_tokens),
        SimulatedDecoder(),
        max_waiting=256,
    )
    config = read_model_config(find_checkpoint("demo") / "config.json")
    return TTS(LoadedModel(config, Sampling(), tokenizer, engine, None), info)
