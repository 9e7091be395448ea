"""The engine as others see it: open a session, close. What it does all day is the `loop`."""

import atexit
import threading
import weakref
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megakernel_tts.align.alignment import Alignment
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.vocoder import TorchVocoder, Vocoder
from megakernel_tts.engine.loop import Loop
from megakernel_tts.engine.stream import Stream
from megakernel_tts.errors import EngineBusyError, EngineClosedError
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import ChunkPolicy, EventQueue, Session
from megakernel_tts.text.prompt import Layout, Prefix, PromptBuilder
from megakernel_tts.text.text_queue import TextQueue

if TYPE_CHECKING:
    from megakernel_tts.voice import Voice

_PRIME_FRAMES = 64  # reference frames decoded at a time


class Engine:
    """Speaks for many sessions at once on one thread.

    It lives as long as somebody holds it or one of its sessions.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_builder: PromptBuilder,
        decoder: Decoder,
        vocoder: Vocoder | None = None,
        alignment: Alignment | None = None,
        *,
        max_waiting: int = 64,
    ) -> None:
        """Starts the thread.

        Args:
            backend: Runs the networks; the engine owns it from now on.
            prompt_builder: Builds prompts.
            decoder: The codec in plain torch.
            vocoder: The codec for many streams; by default in plain torch, too.
            alignment: How words are found by the heads that the backend watches; None estimates.
            max_waiting: Sessions beyond the backend's slots that may be open and wait for one.
        """
        self.backend = backend
        self.prompt_builder = prompt_builder
        self.decoder = decoder
        self.alignment = alignment
        self._most = backend.num_slots + max_waiting
        self.vocoder = vocoder or TorchVocoder(decoder)
        self._fresh = self.vocoder.prepare_state(decoder.start())
        self._primed = lru_cache(maxsize=32)(partial(_prime, decoder, self.vocoder))
        self._loop = Loop(backend, prompt_builder, self.vocoder)
        self._thread = threading.Thread(
            target=_work, args=(self._loop,), name="megakernel-tts-engine", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._loop.stop).atexit = False

    def open(
        self,
        script: TextQueue,
        prefix: Prefix,
        voice: "Voice | None",
        layout: Layout,
        sampling: Sampling,
        chunks: ChunkPolicy,
        *,
        retries: int = 0,
    ) -> Session:
        """Opens a session.

        Args:
            script: Empty, or with text already.
            prefix: Of the prompts: voice, language, instruction.
            voice: A cloned voice, whose recording the codec hears first; None for the others.
            layout: Where the text goes in the prompts.
            sampling: With a seed.
            chunks: How frames leave.
            retries: How often a piece that the guard stopped is said again with the next seed. With
                any, the audio of a piece leaves at its end.

        Raises:
            EngineBusyError: Too many sessions are open.
            EngineClosedError: The engine was closed or broke.
        """
        with self._loop.lock:
            self._check_room()
        start = self._fresh
        if voice is not None and voice.codes is not None:
            codes = voice.codes.numpy(force=True)
            start = self._primed(codes.tobytes(), codes.shape[1])
        mailbox = EventQueue(on_read=self._loop.wakeup.set)
        stream = Stream(
            script, mailbox, prefix, start, layout, sampling, chunks, self.alignment, retries
        )
        with self._loop.lock:
            self._check_room()
            self._loop.streams.append(stream)
        self._text_came(stream)
        wake, abandon = partial(self._text_came, stream), partial(self._abandon, stream)
        return Session(script, mailbox, wake, abandon)

    def pending_open(self) -> AbstractContextManager[None]:
        """While a session is opened with its text: who begins meanwhile waits for it a moment."""
        return self._loop.arrivals.one()

    def _check_room(self) -> None:
        loop = self._loop
        if loop.closed:
            raise EngineClosedError("The engine is closed; load a new one.") from loop.broken
        live = sum(not stream.abandoned for stream in loop.streams)
        if live >= self._most:
            raise EngineBusyError(
                f"{self.backend.num_slots} streams can speak at once, and {live} sessions are "
                "open, as many as may wait. Try again later, or load with more slots."
            )

    def _text_came(self, stream: Stream) -> None:
        """Who can speak on without it need not disturb the others."""
        if stream.starved:
            self._loop.interrupt()
        else:
            self._loop.wakeup.set()

    def _abandon(self, stream: Stream) -> None:
        stream.abandoned = True
        self._loop.interrupt()

    @property
    def num_sessions(self) -> int:
        """How many sessions are open."""
        with self._loop.lock:
            return len(self._loop.streams)

    @property
    def num_free_slots(self) -> int:
        """How many slots nobody has."""
        return len(self._loop.free)

    def close(self) -> None:
        """Cancels every session and stops the thread; may be called twice."""
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(loop: Loop) -> None:
    """The thread. One that still computes while the interpreter goes away aborts the process."""
    end = partial(_end, loop, threading.current_thread())
    atexit.register(end)
    loop.run()
    atexit.unregister(end)


def _end(loop: Loop, thread: threading.Thread) -> None:
    loop.stop()
    thread.join()


@torch.inference_mode()
def _prime(decoder: Decoder, vocoder: Vocoder, codes: bytes, groups: int) -> Any:
    """The vocoder's state after a recording, whose codes are given by content."""
    state = decoder.start()
    recording = torch.tensor(np.frombuffer(codes, np.int64).reshape(-1, groups))
    for part in recording.to(state.position.device).split(_PRIME_FRAMES):
        _, state = decoder.decode(part[None], state)
    return vocoder.prepare_state(state)
