"""Speed of recognition on a GPU: chunks of a streaming model, and its decoder.

python -m bench.recognition chunk --streams 1,64 --json bench/results/recognition-chunk.json
python -m bench.recognition decode --nemo --json bench/results/recognition-decode.json

The models have the released sizes and random weights, with a bias of blank that gives 0.35 tokens
per frame. `chunk` measures from samples to tokens, and of this the CUDA graph, from its launch to
its end: features, encoder, decoder and the copies; the rest is work of the host. Packets have 20
ms. `decode` measures the decoder with its projection of frames, and beside it the decoder in
torch, which runs every operation by itself, and with --nemo NeMo's, whose loops are WHILE nodes of
a CUDA graph; docs/recognition.md says how to install it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.nemo_transducer import NemoTransducer, nemo_is_installed
from bench.report import write
from megakernel_common.checkpoint import map_leaves
from megakernel_stt.engine.slot_recogniser import SlotRecogniser, SlotRecognisers
from megakernel_stt.kernels.conformer import load_conformer
from megakernel_stt.kernels.transducer import KernelTransducer, load_transducer
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import FRAME_S, SAMPLE_RATE, TransducerConfig
from megakernel_stt.model.random_checkpoint import RELEASED_SIZE, random_model
from megakernel_stt.model.weights import TransducerWeights
from megakernel_stt.network.encoder import ENDLESS
from megakernel_stt.network.features import LogMel
from megakernel_stt.network.transducer import Transducer, TransducerState

TOKENS_PER_FRAME = 0.35
_NUM_BISECTIONS = 16  # of the bias of blank
_MAX_BIAS = 60.0
_CALIBRATION_STREAMS = 8
_NUM_WARMUPS = 20  # chunks that are not measured
_NUM_UNMEASURED = 3  # launches, the first ones
_EQUALITY = "nemo_tokens_equal_in_float32"
_PACKET_S = 0.02  # of audio, as Pipecat sends it

MakeTransducer = Callable[[TransducerWeights, TransducerConfig], Transducer]
Launches = list[Callable[[], object]]


def percentiles(times_s: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    return {f"p{q}_ms": round(1000 * float(np.percentile(times_s, q)), 4) for q in (50, 99)}


def calibrated(
    weights: TransducerWeights, config: TransducerConfig, frames: Tensor, make: MakeTransducer
) -> tuple[TransducerWeights, float]:
    """Sets the bias of blank.

    Args:
        weights: The decoder.
        config: Its sizes.
        frames: [streams, frames, hidden] of the encoder.
        make: Makes a decoder.

    Returns:
        The weights, and the tokens per frame that they give.
    """
    low, high, found, rate = -_MAX_BIAS, _MAX_BIAS, weights, 0.0
    lengths = [frames.shape[1]] * len(frames)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        assert weights.head.bias is not None
        bias = weights.head.bias.clone()
        bias[config.blank_id] += middle
        found = replace(weights, head=replace(weights.head, bias=bias))
        decoder = make(found, config)
        start = TransducerState.join([decoder.start()] * len(frames))
        tokens, _ = decoder.decode(frames, lengths, start)
        rate = sum(map(len, tokens)) / sum(lengths)
        low, high = (middle, high) if rate > TOKENS_PER_FRAME else (low, middle)
    return found, rate


def encoder_frames(model: Model, recogniser: SlotRecogniser, num_chunks: int) -> Tensor:
    """Frames [streams, frames, hidden] of so many chunks of noise."""
    encoder = recogniser.encoder
    state = type(encoder.start()).join([encoder.start()] * _CALIBRATION_STREAMS)
    like = model.weights.encoder.subsampling.linear.weight
    lengths = torch.full((_CALIBRATION_STREAMS,), ENDLESS, device=like.device)
    num_frames = num_chunks * encoder.chunk_size
    streams = [noise_mels(model, num_frames, seed) for seed in range(_CALIBRATION_STREAMS)]
    frames = []
    for i in range(num_chunks):
        mels = torch.stack([s[i * encoder.num_mels :][: encoder.num_mels] for s in streams])
        chunk, state = recogniser.encode(mels.to(like), lengths, lengths * 0, state)
        frames.append(chunk)
    return torch.cat(frames, 1)


def noise(seconds: float, seed: int) -> np.ndarray:
    """Samples of noise whose level changes every 50 ms, float32."""
    generator = np.random.default_rng(seed)
    level = np.repeat(generator.uniform(0.003, 0.3, int(seconds * 20) + 1), SAMPLE_RATE // 20)
    count = int(seconds * SAMPLE_RATE)
    return (generator.standard_normal(count) * level[:count]).astype(np.float32)


def noise_mels(model: Model, num_frames: int, seed: int) -> Tensor:
    """Features [mel frames, bins] of noise, enough for so many frames of the encoder."""
    log_mel = LogMel(model.config.encoder.num_mels, torch.device("cpu"))
    return log_mel.recording(noise(FRAME_S * num_frames + 1, seed))


def time_graphs(recogniser: SlotRecogniser) -> list[float]:
    """A list that receives the seconds of every graph that a recogniser replays from now on."""
    times_s = list[float]()

    def timed(replay: Callable[[], None]) -> Callable[[], None]:
        def measure() -> None:
            begin = time.perf_counter()
            replay()
            times_s.append(time.perf_counter() - begin)

        return measure

    for step in recogniser.steps:
        step.replay = timed(step.replay)
    return times_s


def measure_chunks(
    recogniser: SlotRecogniser, num_streams: int, num_chunks: int
) -> dict[str, object]:
    """Times of the chunks of streams that advance together.

    Args:
        recogniser: With a lookahead of 0.
        num_streams: Streams.
        num_chunks: Chunks that are measured, after some that are not.
    """
    size, packets_per_chunk = round(_PACKET_S * SAMPLE_RATE), round(FRAME_S / _PACKET_S)
    seconds = (num_chunks + _NUM_WARMUPS) * FRAME_S
    audio = [noise(seconds, seed) for seed in range(num_streams)]
    streams = [recogniser.start(0) for _ in audio]
    graph_s, all_s, host_s = time_graphs(recogniser), list[float](), list[float]()
    for i in range(num_chunks + _NUM_WARMUPS):
        starts = [(i * packets_per_chunk + k) * size for k in range(packets_per_chunk)]
        begin = time.perf_counter()
        for start in starts:
            for stream, samples in zip(streams, audio, strict=True):
                stream.add(samples[start : start + size])
        ready = [stream for stream in streams if recogniser.is_ready(stream)]
        if len(ready) == num_streams:
            recogniser.step(ready)
            if i >= _NUM_WARMUPS:
                all_s.append(time.perf_counter() - begin)
                host_s.append(all_s[-1] - graph_s[-1])
    num_frames = sum(stream.num_frames for stream in streams)
    return {
        "streams": num_streams,
        "samples_to_tokens": percentiles(all_s),
        "graph": percentiles(graph_s[-len(all_s) :]),
        "host": percentiles(host_s),
        "tokens_per_frame": round(sum(len(s.tokens) for s in streams) / num_frames, 3),
    }


def chunk(options: argparse.Namespace) -> dict[str, object]:
    """Measures chunks of 80 ms."""
    device = torch.device("cuda")
    model = random_model("streaming", RELEASED_SIZE, device, torch.bfloat16)
    config = model.config.transducer
    conformer = load_conformer(model.weights.encoder, model.config.encoder)
    decoder = load_transducer(model.weights.transducer, config)
    plain = SlotRecognisers(model, decoder, conformer, 1).make(0)
    # A random decoder does not keep its rate: it is calibrated for the chunks that are decoded.
    frames = encoder_frames(model, plain, options.chunks + _NUM_WARMUPS)
    weights, _ = calibrated(model.weights.transducer, config, frames, load_transducer)
    del plain, decoder
    model = replace(model, weights=replace(model.weights, transducer=weights))
    decoder = load_transducer(weights, config)
    rows = list[dict[str, object]]()
    for name, kernels in (("kernels", conformer), ("torch", None)):
        recogniser = SlotRecognisers(model, decoder, kernels, max(options.streams)).make(0)
        for n in options.streams:
            rows.append({"encoder": name} | measure_chunks(recogniser, n, options.chunks))
    return {"chunk_ms": round(1000 * FRAME_S), "lookahead": 0, "rows": rows}


def kernel_launches(decoder: KernelTransducer, frames: Tensor, count: int) -> Launches:
    """Launches of the decoder with its projection, each with states of its own."""
    batch, num_frames = frames.shape[:2]
    start = TransducerState.join([decoder.start()] * batch)
    slots = torch.arange(batch, dtype=torch.int32, device=frames.device)
    lengths = torch.full_like(slots, num_frames)
    states = [TransducerState.join([start]) for _ in range(count)]
    launch = decoder.launch
    return [lambda s=s: launch(decoder.project(frames), lengths, slots, slots, s) for s in states]


def nemo_launches(nemo: NemoTransducer, frames: Tensor, count: int) -> Launches:
    """Launches of NeMo's decoder with its projection."""
    lengths = torch.full((len(frames),), frames.shape[1], device=frames.device)
    return [lambda: nemo.launch(frames, lengths)] * count


def time_launches(peers: Sequence[Launches]) -> list[float]:
    """Median seconds of the launches of each decoder, by turns; the first ones are not measured."""
    times: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in peers]
    for turn in zip(*peers, strict=True):
        for launch, found in zip(turn, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch()
            end.record()
            found.append((begin, end))
    torch.cuda.synchronize()
    return [
        float(np.median([a.elapsed_time(b) / 1000 for a, b in found[_NUM_UNMEASURED:]]))
        for found in times
    ]


def decode_all(decoder: Transducer, frames: Tensor) -> list[list[tuple[int, int, int]]]:
    """Token, frame and duration of every token of streams with equal lengths."""
    start = TransducerState.join([decoder.start()] * len(frames))
    found, _ = decoder.decode(frames, [frames.shape[1]] * len(frames), start)
    return [[(e.token, e.frame, e.duration) for e in stream] for stream in found]


def beside_nemo(
    weights: TransducerWeights, config: TransducerConfig, frames: Tensor, repeats: int
) -> tuple[dict[str, object], bool]:
    """Measures the decoder and NeMo's by turns, and compares their tokens.

    Args:
        weights: The decoder.
        config: Its sizes.
        frames: [batch, frames, in].
        repeats: Launches that are measured.

    Returns:
        Times, with the number of streams whose tokens are equal in float32 and in the type of the
        frames; and whether all are equal in float32. In bfloat16, a choice between nearly equal
        logits may differ.
    """
    equal, launches, nemo_tokens = dict[str, int](), list[Launches](), 0
    torch.backends.cudnn.allow_tf32 = False  # of NeMo's LSTM in float32
    for dtype in (torch.float32, frames.dtype):
        tensors, own = map_leaves(weights, lambda t, d=dtype: t.to(d)), frames.to(dtype)
        ours = load_transducer(tensors, config)
        # A graph takes as many streams as the first launch has: each batch records its own.
        nemo = NemoTransducer(tensors, config, "graph")
        theirs = nemo.decode(own, [own.shape[1]] * len(own))
        pairs = list(zip(decode_all(ours, own), theirs, strict=True))
        equal[str(dtype).removeprefix("torch.")] = sum(a == b for a, b in pairs)
        count = repeats + _NUM_UNMEASURED
        launches = [kernel_launches(ours, own, count), nemo_launches(nemo, own, count)]
        nemo_tokens = sum(map(len, theirs))
    ours_s, nemo_s = time_launches(launches)
    return {
        "launch_ms": round(1000 * ours_s, 4),
        "nemo_ms": round(1000 * nemo_s, 4),
        "times_faster": round(nemo_s / ours_s, 2),
        "nemo_tokens": nemo_tokens,
        "equal_streams": equal,
    }, equal["float32"] == len(frames)


def time_torch(decoder: Transducer, frames: Tensor) -> float:
    """Seconds of the decoder in torch: the median of three runs."""
    batch, num_frames = frames.shape[:2]
    start = TransducerState.join([decoder.start()] * batch)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decoder.decode(frames, [num_frames] * batch, start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def decoder_inputs(
    vocab_size: int, batch: int, num_frames: int, dtype: torch.dtype
) -> tuple[TransducerWeights, TransducerConfig, Tensor, float]:
    """A decoder of the released size with random weights, and frames for it, on the GPU.

    Args:
        vocab_size: Ids, blank included.
        batch: Streams.
        num_frames: Frames of a stream.
        dtype: Of weights and frames.

    Returns:
        The weights, whose bias of blank is calibrated; their sizes; frames [batch, frames, in]; and
        the tokens per frame.
    """
    device = torch.device("cuda")
    size = replace(RELEASED_SIZE, hidden_size=64, num_layers=1, vocab_size=vocab_size)
    model = random_model("streaming", size, device, dtype)
    config = model.config.transducer
    generator = torch.Generator(device).manual_seed(1)
    frames = torch.randn(batch, num_frames, 64, device=device, generator=generator).to(dtype)
    weights, rate = calibrated(model.weights.transducer, config, frames, load_transducer)
    return weights, config, frames, rate


def decode(options: argparse.Namespace) -> dict[str, object]:
    """Measures the decoder alone."""
    rows, all_equal = [], True
    for vocab_size in options.vocabularies:
        inputs = decoder_inputs(
            vocab_size, max(options.batches), options.frames, getattr(torch, options.dtype)
        )
        weights, config, frames, rate = inputs
        ours, eager = load_transducer(weights, config), Transducer(weights, config)
        for batch in options.batches:
            part = frames[:batch]
            (seconds,) = time_launches(
                [kernel_launches(ours, part, options.repeats + _NUM_UNMEASURED)]
            )
            num_tokens = sum(map(len, decode_all(ours, part)))
            row: dict[str, object] = {
                "vocabulary": vocab_size,
                "batch": batch,
                "frames": options.frames,
                "tokens": num_tokens,
                "launch_ms": round(1000 * seconds, 4),
                "us_per_token": round(1e6 * seconds / max(num_tokens, 1), 3),
            }
            torch_s = time_torch(eager, part)
            row |= {"torch_ms": round(1000 * torch_s, 3)}
            row |= {"times_faster": round(torch_s / seconds, 1)}
            if options.nemo:
                beside, is_equal = beside_nemo(weights, config, part, options.repeats)
                row["nemo"], all_equal = beside, all_equal and is_equal
            rows.append(row)
            print(row, file=sys.stderr)
        print(f"vocabulary {vocab_size}: {rate:.3f} tokens per frame", file=sys.stderr)
    figures: dict[str, object] = {"dtype": options.dtype, "tokens_per_frame": TOKENS_PER_FRAME}
    if options.nemo:
        figures[_EQUALITY] = all_equal
    return figures | {"rows": rows}


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = {"chunk": chunk, "decode": decode}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--streams", type=numbers, default=[1, 64], help="of chunk; default 1,64")
    parser.add_argument("--chunks", type=int, default=500, help="of chunk; default 500")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--vocabularies", type=numbers, default=[1025, 8193, 13088])
    parser.add_argument("--frames", type=int, default=50, help="of decode; default 50")
    parser.add_argument("--repeats", type=int, default=50, help="of decode; default 50")
    parser.add_argument(
        "--nemo",
        action="store_true",
        help="decode: also NeMo's decoder, as a CUDA graph; exit status 1 if\n"
        "tokens in float32 differ",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if options.nemo and not (options.part == "decode" and nemo_is_installed()):
        parser.error("--nemo is of decode, and needs nemo_toolkit: see docs/recognition.md")
    with torch.inference_mode():
        figures = parts[options.part](options)
    command = f"bench.recognition {options.part}" + " --nemo" * options.nemo
    packages = ("torch", "nemo_toolkit") if options.nemo else ("torch",)
    gpu = {"gpu": torch.cuda.get_device_name()}
    write(gpu | {"command": command} | figures, options.json, packages)
    return int(figures.get(_EQUALITY) is False)


if __name__ == "__main__":
    sys.exit(main())
