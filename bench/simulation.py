"""A model of fixed speed behind the real engine, to measure and test Pipecat's service with.

Its speech is one tone a word, of a loudness that tells the word's number, at the pace that the
service's estimate of word times assumes: what was heard can be read from the audio.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts import TTS, ModelInfo, Sampling, Voice, VoiceError
from megakernel_tts.align.estimate import STEP_SECONDS, spoken_seconds
from megakernel_tts.align.words import split_words
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.codec.decoder import Decoder, State
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import Loaded
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.text.prompt import Layout, Prefix, Prompt, PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer

RATE = 24_000
_FRAME = 0.08  # seconds
_STEPS = round(
    _FRAME / STEP_SECONDS
)  # a frame's codes name the word that is spoken in each step of it
_GROUPS = 16
_SOFTEST, _LOUDER = 2000, 20  # of a word's tone, out of 32767: loudness = softest + number * louder
_LOUDNESSES = 1000
_HALF_PERIOD = 24  # samples: 500 Hz


def heard_words(pcm: NDArray[np.int16]) -> list[int]:
    """The numbers of the words that sound in audio of 24 kHz, in order; 0 is a session's first."""
    steps = np.abs(pcm[: len(pcm) // _HALF_PERIOD * _HALF_PERIOD].astype(int))
    loudness = np.median(steps.reshape(-1, _HALF_PERIOD), axis=1)
    audible = loudness[loudness > _SOFTEST / 2]
    numbers = np.rint((audible - _SOFTEST) / _LOUDER).astype(int)
    changes = np.flatnonzero(np.diff(numbers, prepend=-1))
    return [int(n) for n in numbers[changes]]


class CharacterTokenizer(TextTokenizer):
    """One token a character, so that text can be read back from what is fed."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        """The code points."""
        return [ord(char) for char in text]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The characters."""
        return [chr(i).encode() for i in ids]

    def normalize(self, text: str) -> str:
        """The text itself."""
        return text

    def stable_length(self, text: str) -> int:
        """All of it: no character changes another."""
        return len(text)


class SimulatedPromptBuilder(PromptBuilder):
    """Passes tokens on as they are.

    Attributes:
        opened: Voice, language and instruction of every session.
    """

    def __init__(self, voices: Sequence[str]) -> None:
        self.opened: list[tuple[str | Voice | None, str, str | None]] = []
        self.eos = torch.zeros(1, 1)
        self._voices = voices

    def prefix(self, voice: str | Voice | None, language: str, instruct: str | None) -> Prefix:
        """Takes note of a session."""
        if isinstance(voice, str) and voice not in self._voices:
            raise VoiceError(f"There is no voice {voice!r}.")
        self.opened.append((voice, language, instruct))
        return Prefix(torch.zeros(0, 1))

    def embed_text(self, ids: list[int]) -> Tensor:
        """[n, 1]."""
        return torch.tensor(ids, dtype=torch.float64)[:, None]

    def build(
        self, prefix: Prefix, ids: list[int], layout: Layout, *, ended: bool
    ) -> Prompt | None:
        """All the text that is there."""
        text, lead = self.embed_text(ids), torch.zeros(0, 1)
        return Prompt(text, 0, lead, num_tokens=len(ids), text_start=0, text_complete=False)


@dataclass
class _Speaker:
    """One stream.

    Attributes:
        text: That was fed.
        closed: Whether it is all.
        number: Of the word that is being spoken.
        left: Steps of it.
        exact: When it ends, in seconds of speech: words are not made longer by rounding.
        breath: Steps of silence to come before the first word.
        words: Of the text, those that are complete.
    """

    text: str
    closed: bool = False
    number: int = -1
    left: int = 0
    exact: float = 0.0
    breath: int = 0
    words: list[str] = field(default_factory=list[str])

    def feed(self, text: str, last: bool) -> None:
        self.text += text
        self.closed = last
        words = [word.text for word in split_words(self.text) if word.spoken]
        # The last word may go on unless something follows it.
        self.words = words if last or not self.text[-1:].isalnum() else words[:-1]

    @property
    def next_word(self) -> str | None:
        more = self.number + 1 < len(self.words)
        return self.words[self.number + 1] if more else None

    @property
    def done(self) -> bool:
        return self.closed and not self.left and self.next_word is None

    def step(self) -> int:
        """The number of the word in the next step, from 1; 0 is silence: no word is known."""
        if self.breath:
            self.breath -= 1
            return 0
        if not self.left and (word := self.next_word) is not None:
            self.number += 1
            before, self.exact = self.exact, self.exact + spoken_seconds(word)
            self.left = round(self.exact / STEP_SECONDS) - round(before / STEP_SECONDS)
        if not self.left:
            return 0
        self.left -= 1
        return self.number + 1


class SimulatedBackend:
    """Takes a fixed time for a frame of any number of streams.

    Attributes:
        frame_seconds: That time.
        poison: A stream fails at the first word that holds this, if it is not empty.
        breath: Steps of silence before every stream.
        made: Frames, of all streams.
    """

    name = "simulated"

    def __init__(self, num_slots: int, frame_seconds: float) -> None:
        self.num_slots = num_slots
        self.max_positions = 1 << 20
        self.frame_seconds = frame_seconds
        self.poison = ""
        self.breath = 0
        self.made = 0
        self._speakers: dict[int, _Speaker] = {}

    @property
    def busy(self) -> int:
        """How many streams have a slot."""
        return len(self._speakers)

    def prefill(self, requests: Sequence[PrefillRequest]) -> None:
        """Starts streams."""
        for request in requests:
            self._speakers[request.slot] = _Speaker("", breath=self.breath)
            self.feed(request.slot, request.prompt, last=False)

    def clear_prefix_cache(self) -> None:
        """Nothing: it keeps nothing."""

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Takes characters; the 0 at the end is none."""
        characters = "".join(chr(int(c)) for c in text[:, 0] if c)
        self._speakers[slot].feed(characters, last)

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """A frame each, whatever was asked for."""
        overlap()
        speakers = [self._speakers[slot] for slot in slots]
        if self.poison and any(self.poison in (s.next_word or "") for s in speakers):
            raise ArithmeticError(f"no {self.poison} can be said")
        time.sleep(self.frame_seconds)
        self.made += len(slots)
        return [self._frames(s) for s in speakers]

    def interrupt(self) -> None:
        """Nothing: every step is a frame."""

    def clear_interrupt(self) -> None:
        """Nothing."""

    def _frames(self, speaker: _Speaker) -> Frames:
        if speaker.done:
            return Frames(torch.zeros(0, _GROUPS, dtype=torch.long), ended=True)
        return Frames(self._frame(speaker)[None], ended=False)

    def _frame(self, speaker: _Speaker) -> Tensor:
        codes = torch.zeros(_GROUPS, dtype=torch.long)
        codes[:_STEPS] = torch.tensor([speaker.step() for _ in range(_STEPS)])
        return codes

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self._speakers.pop(slot, None)

    def swap_out(self, slot: int) -> SlotSnapshot[_Speaker]:
        """Frees a slot and gives its stream."""
        return SlotSnapshot(self._speakers.pop(slot), ())

    def swap_in(self, slot: int, snapshot: SlotSnapshot[_Speaker]) -> None:
        """Goes on with it."""
        self._speakers[slot] = snapshot.state


class SimulatedDecoder(Decoder):
    """One tone a word."""

    def __init__(self) -> None:
        self.sample_rate = RATE
        samples = round(STEP_SECONDS * RATE)
        wave = np.where(np.arange(samples) // _HALF_PERIOD % 2, -1.0, 1.0)
        self._wave = torch.from_numpy(wave)

    def start(self, batch: int = 1) -> State:
        """An empty state."""
        nothing = torch.zeros(0, batch, 0)
        return State((), nothing, nothing, torch.zeros(batch, dtype=torch.long))

    def decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        """A waveform [batch, samples]."""
        words = codes[:, :, :_STEPS].reshape(len(codes), -1)
        loudness = (_SOFTEST + (words - 1) % _LOUDNESSES * _LOUDER) * (words > 0)
        waves = loudness[:, :, None] / 32767 * self._wave
        return waves.reshape(len(codes), -1), state


def simulated_tts(num_slots: int = 8, frame_seconds: float = 0.005) -> TTS:
    """A model with two voices.

    Args:
        num_slots: Streams at a time.
        frame_seconds: That 80 ms of speech take, however many streams speak.
    """
    languages = ("english", "german", "chinese")
    voices = {"ryan": languages, "serena": languages}
    info = ModelInfo("custom_voice", voices, languages, takes_instruct=True, note=None)
    engine = Engine(
        SimulatedBackend(num_slots, frame_seconds),
        SimulatedPromptBuilder([*voices]),
        SimulatedDecoder(),
        max_waiting=256,
    )
    config = read_model_config(find_checkpoint("demo") / "config.json")
    return TTS(Loaded(config, Sampling(), CharacterTokenizer(), engine, None), info)
