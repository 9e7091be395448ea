"""An engine over a scripted backend, and what its sessions give."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megakernel_tts import (
    AudioChunk,
    ChunkPolicy,
    Finish,
    Sampling,
    Session,
    Voice,
)
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import Loaded
from megakernel_tts.text.prompt import Layout, PromptBuilder
from megakernel_tts.text.splitter import Limits, Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.fakes import ExpectingVocoder, ScriptedBackend, codes_of

TEXT = "hello to the world, this is a test of speech."


class Rig:
    """An engine over a scripted backend."""

    def __init__(
        self,
        loaded: Loaded,
        backend: ScriptedBackend,
        max_waiting: int = 64,
        decoder: Decoder | None = None,
        vocoder: Vocoder | None = None,
        alignment: Alignment | None = None,
        prompt_builder: PromptBuilder | None = None,
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        decoder = decoder or loaded.engine.decoder
        vocoder = vocoder or ExpectingVocoder(decoder)
        prompt_builder = prompt_builder or loaded.engine.prompt_builder
        self.engine = Engine(
            backend, prompt_builder, decoder, vocoder, alignment, max_waiting=max_waiting
        )

    def open(
        self,
        text: str | None = TEXT,
        seed: int = 1,
        layout: Layout = "streaming",
        limits: Limits | None = None,
        voice: Voice | None = None,
        max_frames: int = 400,
        retries: int = 0,
        **chunks: int,
    ) -> Session:
        prefix = self.engine.prompt_builder.prefix(voice or "ryan", "english", None)
        script = TextQueue(self.loaded.tokenizer, Splitter(limits=limits))
        sampling = Sampling(seed=seed, max_frames=max_frames)
        session = self.engine.open(
            script, prefix, voice, layout, sampling, ChunkPolicy(**chunks), retries=retries
        )
        if text is not None:
            session.push_text(text)
            session.end()
        return session

    @property
    def frames(self) -> int:
        """Frames that TEXT takes."""
        return len(self.loaded.tokenizer.encode(TEXT)) + self.backend.tail

    def idle(self) -> bool:
        """Whether every slot comes free soon."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.backend.busy and not self.engine.num_sessions:
                return True
            time.sleep(0.005)
        return False


def one_frame(backend: Backend, slots: Sequence[int]) -> list[Tensor | None]:
    """The codes [groups] of each slot's next frame; None where the speech ends."""
    made = backend.step(slots, 1)
    return [None if frames.ended else frames.codes[0] for frames in made]


def read(sessions: Sequence[Session]) -> list[Finish]:
    """Reads sessions to their ends, each in a thread of its own."""
    finishes: dict[int, Finish] = {}
    readers = [
        threading.Thread(target=lambda i=i, s=s: finishes.update({i: drain(s)[1]}), daemon=True)
        for i, s in enumerate(sessions)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
        assert not reader.is_alive(), "a session hangs"
    return [finishes[i] for i in range(len(sessions))]


def drain(session: Session) -> tuple[list[AudioChunk], Finish]:
    *chunks, finish = list(session)
    assert isinstance(finish, Finish)
    return [c for c in chunks if isinstance(c, AudioChunk)], finish


def codes(chunks: list[AudioChunk]) -> np.ndarray:
    return np.concatenate([c.codes for c in chunks])


def scripted(seed: int, frames: int, first: int = 0) -> np.ndarray:
    return torch.stack([codes_of(seed, first + i) for i in range(frames)]).numpy()
