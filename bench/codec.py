"""Times the codec's kernels and the decoder in plain torch, eager and as a CUDA graph.

The codec has the released size and random weights. A call is timed by the host's clock, from codes
in host memory to samples in host memory. Graphs are timed with CUDA events.

python -m bench.codec --json bench/results/codec.json
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.events import event_times
from bench.report import write
from megakernel_common.layers import exact_convolutions
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder, DecodeRequest
from megakernel_tts.model.random_released import random_codec_weights

_STREAMS = (1, 8, 64)
_FRAMES = (1, 2, 4, 8)
_SLOTS = 64
_REPEATS = 100
_WARM_FRAMES = 80  # more than the attention window has


def _codes(frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2048, (frames, 16), generator=generator)


def _summary(times: list[float]) -> dict[str, float]:
    """Median and 95th percentile of milliseconds."""
    return {"p50": round(median(times), 3), "p95": round(quantiles(times, n=20)[-1], 3)}


def _time_calls(act: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call that waits for its result."""
    times = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        act()
        times.append(1e3 * (time.perf_counter() - start_s))
    return _summary(times)


def _time_on_device(act: Callable[[], object]) -> dict[str, float]:
    """Milliseconds on the GPU, by CUDA events."""
    return _summary(event_times(act, _REPEATS))


def _time_kernel_calls(decoder: CudaDecoder, streams: int, frames: int) -> dict[str, float]:
    for slot in range(streams):
        decoder.load_slot(slot)
    requests = [DecodeRequest(slot, _codes(frames, slot)) for slot in range(streams)]
    decoder.decode(requests)()
    return _time_calls(lambda: decoder.decode(requests)())


def _time_torch(decoder: Decoder, frames: int) -> dict[str, dict[str, float]]:
    """One stream in plain torch: eager with samples on the host, and as a graph on the GPU."""
    codes, state = _codes(frames, 0)[None].cuda(), decoder.start()

    def call() -> Tensor:
        wave, _ = decoder.decode(codes, state)
        return wave.cpu()

    call()
    eager = _time_calls(call)
    graph = torch.cuda.CUDAGraph()
    with exact_convolutions(codes.device), torch.cuda.graph(graph):
        decoder._decode(codes, state)
    graph.replay()
    return {"eager": eager, "graph": _time_on_device(graph.replay)}


def _graph_of_call(decoder: CudaDecoder, frames: int) -> Callable[[], None]:
    """The graph of a call, of one frame of each stream, or of several of all slots.

    The streams have full attention windows.
    """
    streams = min(frames, _SLOTS)
    for count in (_WARM_FRAMES, frames // streams):
        decoder.decode([DecodeRequest(slot, _codes(count, slot)) for slot in range(streams)])()
    return decoder.graphs(frames)[0].replay


def _time_stages(decoder: CudaDecoder, frames: int) -> dict[str, float]:
    """Microseconds per stage: from the end of the previous kernel to the end of its last kernel."""
    replay = _graph_of_call(decoder, frames)
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        replay()
        torch.cuda.synchronize()
    on_gpu = (e for e in profiled.events() or [] if e.device_type.name == "CUDA")
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_gpu)
    stages = decoder.stages(frames)
    assert len(spans) == len(stages), (
        "the profiler recorded fewer kernels than the decoder launches"
    )
    taken = dict.fromkeys(stages, 0.0)
    before = spans[0][0]
    for stage, (_, end) in zip(stages, spans, strict=True):
        taken[stage] += end - before
        before = end
    return {stage: round(t, 1) for stage, t in taken.items()}


def _batched_equals_solo(decoder: CudaDecoder) -> bool:
    """Whether all slots at once, in chunks of 1, 2, 4 and 8 frames, have the bits of a solo one."""
    codes = [_codes(15, slot) for slot in range(_SLOTS)]
    solo: list[bytes] = []
    for slot in range(_SLOTS):
        decoder.load_slot(slot)
        solo.append(_decoded(decoder, {slot: codes[slot]})[slot])
        decoder.load_slot(slot)
    batched = dict.fromkeys(range(_SLOTS), b"")
    for start, end in ((0, 1), (1, 3), (3, 7), (7, 15)):
        made = _decoded(decoder, {slot: codes[slot][start:end] for slot in range(_SLOTS)})
        batched = {slot: batched[slot] + made[slot] for slot in range(_SLOTS)}
    return [batched[slot] for slot in range(_SLOTS)] == solo


def _decoded(decoder: CudaDecoder, codes: dict[int, Tensor]) -> dict[int, bytes]:
    """The samples of each slot as bytes."""
    made = decoder.decode([DecodeRequest(slot, c) for slot, c in codes.items()])()
    assert all(samples is not None for samples in made)
    return {slot: s.tobytes() for slot, s in zip(codes, made, strict=True) if s is not None}


def _signal_to_noise(decoder: CudaDecoder, reference: Decoder) -> dict[str, float]:
    """Signal to noise ratio against plain torch in float32, with and without the constant part."""
    codes = _codes(100, 0)
    decoder.load_slot(0)
    (samples,) = decoder.decode([DecodeRequest(0, codes)])()
    assert samples is not None
    wave = reference.decode(codes[None].cuda(), reference.start())[0][0].cpu().numpy()
    error = samples / 32767.0 - wave
    rms_error = float(np.sqrt(np.square(error).mean()))
    return {
        "db": round(20 * math.log10(float(np.sqrt(np.square(wave).mean())) / rms_error), 1),
        "db_without_mean": round(20 * math.log10(float(wave.std()) / float(error.std())), 1),
    }


@torch.inference_mode()
def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--torch", action="store_true", help="time the decoder in plain torch too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights, config = random_codec_weights(Path(folder) / "config.json", seed=0)
    decoder, reference = CudaDecoder(weights, config, slots=_SLOTS), Decoder(weights, config)
    start_s = time.perf_counter()
    decoder.warmup()
    warmup_s = time.perf_counter() - start_s
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.codec",
        "warmup_s": round(warmup_s, 2),
        "batched_equals_solo": _batched_equals_solo(decoder),
        "memory_mb": round(torch.cuda.max_memory_allocated() / 1e6),
        "state_mb": round(decoder.state_bytes / 1e6, 2),
        "call_ms_by_streams_and_frames": {
            s: {f: _time_kernel_calls(decoder, s, f) for f in _FRAMES} for s in _STREAMS
        },
        "graph_ms_by_frames": {
            f: _time_on_device(_graph_of_call(decoder, f))
            for f in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        },
        "stages_us_by_frames": {f: _time_stages(decoder, f) for f in (1, 8, 64, 256)},
        "plain_torch_ms_by_frames": (
            {f: _time_torch(reference, f) for f in _FRAMES} if arguments.torch else None
        ),
        "signal_to_noise": _signal_to_noise(decoder, reference),
    }
    write(figures, arguments.json, packages=("torch",))


if __name__ == "__main__":
    main()
