"""Monotonic alignment search: the best way to give each frame a token, in order.

Kim et al., Glow-TTS (NeurIPS 2020), algorithm 1. A path begins at the first token and frame, ends
at the last ones, and from a frame to the next stays at its token or goes on to the next one. `mas`
finds the path whose scores have the largest sum; on a GPU with csrc/align, elsewhere with NumPy,
bit for bit the same.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Layout = Literal["BTS", "BST"]
Out = Literal["durations", "path", "index"]

_COLUMNS = 64  # frames that the CPU copies at a time
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Defined by schema, and on a GPU implemented by csrc/align/mas_ops.cpp alone: the Python around a
# torch.library.custom_op takes longer than all else that the host has to do.
_LIBRARY = torch.library.Library("megakernel_tts", "FRAGMENT")
_LIBRARY.define(
    "mas(Tensor scores, Tensor? text_lengths=None, Tensor? frame_lengths=None, "
    "Tensor? mask=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "mas_path(Tensor durations, SymInt frames, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def mas(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    layout: Layout = "BTS",
    out: Out = "durations",
) -> Tensor:
    """Finds the monotonic path of the largest sum of scores through each item.

    Sums are float32, whatever the scores are. Where to stay at a token and to come from the one
    before are equally good, the path stays. A score of minus infinity is one like any other, and a
    sum that is no number counts as minus infinity: so does a NaN. Scores are never written.

    Lengths on the CPU are checked; for scores on a GPU, not within torch.compile, nor where the
    other lengths are on the GPU. Lengths and masks there are not read by the host, so that a call
    can be recorded in a CUDA graph: an item through which no path goes (more tokens than frames,
    none of one of them, more than there are) gets durations of zero, an index of -1 and a path of
    zeros. So does an item of no tokens and no frames anywhere.

    On a GPU the quickest layout is BTS with frames side by side in memory; others are copied first.
    The first call there builds the kernels. The result has no gradient.

    Args:
        scores: float32, bfloat16 or float16 [B, T, S]: items, tokens, frames; for example
            log-likelihoods.
        text_lengths: int32 or int64 [B], tokens of each item; T by default. Beside the scores or on
            the CPU, as `frame_lengths`.
        frame_lengths: int32 or int64 [B], frames of each item; S by default.
        mask: In place of lengths, beside the scores, of their shape and layout: bools, integers or
            floating-point numbers, nonzero where an item has a token and a frame; only its first
            frame and its first token are looked at.
        layout: `BST` if scores and mask are [B, S, T]; a path is then, too.
        out: What to return, below.

    Returns:
        `durations`: int32 [B, T], frames of each token, at least 1 for each of an item's own.
        `index`: int32 [B, S], the token of each frame, -1 after an item's last.
        `path`: bool [B, T, S], true where a frame has a token.

    Raises:
        ValueError: Shapes, types, devices or names do not fit, or by lengths that the host can read
            no path goes through an item.
        RuntimeError: The kernels cannot be built for this GPU, or it is none that they are for.
    """
    if out not in ("durations", "path", "index"):
        raise ValueError(f"out must be 'durations', 'path' or 'index', found {out!r}.")
    durations = _durations(scores, text_lengths, frame_lengths, mask, layout)
    if out == "durations":
        return durations
    frames = scores.shape[2 if layout == "BTS" else 1]
    if out == "index":
        return _index(durations, frames)
    path = torch.ops.megakernel_tts.mas_path.default(durations, frames, torch.bool)
    return path if layout == "BTS" else path.transpose(1, 2)


def maximum_path(value: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The path as zeros and ones, by the signature of Super-MAS, which it can stand in for.

    Unlike there, `value` keeps its content and sums are float32; see `mas` for the rest.

    Args:
        value: Scores [B, T, S].
        mask: [B, T, S], nonzero where an item has a token and a frame.
        dtype: Of the path.

    Returns:
        [B, T, S], 1 where a frame has a token.

    Raises:
        ValueError: As `mas`.
        RuntimeError: As `mas`.
    """
    durations = _durations(value, None, None, mask, "BTS")
    return torch.ops.megakernel_tts.mas_path.default(durations, value.shape[2], dtype)


def _durations(
    scores: Tensor,
    text_lengths: Tensor | None,
    frame_lengths: Tensor | None,
    mask: Tensor | None,
    layout: Layout,
) -> Tensor:
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
    if layout == "BST":
        scores = scores.transpose(1, 2)
        mask = None if mask is None else mask.transpose(1, 2)
    items, tokens, frames = scores.shape
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
        if mask is None and _no_path(tokens, frames) and items > 0:
            raise ValueError(_refusal("Every item", tokens, frames))
    elif scores.is_cuda and not torch.compiler.is_compiling():
        given = [lengths for lengths in (text_lengths, frame_lengths) if lengths is not None]
        if all(lengths.device.type == "cpu" for lengths in given):
            _check_lengths(
                _on_host(text_lengths, items, tokens),
                _on_host(frame_lengths, items, frames),
                scores.shape,
            )
    return torch.ops.megakernel_tts.mas.default(scores.detach(), text_lengths, frame_lengths, mask)


def _no_path(tokens: int, frames: int) -> bool:
    return tokens > frames or (tokens == 0) != (frames == 0)


def _refusal(item: str, tokens: int, frames: int) -> str:
    return (
        f"{item} has {tokens} tokens and {frames} frames: each token needs a frame, and each frame "
        "a token."
    )


def _check_lengths(text: NDArray[np.int64], frames: NDArray[np.int64], shape: torch.Size) -> None:
    """Of the host."""
    for item, (t, s) in enumerate(zip(text.tolist(), frames.tolist(), strict=True)):
        if not (0 <= t <= shape[1] and 0 <= s <= shape[2]):
            raise ValueError(
                f"Item {item} has {t} tokens and {s} frames: there are scores for {shape[1]} and "
                f"{shape[2]}."
            )
        if _no_path(t, s):
            raise ValueError(_refusal(f"Item {item}", t, s))


def _on_host(lengths: Tensor | None, items: int, whole: int) -> NDArray[np.int64]:
    if lengths is None:
        return np.full(items, whole, np.int64)
    return lengths.numpy().astype(np.int64)


@torch.library.impl(_LIBRARY, "mas", "CPU")
def _search(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Durations int32 [B, T] of scores [B, T, S]."""
    items, tokens, frames = scores.shape
    if mask is not None:
        text_lengths = mask[:, :, :1].ne(0).sum((1, 2))
        frame_lengths = mask[:, :1].ne(0).sum((1, 2))
    text = _on_host(text_lengths, items, tokens)
    ends = _on_host(frame_lengths, items, frames)
    _check_lengths(text, ends, scores.shape)
    return torch.from_numpy(_trace(_directions(scores), text, ends))


@torch.library.register_fake("megakernel_tts::mas", lib=_LIBRARY)
def _(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    return scores.new_empty(scores.shape[:2], dtype=torch.int32)


@torch.library.impl(_LIBRARY, "mas", "CompositeExplicitAutograd")
def _(
    scores: Tensor,
    text_lengths: Tensor | None = None,
    frame_lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    _load_kernels(scores.device)
    return torch.ops.megakernel_tts.mas.default(scores, text_lengths, frame_lengths, mask)


def _directions(scores: Tensor) -> NDArray[np.bool_]:
    """Which cells are reached from the token before: [S, B, T], a frame of all items at a time."""
    items, tokens, frames = scores.shape
    moved = np.empty((frames, items, tokens), np.bool_)
    sums = np.full((items, 1 + tokens), -np.inf, np.float32)  # the first is before all tokens
    sums[:, 0] = 0
    stay, move = sums[:, 1:], sums[:, :-1]
    best = np.empty_like(stay)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, frames, _COLUMNS):
            columns = scores[:, :, first : first + _COLUMNS].permute(2, 0, 1).float().contiguous()
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
    """Durations [B, T], counted from the last frame to the first."""
    _, items, tokens = moved.shape
    durations = np.zeros((items, tokens), np.int32)
    item, token = np.arange(items), text - 1
    for frame in range(int(frames.max(initial=0)) - 1, -1, -1):
        inside = frame < frames
        durations[item[inside], token[inside]] += 1
        came = moved[frame, item, token] | (token == frame)
        token = token - (inside & came & (token > 0))
    return durations


def _index(durations: Tensor, frames: int) -> Tensor:
    """int32 [B, S]: the token of each frame, -1 where there is none."""
    ends = durations.cumsum(1, dtype=torch.int32)
    places = torch.arange(frames, dtype=torch.int32, device=durations.device)
    places = places.expand(len(durations), frames).contiguous()
    index = torch.searchsorted(ends, places, right=True, out_int32=True)
    return index.masked_fill(places >= durations.sum(1, keepdim=True), -1)


@torch.library.impl(_LIBRARY, "mas_path", "CPU")
def _path(durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
    """Zeros and ones [B, T, S] of durations int32 [B, T]."""
    ends = durations.cumsum(1)[..., None]
    places = torch.arange(frames)
    return ((ends - durations[..., None] <= places) & (places < ends)).to(dtype)


@torch.library.register_fake("megakernel_tts::mas_path", lib=_LIBRARY)
def _(durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
    return durations.new_empty((*durations.shape, frames), dtype=dtype)


@torch.library.impl(_LIBRARY, "mas_path", "CompositeExplicitAutograd")
def _(durations: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
    _load_kernels(durations.device)
    return torch.ops.megakernel_tts.mas_path.default(durations, frames, dtype)


def _load_kernels(device: torch.device) -> None:
    """Once csrc/align has registered its operators, a call on a GPU no longer comes here."""
    from megakernel_tts.kernels.build import load, obstacle

    if device.type != "cuda":
        reason = f"There are kernels for NVIDIA's GPUs alone, and the scores are on {device}."
    else:
        reason = obstacle(device)
    if reason:
        raise RuntimeError(f"{reason} Or align on the CPU: mas(scores.cpu(), ...).")
    load(device)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("megakernel_tts::mas", "CUDA"):
        raise RuntimeError(
            "Another version's kernels were loaded in this process, which cannot align; start anew."
        )
