"""Monotonic alignment search (Kim et al., Glow-TTS, NeurIPS 2020, algorithm 1).

A path assigns a token to every frame. It starts at the first token, ends at the last one, and from
one frame to the next stays at its token or moves to the next token. `mas` finds the path with the
largest sum of scores. It runs csrc/align on a GPU and NumPy elsewhere, with identical results.
"""

from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.kernels.loader import obstacle
from megakernel_tts.kernels.align import AlignKernels, load_align_kernels

ScoreLayout = Literal["BTS", "BST"]
Out = Literal["durations", "path", "index"]

_FRAMES_PER_COPY = 64  # on the CPU
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_USE_CPU = "Run the search on the CPU instead: mas(scores.cpu(), ...)."

# Schemas instead of torch.library.custom_op, whose Python layers would take longer than the rest of
# the host's work for a call.
_LIBRARY = torch.library.Library("megakernel_tts", "FRAGMENT")
_LIBRARY.define(
    "mas(Tensor scores, Tensor? text_lengths=None, Tensor? frame_lengths=None, "
    "Tensor? mask=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "mas_path(Tensor scores, Tensor? text_lengths, Tensor? frame_lengths, Tensor? mask, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def mas(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    layout: ScoreLayout = "BTS",
    out: Out = "durations",
) -> Tensor:
    """Finds the monotonic path with the largest sum of scores through each item.

    Sums are float32 for all dtypes of scores. On a tie between staying at a token and entering it
    from the previous one, the path stays. Scores may be infinite. A sum that is NaN counts as minus
    infinity. The scores are not modified. The result has no gradient.

    The search checks lengths on the CPU. If the scores are on a GPU, it does so only outside of
    torch.compile and if no lengths are on the GPU. The host does not read lengths or masks on a
    GPU, so a call can be captured in a CUDA graph. An item without a path then gets durations of
    zero, an index of -1 and a path of zeros: an item with more tokens than frames, with no tokens
    or no frames, or with lengths beyond the scores. On all devices, an item with neither tokens nor
    frames gets the same.

    On a GPU the fastest layout is BTS with adjacent frames; other layouts are copied first. The
    first call on a GPU compiles the kernels.

    Args:
        scores: float32, bfloat16 or float16 [B, T, S]: items, tokens, frames; for example
            log-likelihoods.
        text_lengths: int32 or int64 [B], tokens of each item; T by default. On the scores' device
            or on the CPU.
        frame_lengths: int32 or int64 [B], frames of each item; S by default. On the scores' device
            or on the CPU.
        mask: Replaces the lengths: a tensor of the scores' shape, layout and device, nonzero where
            an item has a token and a frame. Bools, integers or floating-point numbers. Only its
            first frame and its first token are read.
        layout: `BST` if scores, mask and path are [B, S, T].
        out: The result to return.

    Returns:
        `durations`: int32 [B, T], frames of each token, at least 1 for each token of an item.
        `index`: int32 [B, S], the token of each frame, -1 after an item's last frame.
        `path`: bool [B, T, S], true where a frame has a token.

    Raises:
        ValueError: Shapes, dtypes, devices or names do not match, or an item has no path by lengths
            on the CPU.
        RuntimeError: The kernels cannot be compiled on this machine or do not support the device.
    """
    if out not in ("durations", "path", "index"):
        raise ValueError(f"out must be 'durations', 'path' or 'index', found {out!r}.")
    _check(scores, text_lengths, frame_lengths, mask, layout)
    scores = scores.detach()
    if layout == "BST":
        scores = scores.transpose(1, 2)
        mask = None if mask is None else mask.transpose(1, 2)
    if out == "path":
        path = torch.ops.megakernel_tts.mas_path.default(
            scores, text_lengths, frame_lengths, mask, torch.bool
        )
        return path if layout == "BTS" else path.transpose(1, 2)
    durations = torch.ops.megakernel_tts.mas.default(scores, text_lengths, frame_lengths, mask)
    return durations if out == "durations" else _index(durations, scores.shape[2])


def maximum_path(value: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the path as zeros and ones; a drop-in replacement for Super-MAS.

    Unlike Super-MAS, it does not modify `value`, and sums are float32. See `mas`.

    Args:
        value: Scores [B, T, S].
        mask: [B, T, S], nonzero where an item has a token and a frame.
        dtype: The dtype of the path.

    Returns:
        [B, T, S], 1 where a frame has a token.

    Raises:
        ValueError: See `mas`.
        RuntimeError: See `mas`.
    """
    _check(value, None, None, mask, "BTS")
    return torch.ops.megakernel_tts.mas_path.default(value.detach(), None, None, mask, dtype)


def _check(
    scores: Tensor,
    text_lengths: Tensor | None,
    frame_lengths: Tensor | None,
    mask: Tensor | None,
    layout: ScoreLayout,
) -> None:
    """Checks the arguments of `mas`."""
    if layout not in ("BTS", "BST"):
        raise ValueError(f"layout must be 'BTS' or 'BST', found {layout!r}.")
    if scores.dim() != 3 or scores.dtype not in _DTYPES:
        raise ValueError(
            f"scores must be float32, bfloat16 or float16 [{', '.join(layout)}], found "
            f"{scores.dtype} {list(scores.shape)}."
        )
    if mask is not None:
        if text_lengths is not None or frame_lengths is not None:
            raise ValueError("Give a mask or lengths, not both.")
        if mask.shape != scores.shape or mask.device != scores.device or mask.is_complex():
            raise ValueError(
                f"mask must be {list(scores.shape)} on {scores.device} as the scores, and not "
                f"complex, found {mask.dtype} {list(mask.shape)} on {mask.device}."
            )
    items, tokens, frames = scores.shape
    if layout == "BST":
        tokens, frames = frames, tokens
    for name, lengths in (("text_lengths", text_lengths), ("frame_lengths", frame_lengths)):
        if lengths is None:
            continue
        if lengths.shape != (items,) or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be int32 or int64 [{items}], found {lengths.dtype} "
                f"{list(lengths.shape)}."
            )
        if lengths.device != scores.device and lengths.device.type != "cpu":
            raise ValueError(
                f"{name} must be on {scores.device} as the scores, or on the CPU, found "
                f"{lengths.device}."
            )
    if text_lengths is None and frame_lengths is None:
        if mask is None and _has_no_path(tokens, frames) and items > 0:
            raise ValueError(_no_path_message("Every item", tokens, frames))
    elif scores.is_cuda and not torch.compiler.is_compiling():
        present = [lengths for lengths in (text_lengths, frame_lengths) if lengths is not None]
        if all(lengths.device.type == "cpu" for lengths in present):
            _check_lengths(
                _on_host(text_lengths, items, tokens),
                _on_host(frame_lengths, items, frames),
                (tokens, frames),
            )


def _has_no_path(tokens: int, frames: int) -> bool:
    return tokens > frames or (tokens == 0) != (frames == 0)


def _no_path_message(item: str, tokens: int, frames: int) -> str:
    return (
        f"{item} has {tokens} tokens and {frames} frames: each token needs a frame, and each frame "
        "a token."
    )


def _check_lengths(
    text: NDArray[np.int64], frames: NDArray[np.int64], num_scores: tuple[int, int]
) -> None:
    """Checks lengths on the host against the numbers of tokens and frames that have scores."""
    num_tokens, num_frames = num_scores
    for item, (t, s) in enumerate(zip(text.tolist(), frames.tolist(), strict=True)):
        if not (0 <= t <= num_tokens and 0 <= s <= num_frames):
            raise ValueError(
                f"Item {item} has {t} tokens and {s} frames: there are scores for {num_tokens} and "
                f"{num_frames}."
            )
        if _has_no_path(t, s):
            raise ValueError(_no_path_message(f"Item {item}", t, s))


def _on_host(lengths: Tensor | None, items: int, default: int) -> NDArray[np.int64]:
    if lengths is None:
        return np.full(items, default, np.int64)
    return lengths.numpy().astype(np.int64)


@torch.library.impl(_LIBRARY, "mas", "CPU")
def _search(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The operator `mas` on the CPU: scores [B, T, S] to durations int32 [B, T]."""
    items, tokens, frames = scores.shape
    if mask is not None:
        text_lengths = mask[:, :, :1].ne(0).sum((1, 2))
        frame_lengths = mask[:, :1].ne(0).sum((1, 2))
    text = _on_host(text_lengths, items, tokens)
    ends = _on_host(frame_lengths, items, frames)
    _check_lengths(text, ends, (tokens, frames))
    return torch.from_numpy(_trace(_directions(scores), text, ends))


@torch.library.register_fake("megakernel_tts::mas", lib=_LIBRARY)
def _(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    return scores.new_empty(scores.shape[:2], dtype=torch.int32)


@torch.library.impl(_LIBRARY, "mas", "CUDA")
def _search_on_gpu(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The operator `mas` on a GPU: scores [B, T, S] to durations int32 [B, T]."""
    return _kernels(scores.device).search(scores, text_lengths, frame_lengths, mask)


def _directions(scores: Tensor) -> NDArray[np.bool_]:
    """Whether the best path to a cell enters from the previous token: [S, B, T]."""
    items, tokens, frames = scores.shape
    moved = np.empty((frames, items, tokens), np.bool_)
    sums = np.full((items, 1 + tokens), -np.inf, np.float32)  # column 0: before the first token
    sums[:, 0] = 0
    stay, move = sums[:, 1:], sums[:, :-1]
    best = np.empty_like(stay)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, frames, _FRAMES_PER_COPY):
            columns = (
                scores[:, :, first : first + _FRAMES_PER_COPY].permute(2, 0, 1).float().contiguous()
            )
            for column, score in enumerate(columns.numpy(), first):
                np.less(stay, move, out=moved[column])
                np.maximum(stay, move, out=best)
                np.add(best, score, out=best)
                np.fmax(best, -np.inf, out=stay)
                sums[:, 0] = -np.inf
    return moved


def _trace(
    moved: NDArray[np.bool_], text: NDArray[np.int64], frames: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Follows the directions [S, B, T] from the last frame to the first; durations [B, T]."""
    _, items, tokens = moved.shape
    durations = np.zeros((items, tokens), np.int32)
    item, token = np.arange(items), text - 1
    for frame in range(int(frames.max(initial=0)) - 1, -1, -1):
        inside = frame < frames
        durations[item[inside], token[inside]] += 1
        enters = moved[frame, item, token] | (token == frame)
        token = token - (inside & enters & (token > 0))
    return durations


def _index(durations: Tensor, frames: int) -> Tensor:
    """The token of each frame, int32 [B, S]; -1 where there is none."""
    ends = durations.cumsum(1, dtype=torch.int32)
    frame_indices = torch.arange(frames, dtype=torch.int32, device=durations.device)
    frame_indices = frame_indices.expand(len(durations), frames).contiguous()
    index = torch.searchsorted(ends, frame_indices, right=True, out_int32=True)
    return index.masked_fill(frame_indices >= durations.sum(1, keepdim=True), -1)


@torch.library.impl(_LIBRARY, "mas_path", "CPU")
def _search_path(
    scores: Tensor,
    text_lengths: Tensor | None,
    frame_lengths: Tensor | None,
    mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The operator `mas_path` on the CPU: scores [B, T, S] to zeros and ones [B, T, S]."""
    durations = _search(scores, text_lengths, frame_lengths, mask)
    ends = durations.cumsum(1)[..., None]
    frame_indices = torch.arange(scores.shape[2])
    return ((ends - durations[..., None] <= frame_indices) & (frame_indices < ends)).to(dtype)


@torch.library.register_fake("megakernel_tts::mas_path", lib=_LIBRARY)
def _(
    scores: Tensor, text_lengths: object, frame_lengths: object, mask: object, dtype: torch.dtype
) -> Tensor:
    return scores.new_empty(scores.shape, dtype=dtype)


@torch.library.impl(_LIBRARY, "mas_path", "CUDA")
def _search_path_on_gpu(
    scores: Tensor,
    text_lengths: Tensor | None,
    frame_lengths: Tensor | None,
    mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The operator `mas_path` on a GPU: scores [B, T, S] to zeros and ones [B, T, S]."""
    kernels = _kernels(scores.device)
    durations = kernels.search(scores, text_lengths, frame_lengths, mask)
    return kernels.path(durations, scores.shape[2], dtype)


@torch.library.impl(_LIBRARY, "mas", "CompositeExplicitAutograd")
@torch.library.impl(_LIBRARY, "mas_path", "CompositeExplicitAutograd")
def _(scores: Tensor, *_: object) -> Tensor:
    raise RuntimeError(
        f"The kernels support NVIDIA GPUs only; the scores are on {scores.device}. {_USE_CPU}"
    )


@cache
def _kernels(device: torch.device) -> AlignKernels:
    """The kernels of a GPU, compiled at the first call."""
    if reason := obstacle(device):
        raise RuntimeError(f"{reason} {_USE_CPU}")
    return load_align_kernels(device)
