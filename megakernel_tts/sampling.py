"""How codes are drawn: the parameters, the logits processing, the counter-based random numbers.

A draw is the argmax of `logits / temperature + Gumbel noise` over the kept ids, which is an exact
draw from their softmax (Gumbel, 1954; Yellott, 1977) and needs no sum whose order a backend could
change. The noise comes from Philox4x32-10 (Salmon et al., 2011) at the counter (id, codebook,
frame) under the stream's seed: neighbours, slot and backend do not enter.
"""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakernel_tts.errors import SamplingError

# Beyond these, dividing and multiplying logits could leave float32. No draw is the worse for it:
# probabilities have long become 0 and 1, and penalised ids keep their order.
_COLDEST = 1e-6
_PENALTIES = 1e-20, 1e20
_LEAST_TOP_P = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How a stream is sampled. The defaults are the release's.

    Attributes:
        temperature: Of code 0; 0 is greedy, and so is all below 1e-6.
        top_k: Of code 0: how many of the likeliest ids are kept; 0 keeps all.
        top_p: Of code 0: the likeliest ids that add up to this probability are kept.
        repetition_penalty: Of code 0: above 1 makes ids that were used before less likely, below
            1 more.
        predictor_temperature: Of codes 1 to 15; 0 is greedy (it sounds robotic), as above.
        predictor_top_k: Of codes 1 to 15.
        predictor_top_p: Of codes 1 to 15.
        seed: The same seed gives the same codes; None draws one.
        max_frames: The most frames (80 ms each) that one piece of text may take; what a slot of the
            engine holds beside the prompt is less than the default.
        guard: Whether runaway speech is stopped (see `guard`).
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    predictor_temperature: float = 0.9
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0
    seed: int | None = None
    max_frames: int = 8192
    guard: bool = True

    def __post_init__(self) -> None:
        for name in ("top_k", "predictor_top_k", "max_frames", "seed"):
            value = getattr(self, name)
            whole = type(value) is int or (name == "seed" and value is None)
            self._check(name, whole, "a whole number")
        for name in ("temperature", "predictor_temperature", "top_p", "predictor_top_p"):
            self._check(name, type(getattr(self, name)) in (int, float), "a number")
        self._check("repetition_penalty", type(self.repetition_penalty) in (int, float), "a number")
        self._check("guard", type(self.guard) is bool, "True or False")
        for name in ("temperature", "predictor_temperature"):
            self._check(name, 0 <= getattr(self, name) <= 1e6, "from 0 to 1,000,000")
        for name in ("top_k", "predictor_top_k"):
            self._check(name, 0 <= getattr(self, name) < 1 << 31, "from 0 to 2^31 - 1")
        for name in ("top_p", "predictor_top_p"):
            self._check(name, 0 < getattr(self, name) <= 1, "above 0 and at most 1")
        penalty = self.repetition_penalty
        self._check("repetition_penalty", 0 < penalty <= sys.float_info.max, "above 0 and finite")
        object.__setattr__(self, "repetition_penalty", float(penalty))  # no tensor holds 10**300
        self._check("max_frames", 1 <= self.max_frames < 1 << 31, "1 or more")
        if self.seed is not None:
            self._check("seed", 0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1")

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise SamplingError(f"{name} is {getattr(self, name)!r}; it must be {expected}.")

    @classmethod
    def greedy(cls, **overrides: Any) -> "Sampling":
        """The likeliest code everywhere: for tests and comparisons, not for listening."""
        chosen: dict[str, Any] = {"temperature": 0.0, "predictor_temperature": 0.0}
        return cls(**(chosen | overrides))

    def seeded(self) -> "Sampling":
        """The same with a seed drawn, if there is none."""
        return self if self.seed is not None else self._with(seed=secrets.randbits(63))

    def in_float32(self) -> "Sampling":
        """The same within what float32 can draw with; backends take it so.

        The coldest temperatures are greedy, and penalties end where logits would overflow.
        """
        least, most = _PENALTIES
        return self._with(
            temperature=_warm(self.temperature),
            predictor_temperature=_warm(self.predictor_temperature),
            top_p=max(self.top_p, _LEAST_TOP_P),
            predictor_top_p=max(self.predictor_top_p, _LEAST_TOP_P),
            repetition_penalty=min(max(self.repetition_penalty, least), most),
        )

    def next_seed(self, steps: int = 1) -> "Sampling":
        """The same with a later seed."""
        return self._with(seed=((self.seed or 0) + steps) % (1 << 64))

    def _with(self, **fields: float) -> "Sampling":
        """The same but for these, which are known to be allowed: `replace` checks all again."""
        same = object.__new__(Sampling)
        vars(same).update(vars(self), **fields)
        return same


@dataclass(frozen=True)
class SamplingParams:
    """How one network's logits are drawn from, for a batch of streams: tensors of [batch, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @staticmethod
    def for_talker(rows: Sequence[Sampling], device: torch.device) -> "SamplingParams":
        """The rule for code 0."""
        return _rule([(s.temperature, s.top_k, s.top_p) for s in rows], device)

    @staticmethod
    def for_predictor(rows: Sequence[Sampling], device: torch.device) -> "SamplingParams":
        """The rule for the other codes."""
        return _rule(
            [(s.predictor_temperature, s.predictor_top_k, s.predictor_top_p) for s in rows], device
        )


def _warm(temperature: float) -> float:
    return temperature if temperature >= _COLDEST else 0.0


def _rule(rows: list[tuple[float, int, float]], device: torch.device) -> SamplingParams:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return SamplingParams(
        torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
        torch.tensor(top_k, dtype=torch.long, device=device)[:, None],
        torch.tensor(top_p, dtype=torch.float32, device=device)[:, None],
    )


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divides positive and multiplies negative logits of seen ids, once an id.

    Args:
        logits: [batch, ids], float32.
        seen: [batch, ids], bool.
        penalty: [batch, 1].
    """
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def sample(logits: Tensor, rule: SamplingParams, noise: Tensor) -> Tensor:
    """One id for each row.

    Args:
        logits: [batch, ids], float32; -inf is never drawn.
        rule: Temperature 0 takes the argmax; ties at the top-k border stay in.
        noise: [batch, ids] of `gumbel_noise`.

    Returns:
        [batch], int64.
    """
    greedy = rule.temperature == 0
    scores = logits / torch.where(greedy, 1.0, rule.temperature)
    scores = torch.where(greedy, scores, _top_p(_top_k(scores, rule.top_k), rule.top_p))
    return torch.where(greedy, scores, scores + noise).argmax(dim=-1)


def _top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    largest = min(int(top_k.max()), scores.shape[-1])
    if largest == 0:
        return scores
    best = scores.topk(largest, dim=-1).values
    border = best.gather(-1, (top_k - 1).clamp(0, largest - 1))
    return scores.masked_fill((scores < border) & (top_k > 0), -torch.inf)


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    if bool((top_p >= 1).all()):
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    # An id goes if those before it suffice already; the likeliest always stays.
    before = probability.cumsum(dim=-1) - probability
    excess = (before >= top_p) & (top_p < 1)
    return scores.masked_fill(torch.zeros_like(excess).scatter(-1, order, excess), -torch.inf)


_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox4x32-10: four random words for each counter.

    Args:
        counter: Four int64 tensors of 32-bit words, broadcastable to each other.
        key: Two of the same.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words wraps in int64, but its 64 bits are the right ones.
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
    seeds: Sequence[int], frames: Sequence[int], groups: int, ids: int, device: torch.device
) -> Tensor:
    """The noise of one frame of each stream, for all of its codebooks.

    Word w of the counter (b, codebook, frame, 0) under the key (seed's low word, high word) belongs
    to id 4b + w. Its upper 23 bits make a uniform number strictly between 0 and 1.

    Returns:
        [streams, groups, ids], float32.
    """

    def words(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)[:, None, None]

    block = torch.arange((ids + 3) // 4, device=device)[None, None, :]
    codebook = torch.arange(groups, device=device)[None, :, None]
    key = [words([s & _MASK for s in seeds]), words([s >> 32 for s in seeds])]
    zero = torch.zeros((), dtype=torch.long, device=device)
    bits = torch.stack(
        philox([block, codebook, words([f & _MASK for f in frames]), zero], key), dim=-1
    )
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.flatten(2)[..., :ids].log()).log()
