"""What runs the two networks: the protocol that every backend keeps, and the one that chooses."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megakernel_tts.checkpoint import map_leaves
from megakernel_tts.config import ModelConfig
from megakernel_tts.frames import Coming, Frames, Start
from megakernel_tts.suspension import Suspended

if TYPE_CHECKING:
    from megakernel_tts.weights import Model

_log = logging.getLogger("megakernel_tts")


class Backend(Protocol):
    """Talker, code predictor and sampling for a fixed number of slots, one stream a slot.

    A stream: `prefill`, then `feed` as its text becomes known and `step` for its frames, then
    `release`. Between steps it may be taken out of its slot and put into another. Frame t + 1
    needs text vector t (frame 0 needs none): the caller steps a slot only if that vector was fed or
    the text was ended, after which padding takes its place.

    A method that raises leaves every slot as it was. One thread calls them all but `interrupt`.
    """

    name: str
    slots: int
    positions: int  # prompt and frames of one stream together

    def prefill(self, starts: Sequence[Start]) -> None:
        """Starts streams: each as if it were alone, whatever prompts were run before.

        Raises:
            ValueError: A prompt does not fit a slot.
        """
        ...

    def forget(self) -> None:
        """Drops what it keeps of earlier prompts; nobody may be in a call meanwhile."""
        ...

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Queues text vectors [n, hidden], on the host; `last`: no more will come."""
        ...

    def step(
        self,
        slots: Sequence[int],
        frames: int,
        meanwhile: Callable[[], object] = lambda: None,
        ending: Callable[[Coming], object] = lambda coming: None,
    ) -> list[Frames]:
        """Makes up to so many frames for each slot, however many it is asked for the same ones.

        Every stream makes at least one, or ends. Fewer than asked for are made where speech ends,
        text runs dry, the step is interrupted, or the backend has no room for more.

        Args:
            slots: Each once.
            frames: At most, of each.
            meanwhile: What the caller does beside the device's work; it must not raise. Called
                once, unless the step fails before.
            ending: Called at most once, after `meanwhile`, when the last frame is being made (or is
                made), by a backend whose device writes codes where its other work can read them; it
                must not raise. It is told where they are coming: what it gives the device to do
                with them is done behind the step, which tells how many of them are frames.

        Raises:
            DeviceError: It is not the fault of any one of the streams.
            RuntimeError: The text of a slot's next frame has not arrived.
            ValueError: A slot has no position left.
        """
        ...

    def interrupt(self) -> None:
        """Ends a step under way with the frame at hand, and later ones after their first.

        Until `rearm`. Any thread may call it, and any finaliser: it takes no lock.
        """
        ...

    def rearm(self) -> None:
        """Takes interruptions back: steps are as long as they are asked to be again."""
        ...

    def release(self, slot: int) -> None:
        """Frees a slot at any time."""
        ...

    def suspend(self, slot: int) -> Suspended[Any]:
        """Frees a slot and gives, in the host's memory, all that its stream needs to go on."""
        ...

    def resume(self, slot: int, suspended: Suspended[Any]) -> None:
        """Puts a suspended stream into a free slot; it goes on as if it had never left."""
        ...


def choose_backend(
    model: "Model",
    config: ModelConfig,
    pad: Tensor,
    *,
    slots: int,
    positions: int,
    watched: Sequence[tuple[int, int]] = (),
) -> Backend:
    """The backend for the device that `pad` is on.

    Args:
        model: Tensors in the type to compute in, the codec's embeddings on the device, the others
            there or on the host: the backend takes them to the device in its own layout.
        config: The model's numbers.
        pad: [hidden], the text vector that stands for "no text", on the device.
        slots: Streams at a time.
        positions: The most positions of one stream.
        watched: Layer and head of the talker's heads whose attention scores `step` tells.
    """
    if pad.is_cuda and pad.dtype == torch.bfloat16:
        from megakernel_tts.cuda import Megakernel

        return Megakernel(model, config, pad, slots=slots, positions=positions, watched=watched)
    from megakernel_tts.reference import Reference

    networks = map_leaves((model.talker, model.predictor), lambda tensor: tensor.to(pad.device))
    there = replace(model, talker=networks[0], predictor=networks[1])
    return Reference(there, config, pad, slots=slots, positions=positions, watched=watched)


def pick_device(device: str) -> torch.device:
    """`auto` is the GPU where torch sees one, else the CPU.

    Raises:
        ValueError: No such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; choose auto, cpu, cuda or cuda:N.") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; choose auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this torch sees no GPU; try `doctor`.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, but there are {torch.cuda.device_count()} GPUs.")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU that the kernel can be built for, else float32.

    Raises:
        ValueError: Another type (float16 overflows in this model).
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        from build_ext import obstacle

        if reason := obstacle(device):
            _log.warning("%s The GPU runs plain torch in float32.", reason)
            return torch.float32
        return torch.bfloat16
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype is {dtype!r}; choose auto, bfloat16 or float32.")
    return getattr(torch, dtype)
