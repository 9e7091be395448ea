"""Recognition and synthesis beside each other on one GPU, as a voice agent uses them.

Each conversation pushes audio to a session of recognition all the time: packets of 20 ms that
arrive with jitter. Its turns follow each other: the user speaks for 1 to 4 s, a final result is
requested, and when it is there, speech of 4 s is synthesised and played from its first chunk on.
The same conversations run three times in one process: with recognition only, synthesis only, both.

python -m bench.conversations --json FILE                          # on a GPU, about 90 s
python -m bench.conversations --model 1.7B --duration 60 --json FILE
python -m bench.conversations --simulated                          # without a GPU

audio to tokens     from the push of the packet that completes a chunk to the end of its step, of
                    every chunk; "beside synthesis" are those whose step ended while speech was
                    synthesised; this takes less time than its playback
audio to result     from the arrival of this packet to the reading of new tokens on the event loop,
                    as in bench.realtime_recognition
finalize to Final   from the call to the reading of the result
first chunk         from the request to the reading of its first audio
underruns           chunks of audio that come after the audio before them was played

Targets: audio to tokens of chunks of 80 ms p99 5 ms (one conversation: 2 ms), every Final within 30
ms, first chunk p95 100 ms (--p95-ms, as in bench.scaling), no underrun. The models have the
released sizes and random weights; that of recognition has a bias of blank for 0.35 tokens per
frame. With --simulated, steps and frames take fixed times on devices that do not share anything:
what remains is work of the host.
"""

import argparse
import asyncio
import faulthandler
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

from bench.conversation_figures import (
    ConversationFigures,
    RecognitionFigures,
    SynthesisFigures,
    Targets,
    percentiles,
    table,
)
from bench.microphones import PACKET_S, Microphones
from bench.realtime_recognition import random_stt, simulated_stt
from bench.report import write
from bench.simulation import simulated_tts
from bench.step_timer import StepTimer, timed_steps
from megakernel_common.files import check_output
from megakernel_stt import STT
from megakernel_tts import TTS, AudioChunk, ChunkPolicy
from megakernel_tts.bench.benchmark import ARRIVALS_TEXT, RANDOM_FRAMES
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.playback import PlaybackGaps
from megakernel_tts.cli.console import file_path, positive_integer, positive_number
from megakernel_tts.model.random_released import SIZES, write_released_checkpoint
from megakernel_tts.session import FRAME_S
from megakernel_tts.speech import outcome

_SPEECH_S = (1.0, 4.0)  # of the user in a turn: shortest and longest
_REPLY_FRAMES = RANDOM_FRAMES
_LOOKAHEADS_MS = (80, 160, 320, 560, 1120)  # of the random checkpoint
_START_DELAY_S = 0.2  # until every task has started
_BUILD_TIMEOUT_S = 300.0  # of kernels, weights, graphs and warm-up
_RUN_TIMEOUT_S = 60.0  # of a run, beyond its duration


@dataclass(frozen=True)
class Workload:
    """What the conversations do; the same in every run.

    Attributes:
        conversations: Number of conversations.
        duration_s: Seconds of a run.
        lookahead_ms: Length of a chunk of recognition.
        jitter_s: Longest delay of a packet.
        speech_s: Shortest and longest speech of the user in a turn, in seconds.
        reply_frames: Frames of the speech that answers it.
        largest_chunk: Frames of a chunk of synthesis at most. A launch makes one chunk of each
            stream, and a chunk of recognition waits for its end.
    """

    conversations: int
    duration_s: float
    lookahead_ms: int
    jitter_s: float
    speech_s: tuple[float, float]
    reply_frames: int
    largest_chunk: int

    @property
    def reply_s(self) -> float:
        """Seconds of the speech that answers the user."""
        return self.reply_frames * FRAME_S


@dataclass
class TurnTimes:
    """Times of the turns of all conversations, in seconds.

    Attributes:
        finals_s: From a request for a final result to the result.
        first_chunks_s: From a request for speech to its first chunk.
        playbacks: Of every speech.
        syntheses_s: Request and last audio of every speech, in seconds of `perf_counter`.
        audio_s: Seconds of audio of all speech.
    """

    finals_s: list[float] = field(default_factory=list[float])
    first_chunks_s: list[float] = field(default_factory=list[float])
    playbacks: list[PlaybackGaps] = field(default_factory=list[PlaybackGaps])
    syntheses_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    audio_s: float = 0.0


async def converse(
    workload: Workload,
    conversation: int,
    start_s: float,
    microphones: Microphones | None,
    tts: TTS | None,
    times: TurnTimes,
) -> None:
    """Runs the turns of one conversation that end within the duration.

    Args:
        workload: What it does.
        conversation: Its index.
        start_s: The start, in seconds of `perf_counter`.
        microphones: Of all conversations; None without recognition.
        tts: None without synthesis; a reply is then a pause of its length.
        times: Receives the times.
    """
    rng = np.random.default_rng((0, conversation))
    for turn in count():
        spoken_s = max(perf_counter() - start_s, 0.0) + rng.uniform(*workload.speech_s)
        if spoken_s + workload.reply_s > workload.duration_s:
            return
        await asyncio.sleep(start_s + spoken_s - perf_counter())
        if microphones is not None:
            requested_s = perf_counter()
            await microphones.finalize(conversation)
            times.finals_s.append(perf_counter() - requested_s)
        if tts is None:
            await asyncio.sleep(workload.reply_s)
        else:
            await _reply(tts, workload, (conversation << 16) + turn, times)


async def _reply(tts: TTS, workload: Workload, seed: int, times: TurnTimes) -> None:
    """Synthesises speech, reads its chunks as they come, and waits until all are played."""
    playback, audio_s, first_s = PlaybackGaps(), 0.0, None
    sampling = replace(tts.sampling, seed=seed, max_frames=workload.reply_frames, guard=False)
    chunks = ChunkPolicy(largest=workload.largest_chunk)
    requested_s = perf_counter()
    with await tts.aopen(sampling=sampling, chunks=chunks, text=ARRIVALS_TEXT) as session:
        async for event in session:
            if isinstance(event, AudioChunk):
                now_s, chunk_s = perf_counter(), len(event.pcm) / event.sample_rate
                first_s = now_s if first_s is None else first_s
                playback.add(now_s, chunk_s)
                audio_s += chunk_s
    outcome(session)  # raises an error of the stream
    times.playbacks.append(playback)
    times.syntheses_s.append((requested_s, perf_counter()))
    times.audio_s += audio_s
    if first_s is not None:
        times.first_chunks_s.append(first_s - requested_s)
        await asyncio.sleep(first_s + audio_s + sum(playback.gaps_s) - perf_counter())


async def measure(
    stt: STT | None, tts: TTS | None, workload: Workload, targets: Targets
) -> ConversationFigures:
    """Runs the conversations once.

    Args:
        stt: Warm, with a slot for each conversation; None without recognition.
        tts: The same for synthesis.
        workload: What the conversations do.
        targets: The bounds.

    Raises:
        ExceptionGroup: A session failed.
    """
    microphones, timer, times = None, None, TurnTimes()
    if stt is not None:
        with timed_steps(stt, workload.lookahead_ms) as timer:
            sessions = [
                stt.open(lookahead_ms=workload.lookahead_ms) for _ in range(workload.conversations)
            ]
        arguments = workload.lookahead_ms, workload.duration_s, workload.jitter_s
        microphones = Microphones(sessions, *arguments)
    start_s, start_cpu_s = perf_counter() + _START_DELAY_S, process_time()
    async with asyncio.TaskGroup() as tasks:
        for i in range(workload.conversations):
            tasks.create_task(converse(workload, i, start_s, microphones, tts, times))
        if microphones is not None:
            tasks.create_task(microphones.run(start_s))
    cores = (process_time() - start_cpu_s) / (perf_counter() - start_s)
    recognition = synthesis = None
    if microphones is not None and timer is not None:
        recognition = _recognition_figures(microphones, timer, start_s, times)
    if tts is not None:
        synthesis = _synthesis_figures(times)
    missed = [] if recognition is None else recognition.missed(targets)
    missed += [] if synthesis is None else synthesis.missed(targets)
    return ConversationFigures(recognition, synthesis, round(cores, 3), missed)


def _recognition_figures(
    microphones: Microphones, timer: StepTimer, start_s: float, times: TurnTimes
) -> RecognitionFigures:
    tokens_s, beside_s = list[float](), list[float]()
    for stream, num_frames, end_s in timer.steps:
        pushed_s = microphones.pushed_s[stream, microphones.packet_completing(num_frames)]
        tokens_s.append(end_s - start_s - float(pushed_s))
        if any(first_s <= end_s <= last_s for first_s, last_s in times.syntheses_s):
            beside_s.append(tokens_s[-1])
    return RecognitionFigures(
        chunks=len(tokens_s),
        audio_to_tokens_ms=percentiles(tokens_s),
        chunks_beside_synthesis=len(beside_s),
        beside_synthesis_ms=percentiles(beside_s),
        results=len(microphones.latencies_s),
        audio_to_result_ms=percentiles(microphones.latencies_s),
        push_delay_ms=percentiles(microphones.push_delays_s),
        tokens_per_frame=round(microphones.tokens_per_frame, 3),
        finals=len(times.finals_s),
        finalize_to_final_ms=percentiles(times.finals_s),
    )


def _synthesis_figures(times: TurnTimes) -> SynthesisFigures:
    gaps_s = [gap_s for playback in times.playbacks for gap_s in playback.gaps_s]
    return SynthesisFigures(
        replies=len(times.playbacks),
        first_chunk_ms=percentiles(times.first_chunks_s),
        audio_s=round(times.audio_s, 2),
        underruns=len(gaps_s),
        replies_with_underruns=sum(bool(playback.gaps_s) for playback in times.playbacks),
        longest_gap_ms=round(1000 * max(gaps_s, default=0.0), 2),
    )


def random_tts(size: str, slots: int) -> TTS:
    """A `TTS` of a released size with random weights on a GPU.

    Args:
        size: `0.6B` or `1.7B`.
        slots: Number of streams.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_released_checkpoint(Path(folder), size, torch.device("cuda"))
        return TTS.load(folder, "cuda", slots=slots)


def _make_stt(options: argparse.Namespace) -> STT:
    print("recognition: weights, kernels and graphs", flush=True)
    if options.simulated:
        return simulated_stt(
            options.conversations, (options.step_ms / 1000, options.stream_ms / 1000)
        )
    return random_stt(options.conversations, options.lookahead_ms)


def _make_tts(options: argparse.Namespace) -> TTS:
    print("synthesis: weights and kernels", flush=True)
    if options.simulated:
        return simulated_tts(options.conversations, options.frame_ms / 1000)
    return random_tts(options.model, options.conversations)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=SIZES, default="0.6B", help="size of synthesis (default: 0.6B)"
    )
    parser.add_argument(
        "--conversations", type=positive_integer, default=8, metavar="N", help="default: 8"
    )
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=20.0,
        metavar="SECONDS",
        help="of each of the three runs (default: 20)",
    )
    parser.add_argument(
        "--lookahead-ms",
        type=int,
        choices=_LOOKAHEADS_MS,
        default=80,
        help="length of a chunk of recognition (default: 80)",
    )
    parser.add_argument(
        "--jitter-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="longest delay of a packet (default: 20)",
    )
    parser.add_argument(
        "--largest-chunk",
        type=positive_integer,
        default=ChunkPolicy.largest,
        metavar="FRAMES",
        help=f"of synthesis (default: {ChunkPolicy.largest})",
    )
    parser.add_argument(
        "--p95-ms",
        type=positive_number,
        default=100.0,
        metavar="MS",
        help="target of the first chunk (default: 100)",
    )
    parser.add_argument("--simulated", action="store_true", help="devices with fixed times")
    for name, default, what in (
        ("--step-ms", 2.0, "a step of recognition"),
        ("--stream-ms", 0.05, "each of its streams"),
        ("--frame-ms", 5.0, "a frame of synthesis"),
    ):
        parser.add_argument(
            name,
            type=positive_number,
            default=default,
            metavar="MS",
            help=f"time of {what}, if simulated (default: {default:g})",
        )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="file for the figures")
    options = parser.parse_args()
    if reason := _obstacle(options):
        parser.error(reason)
    return options


def _obstacle(options: argparse.Namespace) -> str | None:
    """Why the options cannot be measured here."""
    turn_s = _SPEECH_S[1] + _REPLY_FRAMES * FRAME_S
    if options.duration < turn_s:
        return f"--duration {options.duration:g}: a turn takes up to {turn_s:g} s"
    if not 0 <= options.jitter_ms <= 1000:
        return f"--jitter-ms {options.jitter_ms:g} is not from 0 to 1000"
    if not options.simulated and not torch.cuda.is_available():
        return f"{options.model} needs a GPU; --simulated runs without one"
    if options.json is not None:
        try:
            check_output(options.json)
        except OSError as error:
            return f"--json: {error}"
    return None


def main() -> None:
    """Prints a table and all figures; writes them with --json."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # removes temporary files
    timeout_s = _BUILD_TIMEOUT_S + 3 * (options.duration + _RUN_TIMEOUT_S)
    # A wait for the GPU cannot be interrupted: this ends the process and prints all stacks.
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)  # standard error
    try:
        _measure_all(options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _measure_all(options: argparse.Namespace) -> None:
    workload = Workload(
        options.conversations,
        options.duration,
        options.lookahead_ms,
        options.jitter_ms / 1000,
        _SPEECH_S,
        _REPLY_FRAMES,
        options.largest_chunk,
    )
    targets = Targets.make(options.conversations, options.lookahead_ms, options.p95_ms)
    runs = dict[str, ConversationFigures]()
    with _make_stt(options) as stt, _make_tts(options) as tts:
        if not options.simulated:
            print("warm-up", flush=True)
            stt.warmup()
            tts.warmup()
        backend = tts._loaded.engine.backend.name
        for name, engines in (
            ("recognition", (stt, None)),
            ("synthesis", (None, tts)),
            ("both", (stt, tts)),
        ):
            print(f"{name}: {options.duration:g} s", flush=True)
            with frozen_heap():
                runs[name] = asyncio.run(measure(*engines, workload, targets))
    print(table(runs, targets), flush=True)
    conditions: dict[str, object] = {
        "command": f"bench.conversations{' --simulated' * options.simulated}",
        "model": f"{options.model}, random weights",
        "backend": backend,
        "packet_ms": 1000 * PACKET_S,
    }
    if options.simulated:
        times = {name: getattr(options, name) for name in ("step_ms", "stream_ms", "frame_ms")}
        conditions |= {"model": "simulated"} | times
    else:
        conditions["gpu"] = torch.cuda.get_device_name()
    figures = {
        "workload": asdict(workload),
        "targets": asdict(targets),
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
    write(conditions | figures, options.json, ("torch",))


if __name__ == "__main__":
    main()
