"""The transducer's loop in one launch, beside the same loop as a WHILE node of a CUDA graph.

Both are recorded as CUDA graphs and have to give the same tokens and states. The kernels of the
WHILE node (bench/transducer_rounds.cu) use the device functions of the launch; nvcc compiles them.
Random weights of the released sizes, with a bias of blank that gives 0.35 tokens per frame.

python -m bench.transducer_loops --json bench/results/transducer-loops.json
"""

import argparse
import sys
from collections.abc import Sequence
from ctypes import c_int, c_uint64
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore
from torch import Tensor

from bench.events import event_times
from bench.recognition import decoder_inputs, numbers
from bench.report import write
from megakernel_common.kernels import build
from megakernel_common.kernels.declarations import DeviceConstant, DeviceStruct, pointer
from megakernel_common.kernels.loader import open_cubin
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_common.kernels.program import Program
from megakernel_stt.kernels.transducer import KernelTransducer, load_transducer, read_results
from megakernel_stt.kernels.transducer_structs import TRANSDUCER_DECLARATIONS, TransducerParams
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import TransducerWeights
from megakernel_stt.network.transducer import TransducerState

_NAMESPACE = "megakernel::transducer"
_SEARCH_BYTES = 4096
_STATE_FIELDS = ("hidden", "cell", "output", "num_frames", "frame")
_STEPS = ("begin", "join", "find", "predict", "project", "next", "end")


class RoundParams(DeviceStruct):
    """The argument of a kernel of the WHILE node's graph."""

    __slots__ = ()
    CPP_NAME = f"{_NAMESPACE}::RoundParams"
    _fields_ = (
        ("transducer", TransducerParams),
        ("search", pointer("unsigned char")),
        ("condition", c_uint64),
        ("layer", c_int),
    )


def rounds_program(hidden_size: int) -> Program:
    """The program of the kernels.

    Args:
        hidden_size: Width of prediction and joint network.
    """
    return Program(
        "transducer_rounds",
        str(Path(__file__).with_name("transducer_rounds.cu")),
        tuple(f"{step}_{name}" for step in _STEPS for name in ("float32", "bfloat16")),
        (
            *TRANSDUCER_DECLARATIONS,
            RoundParams,
            DeviceConstant(f"{_NAMESPACE}::kSearchBytes", _SEARCH_BYTES),
        ),
        (("MEGAKERNEL_TRANSDUCER_HIDDEN", str(hidden_size)),),
    )


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of the driver.

    Raises:
        RuntimeError: The driver returned an error.
    """
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA could not record the WHILE node: {error.name}.")
    return values[0] if len(values) == 1 else values


class RoundsModule:
    """A `KernelModule` that records the transducer's launch as a graph with a WHILE node.

    `launch` has to be called while torch's current stream records a CUDA graph.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        """Compiles the kernels with nvcc.

        Args:
            hidden_size: Width of prediction and joint network.
            device: The GPU.

        Raises:
            RuntimeError: There is no nvcc, or CUDA refused the kernels.
        """
        program = rounds_program(hidden_size)
        cubin = build.compile_program(program, build.architecture_of(device))
        self._module = open_cubin(cubin, program.kernels, device, "nvrtc")
        self._side = torch.cuda.Stream(device)
        self._tensors: list[Tensor] = []  # that recorded kernels use

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Returns a copy of a global variable; see `KernelModule.read`."""
        return self._module.read(symbol, struct)

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        *,
        writes: Sequence[Tensor],
        set_bits: Tensor | None = None,
    ) -> None:
        """Records the loop; see `KernelModule.launch`."""
        assert isinstance(params, TransducerParams) and set_bits is not None
        name = kernel.removeprefix("transduce_")
        search = torch.empty(2, _SEARCH_BYTES, dtype=torch.uint8, device=writes[0].device)
        self._tensors.append(search)
        stream = torch.cuda.current_stream()
        graph = _capture(stream)[0]
        context = _checked(driver.cuCtxGetCurrent())
        condition = _checked(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        rounds = RoundParams(
            transducer=params, search=search.data_ptr(), condition=int(condition), layer=0
        )
        config = config._replace(cooperative=False)

        def record(step: str, config: LaunchConfig = config) -> None:
            self._module.launch(f"{step}_{name}", rounds, config, writes=[*writes, search])

        record("begin")
        body = _add_while_node(stream, condition, context)
        with torch.cuda.stream(self._side):
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            side = self._side.cuda_stream
            _checked(driver.cuStreamBeginCaptureToGraph(side, body, None, None, 0, mode))
            record("join")
            record("find")
            for rounds.layer in range(params.num_layers):
                record("predict")
            record("project")
            record("next", config._replace(num_blocks=1))
            _checked(driver.cuStreamEndCapture(side))
        record("end")


def _capture(stream: torch.cuda.Stream) -> tuple[Any, list[Any]]:
    """The graph that a stream records, and the nodes that the next one depends on."""
    info = _checked(driver.cuStreamGetCaptureInfo(stream.cuda_stream))
    status, _, graph, dependencies = info[:4]
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert status == active, "the stream records no graph"
    return graph, list(dependencies)


def _add_while_node(stream: torch.cuda.Stream, condition: Any, context: Any) -> Any:
    """Adds a WHILE node to the graph that a stream records; returns its body's graph."""
    graph, dependencies = _capture(stream)
    node_params = driver.CUgraphNodeParams()
    node_params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node_params.conditional.handle = condition
    node_params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node_params.conditional.size = 1
    node_params.conditional.ctx = context
    node = _checked(
        driver.cuGraphAddNode(graph, dependencies, None, len(dependencies), node_params)
    )
    flag = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    _checked(
        driver.cuStreamUpdateCaptureDependencies(stream.cuda_stream, [node], None, 1, int(flag))
    )
    return node_params.conditional.phGraph_out[0]


def load_rounds(weights: TransducerWeights, config: TransducerConfig) -> KernelTransducer:
    """The decoder whose launches are recorded with a WHILE node.

    Args:
        weights: On the GPU.
        config: Their sizes.
    """
    device = weights.embedding.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return KernelTransducer(weights, config, RoundsModule(config.hidden_size, device), num_sms)


class RecordedDecoding:
    """The decoding of frames from a state on, as a CUDA graph.

    Attributes:
        results: As of `KernelTransducer.launch`, after a replay.
        after: The state after the frames.
    """

    def __init__(self, decoder: KernelTransducer, frames: Tensor, state: TransducerState) -> None:
        """Records it.

        Args:
            decoder: The decoder.
            frames: [batch, frames, in] of the encoder.
            state: State of the streams, which does not change.
        """
        slots = torch.arange(len(frames), dtype=torch.int32, device=frames.device)
        # What the graph reads must live as long as the graph.
        self._inputs = (decoder.project(frames), torch.full_like(slots, frames.shape[1]), slots)
        self._state, self.after = state, TransducerState.join([state])
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="relaxed"):
            for name in _STATE_FIELDS:
                getattr(self.after, name).copy_(getattr(state, name))
            self.results = decoder.launch(*self._inputs, slots, self.after)

    def replay(self) -> None:
        """Decodes the frames; does not wait."""
        self._graph.replay()


def compare(
    decoders: dict[str, KernelTransducer], frames: Tensor, repeats: int
) -> dict[str, object]:
    """Times the decoders on the same frames.

    Args:
        decoders: By the names of their loops.
        frames: [batch, frames, in] of the encoder.
        repeats: Timed runs.

    Returns:
        Tokens, and milliseconds by loop.

    Raises:
        RuntimeError: The decoders differ in a token or in a state.
    """
    start = TransducerState.join([next(iter(decoders.values())).start()] * len(frames))
    times: dict[str, float] = {}
    found: list[tuple[object, TransducerState]] = []
    num_tokens = 0
    for name, decoder in decoders.items():
        recorded = RecordedDecoding(decoder, frames, start)
        recorded.replay()
        tokens = read_results(recorded.results.cpu(), [0] * len(frames))
        num_tokens = sum(map(len, tokens))
        found.append((tokens, TransducerState.join([recorded.after])))
        times[name] = round(median(event_times(recorded.replay, repeats)), 4)
    (first_tokens, first), *others = found
    for tokens, state in others:
        same = all(
            torch.equal(getattr(state, name), getattr(first, name)) for name in _STATE_FIELDS
        )
        if tokens != first_tokens or not same:
            raise RuntimeError(f"The loops {', '.join(decoders)} give different results.")
    return {"tokens": num_tokens, "ms": times}


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--vocabularies", type=numbers, default=[1025, 8193, 13088])
    parser.add_argument("--frames", type=int, default=50, help="default: 50")
    parser.add_argument("--repeats", type=int, default=30, help="default: 30")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    rows = list[dict[str, object]]()
    with torch.inference_mode():
        for vocab_size in options.vocabularies:
            weights, config, frames, _ = decoder_inputs(
                vocab_size, max(options.batches), options.frames, getattr(torch, options.dtype)
            )
            decoders = {
                "launch": load_transducer(weights, config),
                "while_node": load_rounds(weights, config),
            }
            for batch in options.batches:
                row = compare(decoders, frames[:batch], options.repeats)
                rows.append(
                    {"vocabulary": vocab_size, "batch": batch, "frames": options.frames} | row
                )
                print(rows[-1], file=sys.stderr)
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.transducer_loops",
        "dtype": options.dtype,
        "rows": rows,
    }
    write(figures, options.json, packages=("torch",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
