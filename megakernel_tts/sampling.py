"""Sampling parameters of a stream."""

import secrets
import sys
from dataclasses import dataclass
from typing import Any

from megakernel_tts.errors import SamplingError

# Beyond these bounds the scaled logits could overflow float32. Clamping does not change samples:
# probabilities are already 0 or 1 there, and penalised ids keep their order.
_MIN_TEMPERATURE = 1e-6
_MIN_PENALTY, _MAX_PENALTY = 1e-20, 1e20
_MIN_TOP_P = 1e-30


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a stream. vLLM calls them `SamplingParams`.

    The defaults are those of the released models.

    Attributes:
        temperature: For code 0. Values below 1e-6 select the most likely id (greedy).
        top_k: For code 0: number of most likely ids that are kept; 0 keeps all.
        top_p: For code 0: the most likely ids whose probabilities add up to `top_p` are kept.
        repetition_penalty: For code 0: values above 1 make ids that were already sampled less
            likely, values below 1 more likely.
        predictor_temperature: For codes 1 to 15. Greedy values sound robotic.
        predictor_top_k: For codes 1 to 15.
        predictor_top_p: For codes 1 to 15.
        seed: The same seed gives the same codes; None selects a random seed.
        max_frames: Maximum number of frames (80 ms each) of one segment of text. The capacity of
            an engine slot is lower than the default.
        guard: Whether runaway speech is stopped (see `engine/guard.py`).
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
            is_integer = type(value) is int or (name == "seed" and value is None)
            self._check(name, is_integer, "a whole number")
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
        object.__setattr__(self, "repetition_penalty", float(penalty))  # 10**300 fits no tensor
        self._check("max_frames", 1 <= self.max_frames < 1 << 31, "1 or more")
        if self.seed is not None:
            self._check("seed", 0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1")

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise SamplingError(f"{name} is {getattr(self, name)!r}; it must be {expected}.")

    @classmethod
    def greedy(cls, **overrides: Any) -> "Sampling":
        """Parameters that select the most likely code everywhere, for tests and comparisons."""
        parameters: dict[str, Any] = {"temperature": 0.0, "predictor_temperature": 0.0}
        return cls(**(parameters | overrides))

    def seeded(self) -> "Sampling":
        """A copy with a random seed if `seed` is None."""
        return self if self.seed is not None else self._with(seed=secrets.randbits(63))

    def in_float32(self) -> "Sampling":
        """A copy within the range of float32 arithmetic, as backends require it.

        Temperatures near 0 become 0 (greedy). The penalty is clamped so that logits stay finite.
        """
        return self._with(
            temperature=_greedy_if_tiny(self.temperature),
            predictor_temperature=_greedy_if_tiny(self.predictor_temperature),
            top_p=max(self.top_p, _MIN_TOP_P),
            predictor_top_p=max(self.predictor_top_p, _MIN_TOP_P),
            repetition_penalty=min(max(self.repetition_penalty, _MIN_PENALTY), _MAX_PENALTY),
        )

    def next_seed(self, steps: int = 1) -> "Sampling":
        """A copy whose seed is `steps` later; for 0 steps itself."""
        return self if not steps else self._with(seed=((self.seed or 0) + steps) % (1 << 64))

    def _with(self, **fields: float) -> "Sampling":
        """A copy with valid values replaced; `dataclasses.replace` would check all values again."""
        copy = object.__new__(Sampling)
        vars(copy).update(vars(self), **fields)
        return copy


def _greedy_if_tiny(temperature: float) -> float:
    return temperature if temperature >= _MIN_TEMPERATURE else 0.0
