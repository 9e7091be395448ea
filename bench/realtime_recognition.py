"""Real-time streams of recognition: audio arrives in jittered packets, as in calls.

All sessions are of one `STT`, and one event loop pushes their packets and reads their results, as a
server does. The latency of a result is measured from the arrival of the packet that completes its
chunk, a moment that is fixed before the run: late pushes count. Only chunks with new tokens have a
result; one that is replaced by a later one before it is read has the later one's time.

python -m bench.realtime_recognition --simulated --streams 250,500,1000 --json FILE
python -m bench.realtime_recognition --streams 250,500,1000 --json FILE     # on a GPU

The model has the released size and random weights, with a bias of blank that gives 0.35 tokens per
frame. With --simulated a step takes a fixed time on no GPU: what remains is work of the host.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from bench.recognition import TOKENS_PER_FRAME, calibrated, encoder_frames, noise, numbers
from bench.report import write
from megakernel_stt import STT, Partial, Session
from megakernel_stt.engine.recogniser import Chunks, StreamingRecogniser
from megakernel_stt.engine.slot_recogniser import SlotRecognisers
from megakernel_stt.kernels.conformer import load_conformer
from megakernel_stt.kernels.transducer import load_transducer
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import FRAME_S, MELS_PER_FRAME, SAMPLE_RATE
from megakernel_stt.model.random_checkpoint import RELEASED_SIZE, Size, random_model
from megakernel_stt.network.encoder import NUM_MISSING
from megakernel_stt.network.features import samples_until
from megakernel_stt.network.transducer import Emission, Transducer

_PACKET_S = 0.02
_CALIBRATION_CHUNKS = 50
_TICK_S = 0.001  # shortest pause between pushes; an event loop that sleeps for each takes longer
_MOST_PUSHES = 64  # between two turns of the readers


class SimulatedRecogniser(StreamingRecogniser):
    """A recogniser whose step takes a fixed time, and whose tokens are random."""

    def __init__(self, model: Model, lookahead: int, step_s: tuple[float, float]) -> None:
        """Prepares it.

        Args:
            model: For the sizes of chunks and the ids of tokens.
            lookahead: Frames of a chunk after its first.
            step_s: Seconds of a step, and of each of its streams.
        """
        decoder = Transducer(model.weights.transducer, model.config.transducer)
        super().__init__(model, decoder, lookahead)
        self._step_s = step_s

    def compute(self, chunks: Chunks, states: list[Any]) -> tuple[list[Any], list[list[Emission]]]:
        """Waits as for a GPU; see `ChunkRecogniser.compute`."""
        fixed_s, stream_s = self._step_s
        time.sleep(fixed_s + stream_s * len(states))
        rng, size = np.random.default_rng(chunks.firsts[0]), self.encoder.chunk_size
        emitted = rng.random((len(states), size)) < TOKENS_PER_FRAME
        found = [
            [Emission(1, first + int(i), 1, 1.0) for i in np.flatnonzero(row)]
            for first, row in zip(chunks.firsts, emitted, strict=True)
        ]
        return states, found


def simulated_stt(slots: int, step_s: tuple[float, float]) -> STT:
    """An `STT` without a GPU, whose steps take a fixed time."""
    model = random_model("streaming", Size(), torch.device("cpu"), torch.float32)
    stt, streaming = STT(model, slots, "simulated"), model.config.encoder.streaming
    assert streaming is not None
    for lookahead in streaming.lookaheads:
        ms = round(1000 * FRAME_S * (lookahead + 1))
        stt._recognisers[ms] = SimulatedRecogniser(model, lookahead, step_s)
    return stt


def random_stt(slots: int, lookahead_ms: int) -> STT:
    """An `STT` of the released size on a GPU, calibrated for chunks of this length."""
    with torch.inference_mode():
        model = random_model("streaming", RELEASED_SIZE, torch.device("cuda"), torch.bfloat16)
        config = model.config.transducer
        conformer = load_conformer(model.weights.encoder, model.config.encoder)
        decoder = load_transducer(model.weights.transducer, config)
        lookahead = round(lookahead_ms / 1000 / FRAME_S) - 1
        plain = SlotRecognisers(model, decoder, conformer, 1).make(lookahead)
        frames = encoder_frames(model, plain, _CALIBRATION_CHUNKS)
        weights, _ = calibrated(model.weights.transducer, config, frames, load_transducer)
    return STT(replace(model, weights=replace(model.weights, transducer=weights)), slots, "random")


def arrivals(
    num_streams: int, seconds: float, jitter_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Times [streams, packets] at which packets arrive, in seconds; those of a stream in order."""
    num_packets = round(seconds / _PACKET_S)
    recorded = rng.uniform(0, 0.5, (num_streams, 1)) + _PACKET_S * np.arange(1, num_packets + 1)
    late = rng.uniform(0, jitter_s, (num_streams, num_packets))
    return np.maximum.accumulate(recorded + late, 1)


async def run(
    stt: STT, num_streams: int, seconds: float, jitter_s: float, lookahead_ms: int, seed: int = 0
) -> dict[str, Any]:
    """Runs streams in real time.

    Returns:
        Latencies of results, delays of pushes, tokens per frame and the host's CPU time.
    """
    rng = np.random.default_rng(seed)
    times = arrivals(num_streams, seconds, jitter_s, rng)
    size = round(_PACKET_S * SAMPLE_RATE)
    speech = (32767 * noise(seconds + 1, seed)).astype(np.int16)
    offsets = rng.integers(0, SAMPLE_RATE, num_streams)
    order = np.argsort(times, axis=None)
    sessions = [stt.open(lookahead_ms=lookahead_ms) for _ in range(num_streams)]
    latencies_s, delays_s, num_tokens = list[float](), list[float](), [0] * num_streams
    frames_per_chunk = round(lookahead_ms / 1000 / FRAME_S)
    begin_s = time.perf_counter() + 0.2

    async def read(stream: int, session: Session) -> None:
        async for event in session:
            if isinstance(event, Partial):
                now_s, tokens = time.perf_counter() - begin_s, event.transcript.tokens
                new = tokens[num_tokens[stream] :]
                for chunk in {round(t.start / FRAME_S) // frames_per_chunk for t in new}:
                    end = (chunk + 1) * frames_per_chunk
                    num_samples = samples_until(end * MELS_PER_FRAME - NUM_MISSING)
                    packet = min(-(-num_samples // size), times.shape[1]) - 1
                    latencies_s.append(now_s - times[stream, packet])
                num_tokens[stream] = len(tokens)

    readers = [asyncio.create_task(read(i, one)) for i, one in enumerate(sessions)]
    begin_cpu_s = time.process_time()
    for index in tqdm(order.tolist(), desc=f"{num_streams} streams", disable=None, mininterval=1):
        stream, packet = divmod(index, times.shape[1])
        due_s = begin_s + float(times[stream, packet])
        if (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(max(left_s, _TICK_S))
        elif len(delays_s) % _MOST_PUSHES == 0:
            await asyncio.sleep(0)  # readers run also while packets are late
        start = offsets[stream] + packet * size
        sessions[stream].push(speech[start : start + size], SAMPLE_RATE)
        delays_s.append(time.perf_counter() - due_s)
    elapsed_s = time.perf_counter() - begin_s
    cores = (time.process_time() - begin_cpu_s) / elapsed_s
    for session in sessions:
        session.end()
    await asyncio.gather(*readers)
    return {
        "streams": num_streams,
        "results": len(latencies_s),
        "latency_ms": _percentiles(latencies_s),
        "push_delay_ms": _percentiles(delays_s),
        "tokens_per_frame": round(float(np.mean(num_tokens)) / (seconds / FRAME_S), 3),
        "host_cores": round(cores, 3),
    }


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(1000 * float(np.percentile(values_s, q)), 2) for q in (50, 95, 99)}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=numbers, default=[250, 500, 1000], metavar="N,N")
    parser.add_argument("--seconds", type=float, default=20.0, help="of audio (default: 20)")
    parser.add_argument("--lookahead-ms", type=int, default=320, help="of a chunk (default: 320)")
    parser.add_argument("--jitter-ms", type=float, default=20.0, help="latest (default: 20)")
    parser.add_argument("--simulated", action="store_true", help="a device with fixed times")
    parser.add_argument("--step-ms", type=float, default=2.0, help="of it (default: 2)")
    parser.add_argument("--stream-ms", type=float, default=0.05, help="of it (default: 0.05)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    options = parser.parse_args()
    rows = list[dict[str, object]]()
    slots = max(options.streams)
    if options.simulated:
        stt = simulated_stt(slots, (options.step_ms / 1000, options.stream_ms / 1000))
    else:
        stt = random_stt(slots, options.lookahead_ms)
        stt.warmup()
    with stt:
        for num_streams in options.streams:
            gc.collect()
            gc.freeze()
            arguments = options.seconds, options.jitter_ms / 1000, options.lookahead_ms
            rows.append(asyncio.run(run(stt, num_streams, *arguments)))
            print(rows[-1], flush=True)
    conditions: dict[str, object] = {
        "command": f"bench.realtime_recognition{' --simulated' * options.simulated}",
        "chunk_ms": options.lookahead_ms,
        "packet_ms": 1000 * _PACKET_S,
        "jitter_ms": options.jitter_ms,
        "seconds": options.seconds,
    }
    if options.simulated:
        conditions |= {"step_ms": options.step_ms, "stream_ms": options.stream_ms}
    else:
        conditions["gpu"] = torch.cuda.get_device_name()
    write(conditions | {"rows": rows}, options.json, ("torch",))


if __name__ == "__main__":
    main()
