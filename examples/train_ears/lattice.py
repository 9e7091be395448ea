"""Losses of transducers (RNN-T) and of CTC: sums over all alignments, with exact gradients.

Both are sums over the paths through a chain of steps. In a step a path moves from a state to the
same one or to one of the next states. The RNN-T's step is an anti-diagonal of its lattice, the
CTC's a frame. All shapes are static, so that a step of training can be captured as a CUDA graph.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_voice.training import fused

NEVER = -1e30  # logarithm of a probability of 0; its sums are finite, differences are not NaN
_ALIGNMENT = 4  # values: fused kernels would copy a step that does not begin at 16 bytes


class _PathSum(torch.autograd.Function):
    """Logarithm of the sum over all paths, by the forward and backward variables."""

    @staticmethod
    def forward(ctx: Any, moves: Tensor, final: Tensor) -> Tensor:
        first = torch.full_like(final, NEVER)
        first[:, 0] = 0
        rows, advance = [first], fused(_advance, moves.device)
        for step in range(len(moves)):
            rows.append(advance(rows[-1], moves[step]))
        log_sum = torch.logsumexp(rows[-1] + final, 1)
        ctx.save_for_backward(moves, final, torch.stack(rows[:-1]), log_sum)
        return log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        moves, final, alpha, log_sum = ctx.saved_tensors
        rows, retreat = [final], fused(_retreat, moves.device)
        for step in reversed(range(1, len(moves))):
            rows.append(retreat(rows[-1], moves[step]))
        beta = torch.stack(rows[::-1])
        possible = log_sum > NEVER / 2
        weight = grads[0].masked_fill(~possible, 0.0)[:, None]
        log_sum = log_sum.masked_fill(~possible, 0.0)[:, None]
        found = [
            torch.exp(_moved(alpha, kind) + moves[:, kind] + beta - log_sum)
            for kind in range(moves.shape[1])
        ]
        return torch.stack(found, 1).masked_fill(~possible[:, None], 0.0) * weight, None


def _moved(x: Tensor, kind: int) -> Tensor:
    """Values [..., states] of the state `kind` states before each, or behind it if negative."""
    if kind < 0:
        return F.pad(x[..., -kind:], (0, -kind), value=NEVER)
    return F.pad(x, (kind, 0), value=NEVER)[..., : x.shape[-1]]


def _advance(alpha: Tensor, moves: Tensor) -> Tensor:
    """Forward variables [batch, states] after a step of moves [kinds, batch, states]."""
    total = alpha + moves[0]
    for kind in range(1, len(moves)):
        total = torch.logaddexp(total, _moved(alpha, kind) + moves[kind])
    return total


def _retreat(beta: Tensor, moves: Tensor) -> Tensor:
    """Backward variables [batch, states] before a step of moves [kinds, batch, states]."""
    total = beta + moves[0]
    for kind in range(1, len(moves)):
        total = torch.logaddexp(total, _moved(beta + moves[kind], -kind))
    return total


def path_sum(moves: Tensor, final: Tensor) -> Tensor:
    """Logarithm of the sum over all paths of the product of their moves.

    Args:
        moves: [steps, kinds, batch, states] float32, logarithm of the probability of a move into a
            state from the one that is `kind` states before it. Paths begin in state 0.
        final: [batch, states], 0 for states in which a path may end, otherwise `NEVER`.

    Returns:
        [batch]; below `NEVER / 2` where there is no path, for which the gradient is zero.
    """
    extra = -final.shape[1] % _ALIGNMENT
    moves, final = (F.pad(x, (0, extra), value=NEVER) for x in (moves, final))
    return _PathSum.apply(moves, final)  # pyright: ignore[reportReturnType]


def transducer_likelihood(blank: Tensor, label: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    """Log-likelihood of texts by a transducer.

    Args:
        blank: [batch, frames, labels + 1] float32, log-probability of blank at a frame after a
            number of labels.
        label: [batch, frames, labels] float32, that of the next label.
        frames: [batch] int64, frames of each recording, at least 1.
        labels: [batch] int64, labels of each text.

    Returns:
        [batch].
    """
    _, most_frames, states = blank.shape
    device = blank.device
    step = torch.arange(most_frames + states - 1, device=device)[:, None, None]
    state = torch.arange(states, device=device)
    frames, labels = frames[:, None], labels[:, None]
    # After a step of either kind the sum of frame and state is one higher.
    stays = _skewed(blank, step - state, (step - state < frames) & (state <= labels))
    label = F.pad(label, (1, 0), value=NEVER)
    frame = step - state + 1
    moves = _skewed(label, frame, (frame < frames) & (state <= labels) & (state > 0))
    stays = stays.masked_fill(step >= frames + labels, 0.0)
    final = torch.zeros_like(blank[:, 0]).masked_fill(state != labels, NEVER)
    return path_sum(torch.stack([stays, moves], 1), final)


def _skewed(scores: Tensor, frame: Tensor, allowed: Tensor) -> Tensor:
    """Scores [batch, frames, states] by step [steps, batch, states]; `NEVER` if not allowed.

    Args:
        scores: By frame and state.
        frame: [steps, 1, states], frame of a step and state.
        allowed: [steps, batch, states], apart from negative frames.
    """
    most_frames = scores.shape[1]
    index = frame.clamp(0, most_frames - 1).transpose(0, 1).expand(len(scores), -1, -1)
    found = scores.gather(1, index).transpose(0, 1)
    return found.masked_fill(~(allowed & (frame >= 0) & (frame < most_frames)), NEVER)


def ctc_likelihood(scores: Tensor, tokens: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    """Log-likelihood of texts by CTC (connectionist temporal classification).

    Args:
        scores: [batch, frames, ids] float32, log-probabilities; the last id is blank.
        tokens: [batch, labels] int64.
        frames: [batch] int64, frames of each recording.
        labels: [batch] int64, labels of each text.

    Returns:
        [batch]; below `NEVER / 2` where there are too few frames for the text.
    """
    batch, most_frames, ids = scores.shape
    device = scores.device
    # States alternate between blank and labels, and begin and end with blank.
    emitted = tokens.new_full((batch, 2 * tokens.shape[1] + 1), ids - 1)
    emitted[:, 1::2] = tokens
    state = torch.arange(emitted.shape[1], device=device)
    by_token = scores.gather(2, tokens[:, None].expand(-1, most_frames, -1))
    blank = scores[..., -1:]
    pairs = torch.stack([blank.expand_as(by_token), by_token], 3).flatten(2)
    by_state = torch.cat([pairs, blank], 2).transpose(0, 1)
    inside = state <= 2 * labels[:, None]
    before = F.pad(emitted, (2, 0), value=-1)[:, :-2]
    may_skip = inside & (state % 2 == 1) & (state > 1) & (emitted != before)
    step = torch.arange(most_frames, device=device)[:, None, None]
    has_ended = step >= frames[:, None]
    moves = [
        by_state.masked_fill(~inside, NEVER).masked_fill(has_ended, 0.0),
        by_state.masked_fill(~inside | (state == 0) | has_ended, NEVER),
        by_state.masked_fill(~may_skip | has_ended, NEVER),
    ]
    last = 2 * labels[:, None]
    is_last = (state == last) | ((state == last - 1) & (last > 0))
    final = torch.zeros_like(by_state[0]).masked_fill(~is_last, NEVER)
    return path_sum(torch.stack(moves, 1), final)
