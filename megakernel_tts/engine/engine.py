"""Opens sessions and owns the engine thread, which runs the `loop`."""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megakernel_common.device_arbiter import DeviceArbiter
from megakernel_common.errors import EngineBusyError, EngineClosedError
from megakernel_common.process import OwnerProcess, end_at_exit
from megakernel_common.threads import start_thread
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.vocoder import TorchVocoder, Vocoder
from megakernel_tts.engine.loop import Loop
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.engine.stream import Stream, StreamRequest
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import ChunkPolicy, EventQueue, Session
from megakernel_tts.text.prompt import Prefix, PromptBuilder, PromptLayout
from megakernel_tts.text.text_queue import TextQueue

if TYPE_CHECKING:
    from megakernel_tts.voice import Voice

_RECORDING_FRAMES = 64  # of a recording, decoded in one call


class Engine:
    """Synthesises speech for many sessions on one thread.

    The thread runs until the engine is closed, or until neither the engine nor one of its sessions
    is referenced.
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
        arbiter: DeviceArbiter | None = None,
        num_compute_threads: int | None = None,
        policy: SchedulingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the thread.

        Args:
            backend: Runs the networks; owned by the engine from now on.
            prompt_builder: Builds prompts.
            decoder: The codec in plain torch.
            vocoder: The codec for the backend's slots; in plain torch if None.
            alignment: Calibrated heads, which `backend` captures; word times are estimated if None.
            max_waiting: Sessions that may be open in addition to those that have a slot.
            arbiter: Of the backend's device; None if no other engine uses it.
            num_compute_threads: As in `start_thread`.
            policy: Scheduling limits; the defaults if None.
            clock: Returns the time in seconds.
        """
        self._process = OwnerProcess()
        self.backend = backend
        self.prompt_builder = prompt_builder
        self.decoder = decoder
        self.alignment = alignment
        self.vocoder = vocoder or TorchVocoder(decoder)
        self._max_sessions = backend.num_slots + max_waiting
        self._initial_state = self.vocoder.prepare_state(decoder.start())
        self._state_after = lru_cache(maxsize=32)(partial(_state_after, decoder, self.vocoder))
        self._loop = Loop(
            backend, prompt_builder, self.vocoder, arbiter or DeviceArbiter(), policy, clock
        )
        self._thread = start_thread(
            self._loop.run, "megakernel-tts-engine", num_compute_threads=num_compute_threads
        )
        end_at_exit(self._loop, self._thread)
        weakref.finalize(self, self._loop.stop).atexit = False

    def open(
        self,
        text_queue: TextQueue,
        prefix: Prefix,
        voice: "Voice | None",
        layout: PromptLayout,
        sampling: Sampling,
        chunks: ChunkPolicy,
        *,
        max_retries: int = 0,
        speed: float = 1.0,
        priority: int = 0,
    ) -> Session:
        """Opens a session.

        Args:
            text_queue: The session's text, empty or not.
            prefix: The part of its prompts that does not depend on the text.
            voice: A cloned voice, whose recording sets the codec's initial state; else None.
            layout: Where the text goes in the prompts.
            sampling: Sampling parameters, with a seed.
            chunks: Sizes of the chunks.
            max_retries: How often a segment that the guard stopped is spoken again with the next
                seed. If not 0, the audio of a segment is delivered at its end.
            speed: How many times as fast as it is synthesised the speech is delivered, at the same
                pitch; see `check_speed`.
            priority: Sessions with a lower number get slots first.

        Raises:
            EngineBusyError: Too many sessions are open.
            EngineClosedError: The engine was closed or has failed.
        """
        scheduler = self._loop.scheduler
        state = self._initial_state
        if voice is not None and voice.codes is not None:
            with scheduler.lock:  # before work of the codec that would be discarded
                self._check_open()
            state = self._state_after(voice.codes.tobytes(), voice.codes.shape[1])
        request = StreamRequest(
            prefix=prefix,
            vocoder_state=state,
            layout=layout,
            sampling=sampling,
            chunks=chunks,
            alignment=self.alignment,
            max_retries=max_retries,
            speed=speed,
            priority=priority,
        )
        # The queue refers to parts of the loop: a reference to the engine would keep it alive.
        events = EventQueue(
            self._loop.wakeup.set,
            self._loop.interrupts.interrupt_unless_shared,
            scheduler.clock,
            self._loop.reader_wakeups,
        )
        stream = Stream(request, text_queue, events, self.vocoder.sample_rate)
        with text_queue.lock:
            idle = text_queue.idle
        with scheduler.lock:
            self._check_open()
            scheduler.add(stream)
        if not idle:
            self._on_text(stream)
        return Session(text_queue, events, partial(self._on_text, stream))

    def check_process(self) -> None:
        """Checks that the engine's thread runs in this process.

        Raises:
            ForkedProcessError: This process was forked after the engine was made.
        """
        self._process.check()

    def pending_open(self) -> AbstractContextManager[None]:
        """Announces a session: streams that begin wait for it up to the policy's join window."""
        return self._loop.pending_opens

    def _check_open(self) -> None:
        """Checks that a session can be opened; the scheduler's lock must be held."""
        loop = self._loop
        if loop.closed:
            raise EngineClosedError("The engine is closed; load a new one.") from loop.broken
        if len(loop.scheduler.streams) < self._max_sessions:
            return  # counting those that were not abandoned takes longer
        num_live = loop.scheduler.num_live
        if num_live >= self._max_sessions:
            raise EngineBusyError(
                f"{self.backend.num_slots} streams can speak at once, and {num_live} sessions are "
                "open, as many as may wait. Try again later, or load with more slots."
            )

    def _on_text(self, stream: Stream) -> None:
        """Wakes the loop; interrupts the step under way only if the stream lacks text.

        Text with which a stream without a slot can go on is treated as a session that is opened. A
        break, or the end of the text, interrupts the step, unless it is shared, if it comes next.
        """
        if stream.slot is None:
            with stream.text_queue.lock:
                needs_no_slot = stream.text_queue.needs_no_slot
            if needs_no_slot:
                self._loop.interrupts.interrupt_unless_shared()
            elif stream.waiting:
                self._loop.interrupts.note_opened()
            else:
                self._loop.wakeup.set()
        elif stream.starved:
            self._loop.interrupts.interrupt()
        else:
            self._loop.wakeup.set()

    @property
    def running(self) -> bool:
        """Whether the engine was neither closed nor has failed."""
        return not self._loop.closed

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._loop.scheduler.streams)

    @property
    def num_free_slots(self) -> int:
        """Number of slots without a stream."""
        return self._loop.scheduler.num_free_slots

    @property
    def frame_step_s(self) -> float:
        """Predicted seconds of a frame of the streams of the last step; 0 before one."""
        return self._loop.scheduler.deadlines.times.last_frame_s

    def close(self) -> None:
        """Cancels every session and stops the thread; may be called twice."""
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


@torch.inference_mode()
def _state_after(decoder: Decoder, vocoder: Vocoder, codes: bytes, num_groups: int) -> Any:
    """Returns the vocoder's state after a recording.

    Args:
        decoder: Decodes the recording.
        vocoder: Prepares the state.
        codes: The recording's codes [frames, groups] int64, as bytes, so that they can be a key.
        num_groups: Codes of a frame.
    """
    state = decoder.start()
    recording = torch.tensor(np.frombuffer(codes, np.int64).reshape(-1, num_groups))
    for frames in recording.to(state.position.device).split(_RECORDING_FRAMES):
        _, state = decoder.decode(frames[None], state)
    return vocoder.prepare_state(state)
