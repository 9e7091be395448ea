"""Sampling of codes in plain torch: logits processing and counter-based random numbers.

A sample is the argmax of `logits / temperature + Gumbel noise` over the kept ids. This is an exact
sample from their softmax (Gumbel, 1954; Yellott, 1977) and needs no sum, whose order could differ
between backends. The noise is Philox4x32-10 (Salmon et al., 2011) at the counter (id, codebook,
frame), with the stream's seed as key. It does not depend on other streams, the slot or the backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel_tts.sampling import Sampling


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters of one network for a batch of streams, as tensors.

    Attributes:
        temperature: [batch, 1], float32; 1 in greedy rows.
        greedy: [batch, 1], bool: rows of temperature 0, which select the argmax; None if there is
            none.
        max_k: The largest top k of the rows; 0 if every row keeps all ids.
        rank: [batch, 1], int64: rank of the last of the row's top k, from 0.
        limited: [batch, 1], bool: rows with a top k.
        top_p: [batch, 1], float32; None if every row keeps all ids.
    """

    temperature: Tensor
    greedy: Tensor | None
    max_k: int
    rank: Tensor
    limited: Tensor
    top_p: Tensor | None

    @staticmethod
    def for_talker(samplings: Sequence[Sampling], device: torch.device) -> "SamplingMetadata":
        """Parameters of code 0, one row per stream."""
        return _params([(s.temperature, s.top_k, s.top_p) for s in samplings], device)

    @staticmethod
    def for_predictor(samplings: Sequence[Sampling], device: torch.device) -> "SamplingMetadata":
        """Parameters of codes 1 to 15, one row per stream."""
        rows = [(s.predictor_temperature, s.predictor_top_k, s.predictor_top_p) for s in samplings]
        return _params(rows, device)


def _params(rows: list[tuple[float, int, float]], device: torch.device) -> SamplingMetadata:
    temperature, top_k, top_p = zip(*rows, strict=True)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    return SamplingMetadata(
        temperature=column([t or 1.0 for t in temperature], torch.float32),
        greedy=column([t == 0 for t in temperature], torch.bool) if 0 in temperature else None,
        max_k=max(top_k),
        rank=column([max(k - 1, 0) for k in top_k], torch.long),
        limited=column([k > 0 for k in top_k], torch.bool),
        top_p=column(top_p, torch.float32) if min(top_p) < 1 else None,
    )


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divides positive and multiplies negative logits of seen ids by the penalty, once per id.

    Args:
        logits: [batch, ids], float32.
        seen: [batch, ids], bool: ids that the stream has sampled.
        penalty: [batch, 1], float32.

    Returns:
        [batch, ids], float32.
    """
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def sample(logits: Tensor, params: SamplingMetadata, noise: Tensor) -> Tensor:
    """Samples one id per row.

    Args:
        logits: [batch, ids], float32; an id with -inf is never sampled.
        params: Parameters of the rows. Ids that tie with the last of the top k are kept.
        noise: [batch, ids], float32, from `gumbel_noise`.

    Returns:
        [batch], int64.
    """
    scores = logits / params.temperature
    noisy = _top_p(_top_k(scores, params), params.top_p) + noise
    if params.greedy is not None:
        noisy = torch.where(params.greedy, scores, noisy)
    return noisy.argmax(dim=-1)


def _top_k(scores: Tensor, params: SamplingMetadata) -> Tensor:
    max_k = min(params.max_k, scores.shape[-1])
    if max_k == 0:
        return scores
    largest = scores.topk(max_k, dim=-1).values
    threshold = largest.gather(-1, params.rank.clamp(max=max_k - 1))
    return scores.masked_fill((scores < threshold) & params.limited, -torch.inf)


def _top_p(scores: Tensor, top_p: Tensor | None) -> Tensor:
    if top_p is None:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    # An id is dropped if more likely ids already reach top_p; the most likely id is always kept.
    preceding = probability.cumsum(dim=-1) - probability
    excess = (preceding >= top_p) & (top_p < 1)
    return scores.masked_fill(torch.zeros_like(excess).scatter(-1, order, excess), -torch.inf)


_MASK = 0xFFFFFFFF  # of a 32-bit word
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox4x32-10: four random words per counter.

    Args:
        counter: Four int64 tensors of 32-bit words, broadcastable to each other.
        key: Two int64 tensors of 32-bit words.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps in int64; its 64 bits are still correct.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32) & _MASK ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> 32) & _MASK ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def gumbel_noise(
    seeds: Sequence[int], frames: Sequence[int], num_groups: int, num_ids: int, device: torch.device
) -> Tensor:
    """Gumbel noise of one frame of each stream, for all codebooks.

    Word w of the counter (i, codebook, frame, 0) with the key (low word of the seed, high word)
    belongs to id 4i + w. Its upper 23 bits are a uniform number strictly between 0 and 1.

    Args:
        seeds: One per stream.
        frames: The frame index of each stream.
        num_groups: Codebooks.
        num_ids: Ids of a codebook.
        device: Of the result.

    Returns:
        [streams, num_groups, num_ids], float32.
    """

    def per_stream(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)[:, None, None]

    id_group = torch.arange((num_ids + 3) // 4, device=device)[None, None, :]
    codebook = torch.arange(num_groups, device=device)[None, :, None]
    frame = per_stream([f & _MASK for f in frames])
    zero = torch.zeros((), dtype=torch.long, device=device)
    key = [per_stream([s & _MASK for s in seeds]), per_stream([s >> 32 for s in seeds])]
    words = torch.stack(philox([id_group, codebook, frame, zero], key), dim=-1)
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.flatten(2)[..., :num_ids].log()).log()
