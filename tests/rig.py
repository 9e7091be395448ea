"""An engine over a scripted backend, and what its sessions deliver."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megakernel_common.device_arbiter import DeviceArbiter
from megakernel_tts import AudioChunk, ChunkPolicy, Finish, Sampling, Session, Voice
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.engine import Engine
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.engine.stream import Stream
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.prompt import PromptBuilder, PromptLayout
from megakernel_tts.text.splitter import SplitLimits, Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.fakes import TIMEOUT_S, ExpectingVocoder, ScriptedBackend, codes_of

UNLIMITED = 1 << 30  # unread frames of a stream that never pauses
TEXT = "hello to the world, this is a test of speech."


class ManualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Rest:
    """Counts calls of `Rig.settle`, and those after which the loop has come to rest."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_calls = 0
        self.num_settled = 0


class Rig:
    """An engine over a scripted backend, on a virtual clock.

    Attributes:
        clock: The engine's clock.
        arbiter: Of the backend's device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: ScriptedBackend,
        max_waiting: int = 64,
        decoder: Decoder | None = None,
        vocoder: Vocoder | None = None,
        alignment: Alignment | None = None,
        prompt_builder: PromptBuilder | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        self.clock = ManualClock()
        self.arbiter = DeviceArbiter()
        self._rest = _Rest()
        decoder = decoder or loaded.engine.decoder
        vocoder = vocoder or ExpectingVocoder(decoder)
        prompt_builder = prompt_builder or loaded.engine.prompt_builder
        self.engine = Engine(
            backend,
            prompt_builder,
            decoder,
            vocoder,
            alignment,
            max_waiting=max_waiting,
            arbiter=self.arbiter,
            policy=policy,
            clock=self.clock,
        )
        self._observe_rest()

    def _observe_rest(self) -> None:
        """The loop is at rest while it waits for a wake-up and no signal is left."""
        wakeup, rest = self.engine._loop.wakeup, self._rest
        wait = wakeup.wait

        def observed(timeout_s: float | None) -> None:  # without a reference to the engine
            with rest.changed:
                if wakeup._signals.empty():
                    rest.num_settled = rest.num_calls
                    rest.changed.notify_all()
            wait(timeout_s)

        wakeup.wait = observed  # type: ignore[method-assign]

    def open(
        self,
        text: str | None = TEXT,
        seed: int = 1,
        layout: PromptLayout = "streaming",
        limits: SplitLimits | None = None,
        voice: Voice | None = None,
        max_frames: int = 400,
        max_retries: int = 0,
        speed: float = 1.0,
        priority: int = 0,
        at_once: bool = False,
        **chunks: int,
    ) -> Session:
        """Opens a session; `text` is the whole text, None leaves it open.

        With `at_once` it opens with its text, else the text is pushed then.
        """
        prefix = self.engine.prompt_builder.prefix(voice or "ryan", "english", None)
        text_queue = TextQueue(self.loaded.tokenizer, Splitter(limits=limits))
        sampling = Sampling(seed=seed, max_frames=max_frames)
        if at_once:
            text_queue.push(text or "", text_ended=True)
        policy = ChunkPolicy(**chunks)
        prompt = prefix, voice, layout
        session = self.engine.open(
            text_queue,
            *prompt,
            sampling,
            policy,
            speed=speed,
            max_retries=max_retries,
            priority=priority,
        )
        if text is not None and not at_once:
            session.push_text(text)
            session.end()
        return session

    @property
    def streams(self) -> Sequence[Stream]:
        """The engine's open streams."""
        return self.engine._loop.scheduler.streams

    @property
    def num_frames(self) -> int:
        """Frames that TEXT takes."""
        return len(self.loaded.tokenizer.encode(TEXT)) + self.backend.tail

    def settle(self) -> None:
        """Waits until the loop has handled all that has happened and sleeps."""
        rest = self._rest
        with rest.changed:
            self.engine._loop.wakeup.set()
            rest.num_calls += 1
            settled = rest.changed.wait_for(lambda: rest.num_settled == rest.num_calls, TIMEOUT_S)
        assert settled, "the loop does not come to rest"

    def advance(self, seconds: float) -> None:
        """Advances the clock and wakes the loop."""
        self.clock.now_s += seconds
        self.engine._loop.wakeup.set()

    def hold(self) -> None:
        """Closes the backend's gate and waits until a step has stopped at it."""
        self.backend.gate.clear()
        assert self.backend.blocked.wait(TIMEOUT_S), "no step is made"

    def resume(self) -> None:
        """Opens the backend's gate."""
        self.backend.blocked.clear()
        self.backend.gate.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops a loop at rest, so that it handles all that happens meanwhile in one iteration."""
        with self.engine._loop.scheduler.lock:
            yield
            # The loop may have begun this iteration already; it would end its step after a frame.
            self.backend.clear_interrupt()
        self.engine._loop.wakeup.set()

    def close(self) -> None:
        """Closes the engine, and checks the order of its calls to the vocoder."""
        self.backend.gate.set()
        self.engine.close()
        vocoder = self.engine.vocoder
        assert not (isinstance(vocoder, ExpectingVocoder) and vocoder.violations)

    def idle(self) -> bool:
        """Whether every session ends and every slot becomes free."""
        self.settle()
        return not self.backend.busy and not self.engine.num_sessions


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
        reader.join(TIMEOUT_S)
        assert not reader.is_alive(), "a session does not end"
    return [finishes[i] for i in range(len(sessions))]


def drain(session: Session) -> tuple[list[AudioChunk], Finish]:
    """Reads a session to its end."""
    *chunks, finish = list(session)
    assert isinstance(finish, Finish)
    return [c for c in chunks if isinstance(c, AudioChunk)], finish


def codes(chunks: list[AudioChunk]) -> np.ndarray:
    """The codes [frames, groups] of chunks."""
    return np.concatenate([c.codes for c in chunks])


def scripted(seed: int, num_frames: int, first: int = 0) -> np.ndarray:
    """The codes [frames, groups] that `ScriptedBackend` makes."""
    return torch.stack([codes_of(seed, first + i) for i in range(num_frames)]).numpy()


MakeRig = Callable[..., Rig]
