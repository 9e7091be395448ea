"""What every training here shares: parameters, averages, the budget of time, replayed steps."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megakernel_tts.model.checkpoint import TensorSpec, map_leaves

T = TypeVar("T")

_WARM_STEPS = 200  # after a start and after a resumption
_SAVE_EVERY = 120.0  # seconds


def pick_device() -> torch.device:
    """The GPU where there is one; products of float32 may use its tensor cores."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_type(device: torch.device) -> torch.dtype:
    """The type of most layers' activations."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def bind(tree: T, tensors: Mapping[str, Tensor]) -> T:
    """A tree of specs with the tensors of those names in its leaves, empty ones where none is."""
    empty = torch.empty(0)

    def leaf(spec: TensorSpec) -> Tensor:
        return tensors.get(spec.name, empty)

    return map_leaves(tree, leaf)


class Average:
    """A moving average of parameters, which is what is kept of a training."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._live = list(tensors)
        self.tensors = [t.detach().clone() for t in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follows the parameters, at first quickly."""
        keep = min(0.995, 1 - 10 / (step + 20))
        for tensor, live in zip(self.tensors, self._live, strict=True):
            tensor.lerp_(live, 1 - keep)


class Budget:
    """Training by the clock: how much of the time is used up, over all resumptions."""

    def __init__(self, minutes: float, used: float = 0.0) -> None:
        self._total = 60 * minutes
        self._used = used
        self._start = self._saved = time.monotonic()
        self._steps = 0

    @property
    def used(self) -> float:
        """Seconds."""
        return self._used + time.monotonic() - self._start

    @property
    def share(self) -> float:
        """What part of the time is used up; 1 is all."""
        return min(1.0, self.used / self._total)

    @property
    def due(self) -> bool:
        """Whether the state should be saved again."""
        if time.monotonic() - self._saved < _SAVE_EVERY:
            return False
        self._saved = time.monotonic()
        return True

    def rate(self, peak: float) -> float:
        """The learning rate of the next step: a short rise, then half a cosine."""
        self._steps += 1
        rise = min(1.0, self._steps / _WARM_STEPS)
        return peak * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.share)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets a learning rate, also of an optimizer whose steps are replayed."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def adamw(
    parameters: Iterable[nn.Parameter], betas: tuple[float, float], decay: float
) -> torch.optim.AdamW:
    """AdamW, on a GPU in the form that can be replayed; `set_rate` before each step."""
    kept = list(parameters)
    cuda = kept[0].is_cuda
    rate: Any = torch.tensor(0.0, device=kept[0].device) if cuda else 0.0
    return torch.optim.AdamW(
        kept, lr=rate, betas=betas, weight_decay=decay, fused=cuda, capturable=cuda
    )


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Writes a state whole or not at all."""
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.rename(file)


def load_state(file: Path, device: torch.device) -> dict[str, Any]:
    """Reads what `save_state` wrote."""
    return torch.load(file, map_location=device, weights_only=True)


class Replayed:
    """A training step of thousands of small kernels, recorded once on a GPU and then replayed.

    On a CPU it is simply called.
    """

    def __init__(self, step: Callable[..., dict[str, Tensor]], *examples: Tensor) -> None:
        """Records the step.

        Args:
            step: Changes parameters and buffers in place; gives figures.
            examples: Arguments of the shapes that it will be called with.
        """
        self._step = step
        self._inputs = [e.clone() for e in examples]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._figures: dict[str, Tensor] = {}
        if not examples[0].is_cuda:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose and allocate before anything is recorded
                step(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._figures = step(*self._inputs)

    def __call__(self, *arguments: Tensor) -> dict[str, Tensor]:
        """Takes the step; the figures are overwritten by the next one."""
        if self._graph is None:
            return self._step(*arguments)
        for mine, given in zip(self._inputs, arguments, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return self._figures
