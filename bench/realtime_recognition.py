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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.microphones import PACKET_S, Microphones, percentiles_ms
from bench.recognition import TOKENS_PER_FRAME, calibrated, encoder_frames, numbers
from bench.report import write
from megakernel_stt import STT
from megakernel_stt.engine.recogniser import Chunks, StreamingRecogniser
from megakernel_stt.engine.slot_recogniser import SlotRecognisers
from megakernel_stt.kernels.conformer import load_conformer
from megakernel_stt.kernels.transducer import load_transducer
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import FRAME_S
from megakernel_stt.model.random_checkpoint import RELEASED_SIZE, Size, random_model
from megakernel_stt.network.transducer import Emission, Transducer

_CALIBRATION_CHUNKS = 50


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


async def run(
    stt: STT, num_streams: int, seconds: float, jitter_s: float, lookahead_ms: int, seed: int = 0
) -> dict[str, Any]:
    """Runs streams in real time.

    Returns:
        Latencies of results, delays of pushes, tokens per frame and the host's CPU time.
    """
    sessions = [stt.open(lookahead_ms=lookahead_ms) for _ in range(num_streams)]
    microphones = Microphones(sessions, lookahead_ms, seconds, jitter_s, seed)
    begin_s, begin_cpu_s = time.perf_counter() + 0.2, time.process_time()
    await microphones.run(begin_s)
    cores = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
    return {
        "streams": num_streams,
        "results": len(microphones.latencies_s),
        "latency_ms": percentiles_ms(microphones.latencies_s, 50, 95, 99),
        "push_delay_ms": percentiles_ms(microphones.push_delays_s, 50, 95, 99),
        "tokens_per_frame": round(microphones.tokens_per_frame, 3),
        "host_cores": round(cores, 3),
    }


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
        "packet_ms": 1000 * PACKET_S,
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
