from dataclasses import fields

import pytest

from megakernel_tts import Sampling, SamplingError


def test_defaults_are_the_released_ones() -> None:
    assert Sampling() == Sampling(0.9, 50, 1.0, 1.05, 0.9, 50, 1.0, None, 8192, True)
    greedy = Sampling.greedy(seed=3)
    assert (greedy.temperature, greedy.predictor_temperature, greedy.seed) == (0.0, 0.0, 3)
    assert [f.name for f in fields(Sampling)] == [
        "temperature", "top_k", "top_p", "repetition_penalty", "predictor_temperature",
        "predictor_top_k", "predictor_top_p", "seed", "max_frames", "guard",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 50.7}, {"top_k": True}, {"temperature": True}, {"max_frames": 2.5}, {"guard": 1},
        {"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
        {"predictor_top_p": 1.5}, {"repetition_penalty": 0.0}, {"max_frames": 0}, {"seed": -1},
        {"seed": 1 << 64}, {"repetition_penalty": float("inf")}, {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")}, {"repetition_penalty": 10**400},
        {"repetition_penalty": True}, {"temperature": 1.1e6},
    ],
    ids=lambda wrong: str(wrong)[:40],
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SamplingError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]
