"""Tools of all training stages: parameters, averages, time budgets, captured steps."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from megakernel_common.checkpoint import TensorSpec, map_leaves

T = TypeVar("T")
P = ParamSpec("P")

_WARM_STEPS = 200  # after a start and after a resumption
_SAVE_INTERVAL_S = 120.0


def pick_device() -> torch.device:
    """Selects the GPU if there is one, and allows TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_type(device: torch.device) -> torch.dtype:
    """Type of most layers' activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fused(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """A function of tensors of any shape with fused kernels on a GPU; unchanged on a CPU.

    Networks of this size are narrow and their signals are long: unfused, most of a step's time is
    memory traffic of elementwise operations.
    """
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    return torch.compile(function, dynamic=True)


def bind(tree: T, tensors: Mapping[str, Tensor]) -> T:
    """Replaces the specs of a tree by the tensors of their names, or by empty tensors."""
    empty = torch.empty(0)

    def leaf(spec: TensorSpec) -> Tensor:
        return tensors.get(spec.name, empty)

    return map_leaves(tree, leaf)


class Average:
    """Moving average of parameters; the result of a training stage."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._live = list(tensors)
        self.tensors = [t.detach().clone() for t in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the current parameters; the first steps have more weight."""
        decay = min(0.995, 1 - 10 / (step + 20))
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
            self.tensors, self._live, 1 - decay
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the live parameters have the averages' values."""
        trained = [t.detach().clone() for t in self._live]
        self._set(self.tensors)
        yield
        self._set(trained)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for live, value in zip(self._live, values, strict=True):
            live.copy_(value)


class Budget:
    """Time budget of a training stage over all its runs, and the schedules that depend on it."""

    def __init__(self, minutes: float, used_s: float = 0.0) -> None:
        self._total_s = 60 * minutes
        self._used_s = used_s
        self._start = self._saved = time.monotonic()
        self._steps = 0

    @property
    def used_s(self) -> float:
        """Seconds used so far."""
        return self._used_s + time.monotonic() - self._start

    @property
    def share(self) -> float:
        """Share of the time used so far, 0 to 1."""
        return min(1.0, self.used_s / self._total_s)

    @property
    def due(self) -> bool:
        """Whether the state should be saved now."""
        if time.monotonic() - self._saved < _SAVE_INTERVAL_S:
            return False
        self._saved = time.monotonic()
        return True

    def rate(self, peak: float, share: float | None = None) -> float:
        """Learning rate of the next step: linear warm-up, then half a cosine.

        Args:
            peak: Highest rate.
            share: Share of the time used so far, measured now by default.
        """
        self._steps += 1
        warm_up = min(1.0, self._steps / _WARM_STEPS)
        cosine = math.cos(math.pi * (self.share if share is None else share))
        return peak * warm_up * (0.02 + 0.98 * 0.5 * (1 + cosine))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate, also of an optimiser whose steps are captured."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def adamw(
    parameters: Iterable[nn.Parameter], betas: tuple[float, float], decay: float
) -> torch.optim.AdamW:
    """Makes AdamW, capturable on a GPU; call `set_rate` before each step."""
    chosen = list(parameters)
    cuda = chosen[0].is_cuda
    rate: Any = torch.tensor(0.0, device=chosen[0].device) if cuda else 0.0
    return torch.optim.AdamW(
        chosen, lr=rate, betas=betas, weight_decay=decay, fused=cuda, capturable=cuda
    )


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Writes a state atomically."""
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.rename(file)


def load_state(file: Path, device: torch.device) -> dict[str, Any]:
    """Reads a state that `save_state` wrote."""
    return torch.load(file, map_location=device, weights_only=True)


class CapturedStep:
    """A training step of thousands of small kernels, captured once as a CUDA graph.

    On a CPU the step is called directly.
    """

    def __init__(
        self, step: Callable[..., dict[str, Tensor]], *examples: Tensor, pool: Any = None
    ) -> None:
        """Captures the step.

        Args:
            step: Changes parameters and buffers in place; gives metrics.
            *examples: Arguments with the shapes of later calls.
            pool: Memory that several captured steps share, from `torch.cuda.graph_pool_handle`.
        """
        self._step = step
        self._inputs = [e.clone() for e in examples]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._metrics: dict[str, Tensor] = {}
        if not examples[0].is_cuda:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries select kernels and allocate before the capture
                step(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, as those of NCCL, may ask for events during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._metrics = step(*self._inputs)

    def __call__(self, *arguments: Tensor) -> dict[str, Tensor]:
        """Runs the step; the next one overwrites the metrics."""
        if self._graph is None:
            return self._step(*arguments)
        for own, given in zip(self._inputs, arguments, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._metrics
