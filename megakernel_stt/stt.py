"""`STT`, the main class of the public API: loads a model, transcribes, opens streams."""

import asyncio
import logging
import math
import os
import time
from functools import partial
from itertools import chain, islice

import torch

from megakernel_common.checks import check_type
from megakernel_common.device_arbiter import device_arbiter
from megakernel_common.devices import pick_device
from megakernel_common.errors import EngineClosedError
from megakernel_common.kernels.loader import obstacle
from megakernel_common.process import check_torch, detect_forks
from megakernel_common.threads import compute_threads
from megakernel_stt.audio import Wav, read_blocks
from megakernel_stt.engine.engine import Engine
from megakernel_stt.engine.recogniser import OfflineRecogniser, Recogniser, StreamingRecogniser
from megakernel_stt.engine.slot_recogniser import SlotRecognisers
from megakernel_stt.engine.stream import Stream
from megakernel_stt.errors import LanguageError, LookaheadError
from megakernel_stt.kernels.conformer import (
    ConformerKernels,
    conformer_obstacle,
    load_conformer,
)
from megakernel_stt.kernels.transducer import (
    KernelTransducer,
    kernel_obstacle,
    load_transducer,
)
from megakernel_stt.model.checkpoint import Model, load_model
from megakernel_stt.model.config import AUTO, FRAME_S, SAMPLE_RATE
from megakernel_stt.model.hub import find_model
from megakernel_stt.network.transducer import Transducer
from megakernel_stt.session import EventQueue, Final, Inbox, Session
from megakernel_stt.transcript import Transcript

detect_forks()
_log = logging.getLogger("megakernel_stt")
_FRAME_MS = round(1000 * FRAME_S)
_MAX_WAITING_S = 60.0  # of a recording's audio ahead of the model
_PACKET_SIZE = SAMPLE_RATE // 50  # of the warm-up: 20 ms, the usual packet of a call
_NUM_FINALS, _MIN_FINALS = 100, 5  # that the warm-up measures for each lookahead
_MEASURING_S = 0.5  # after which it measures no more than the minimum


class STT:
    """A loaded model and its engine. Use `STT.load`; close it, or use it in a `with` block.

    Any number of threads and tasks may use one STT. As many sessions as it has slots can be open.
    """

    def __init__(self, model: Model, slots: int, name: str) -> None:
        self._model = model
        self._name = name
        self._final_latencies_s: dict[int | None, float] = {}  # as the keys of `_recognisers`
        # By lookahead in milliseconds; None for the one of an offline model.
        with torch.inference_mode():
            self._recognisers = _make_recognisers(model, slots)
        device = model.weights.transducer.embedding.device
        num_compute_threads = compute_threads(model.weights, device)
        self._engine = Engine(
            slots, device_arbiter(device), num_compute_threads=num_compute_threads
        )

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "demo",
        device: str = "auto",
        dtype: str = "auto",
        slots: int = 8,
    ) -> "STT":
        """Loads a model.

        Args:
            model: `demo`, the built-in model for English; a folder that transformers saved, a
                `.nemo` file, or a hub id (`owner/name`, `owner/name@revision`).
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            dtype: `auto` (bfloat16 on a GPU, float32 on a CPU), `bfloat16` or `float32`.
            slots: Number of sessions that can be open at once.

        Raises:
            CheckpointError: The model is missing or broken.
            ValueError: There is no such device or dtype, or no slot.
            ForkedProcessError: This process was forked after torch had run in its parent.
            TypeError: An argument has another type.
        """
        check_type("model", model, (str, os.PathLike), "demo, a folder, a .nemo file or a hub id")
        check_type("device", device, (str, torch.device), "auto, cpu, cuda or cuda:N")
        check_type("slots", slots, int, "a whole number")
        if slots < 1:
            raise ValueError(f"slots is {slots}; at least one session must be able to open.")
        path = find_model(model)
        check_torch()
        torch_device = pick_device(device)
        loaded = load_model(path, torch_device, _pick_dtype(dtype, torch_device))
        _log.info("%s on %s", model, torch_device)
        return cls(loaded, slots, os.fspath(model))

    @property
    def name(self) -> str:
        """The name under which the model was loaded."""
        return self._name

    @property
    def languages(self) -> tuple[str, ...]:
        """Values of `language` besides `auto`; empty if the model takes none."""
        return self._model.config.languages

    @property
    def lookaheads_ms(self) -> tuple[int, ...]:
        """Values of `lookahead_ms`, ascending; empty for an offline model."""
        return tuple(key for key in self._recognisers if key is not None)

    @property
    def slots(self) -> int:
        """Number of sessions that can be open at once."""
        return self._engine.slots

    @property
    def running(self) -> bool:
        """Whether the engine can recognise: it was not closed and has not failed."""
        return self._engine.running

    @property
    def warm(self) -> bool:
        """Whether `warmup` was done."""
        return len(self._final_latencies_s) == len(self._recognisers)

    def final_latency_s(self, lookahead_ms: int = 160) -> float | None:
        """Seconds from `Session.finalize` to its `Final`, of one stream.

        Args:
            lookahead_ms: As in `open`.

        Returns:
            The 99th percentile of the results of `warmup`; None before it.

        Raises:
            LookaheadError: The model has no such lookahead.
        """
        return self._final_latencies_s.get(self._key(lookahead_ms))

    def transcribe(
        self, wav: Wav, language: str = AUTO, lookahead_ms: int | None = None
    ) -> Transcript:
        """Recognises a recording. Waits for a slot if all are in use.

        Args:
            wav: A path or open file that soundfile reads, or (samples, rate) with 16-bit integers
                or floats [samples] or [samples, channels].
            language: One of the model's languages, or `auto`.
            lookahead_ms: As in `open`; None for the longest, which is the most accurate.

        Raises:
            AudioError: The recording is not readable.
            LanguageError: The model has no such language.
            LookaheadError: The model has no such lookahead.
            RecognitionError: Recognition failed, or an offline model's recording is too long.
            EngineClosedError: The model was closed.
            ForkedProcessError: This process was forked after the model was loaded.
        """
        if lookahead_ms is None and self.lookaheads_ms:
            lookahead_ms = self.lookaheads_ms[-1]
        blocks = read_blocks(wav)
        first = tuple(islice(blocks, 1))  # what is not readable is refused before it waits
        session, inbox = self._open(language, lookahead_ms, wait=True)
        with session:
            for samples, sample_rate in chain(first, blocks):
                inbox.wait_below(_MAX_WAITING_S)
                session.push(samples, sample_rate)
            session.end()
            for event in session:
                if isinstance(event, Final):
                    return event.transcript
        raise EngineClosedError("The engine was closed while the recording was transcribed.")

    def open(self, language: str = AUTO, lookahead_ms: int = 160) -> Session:
        """Opens a session for audio that arrives.

        Args:
            language: One of the model's languages, or `auto`.
            lookahead_ms: Length of a chunk, after which partial results come: one of
                `lookaheads_ms`. Longer chunks are more accurate. `Session.finalize` does not wait
                for one. An offline model ignores it and has no partial results.

        Raises:
            LanguageError: The model has no such language.
            LookaheadError: The model has no such lookahead.
            EngineBusyError: All slots are in use.
            EngineClosedError: The model was closed.
            ForkedProcessError: This process was forked after the model was loaded.
        """
        return self._open(language, lookahead_ms, wait=False)[0]

    def warmup(self) -> None:
        """Runs every lookahead, so that the first session has full speed. Waits for a slot.

        Measures `final_latency_s`. Logs a warning if one stream is slower than real time on this
        machine.
        """
        silence = torch.zeros(2 * SAMPLE_RATE).numpy()
        for lookahead_ms in self._recognisers:
            self.transcribe((silence, SAMPLE_RATE), lookahead_ms=lookahead_ms)
            start = time.perf_counter()
            self.transcribe((silence, SAMPLE_RATE), lookahead_ms=lookahead_ms)
            elapsed_s = time.perf_counter() - start
            if elapsed_s > 2.0:
                _log.warning(
                    "With a lookahead of %s ms, 2 s of audio took %.1f s: this machine is slower "
                    "than real time.",
                    lookahead_ms,
                    elapsed_s,
                )
            self._final_latencies_s[lookahead_ms] = self._measure_finals(lookahead_ms)

    def _measure_finals(self, lookahead_ms: int | None) -> float:
        """The 99th percentile of seconds to a final result, requested at every phase of a chunk."""
        packet = torch.zeros(_PACKET_SIZE).numpy()
        session, _ = self._open(AUTO, lookahead_ms, wait=True)
        latencies_s, begin = list[float](), time.perf_counter()
        with session:
            events = iter(session)
            while len(latencies_s) < _NUM_FINALS:
                start = time.perf_counter()
                if start - begin > _MEASURING_S and len(latencies_s) >= _MIN_FINALS:
                    break
                session.push(packet, SAMPLE_RATE)
                session.finalize()
                next(event for event in events if isinstance(event, Final))
                latencies_s.append(time.perf_counter() - start)
        return sorted(latencies_s)[math.ceil(0.99 * len(latencies_s)) - 1]

    async def awarmup(self) -> None:
        """As `warmup`, on another thread than the event loop's."""
        await asyncio.to_thread(self.warmup)

    def close(self) -> None:
        """Ends every session and stops the engine; may be called twice."""
        self._engine.close()

    def __enter__(self) -> "STT":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(
        self, language: str, lookahead_ms: int | None, *, wait: bool
    ) -> tuple[Session, Inbox]:
        prompt = self._prompt(language)
        recogniser = self._recognisers[self._key(lookahead_ms)]

        def make(inbox: Inbox, events: EventQueue) -> Stream:
            # What waits for a slot is a recording or the warm-up.
            return Stream(recogniser, prompt, inbox, events, live=not wait)

        return self._engine.open(make, wait=wait)

    def _key(self, lookahead_ms: int | None) -> int | None:
        """The key of a lookahead's recogniser.

        Raises:
            LookaheadError: The model has no such lookahead.
        """
        if not self.lookaheads_ms:
            return None
        if lookahead_ms not in self._recognisers:
            values = ", ".join(str(value) for value in self.lookaheads_ms)
            raise LookaheadError(
                f"lookahead_ms is {lookahead_ms!r}; the model was trained with {values}."
            )
        return lookahead_ms

    def _prompt(self, language: str) -> int:
        """The index of a language."""
        prompt = self._model.config.prompt
        if prompt is None:
            if language == AUTO:
                return 0
            raise LanguageError(
                f"language is {language!r}; this model takes auto only, because it has no language "
                "prompt."
            )
        if language not in prompt.ids:
            raise LanguageError(
                f"language is {language!r}; choose auto or one of {', '.join(self.languages)}."
            )
        return prompt.ids[language]


def _make_recognisers(model: Model, slots: int) -> dict[int | None, Recogniser]:
    """The recognisers of a model, by lookahead in milliseconds; None for an offline one."""
    streaming, transducer = model.config.encoder.streaming, _make_transducer(model)
    if streaming is None:
        return {None: OfflineRecogniser(model, transducer)}
    make = partial(StreamingRecogniser, model, transducer)
    if isinstance(transducer, KernelTransducer):
        make = SlotRecognisers(model, transducer, _make_conformer(model), slots).make
    return {(lookahead + 1) * _FRAME_MS: make(lookahead) for lookahead in streaming.lookaheads}


def _make_transducer(model: Model) -> Transducer:
    """The decoder: kernels on a GPU, if they can be compiled, else torch."""
    weights, config = model.weights.transducer, model.config.transducer
    device = weights.embedding.device
    if device.type == "cuda":
        reason = kernel_obstacle(config) or obstacle(device)
        if reason is None:
            return load_transducer(weights, config)
        _log.warning("Recognition runs without its kernels, which is slower: %s", reason)
    return Transducer(weights, config)


def _make_conformer(model: Model) -> ConformerKernels | None:
    """The kernels of a streaming encoder on a GPU, if they fit."""
    config = model.config.encoder
    reason = conformer_obstacle(config)
    if reason is not None:
        _log.warning("The encoder runs without its kernels, which is slower: %s", reason)
        return None
    return load_conformer(model.weights.encoder, config)


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type to compute in; `auto` is bfloat16 on a GPU, else float32.

    Raises:
        ValueError: Another type.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype is {dtype!r}; choose auto, bfloat16 or float32.")
    return getattr(torch, dtype)
