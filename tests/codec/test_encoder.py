from collections.abc import Callable

import pytest
import torch

from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.loader import LoadedModel


@pytest.fixture
def encoder(load: Callable[..., LoadedModel]) -> Encoder:
    cloner = load("base").cloner
    assert cloner is not None
    return cloner.encoder


@pytest.mark.parametrize("samples", [1920, 1921, 12_000, 48_720])
def test_number_of_frames_is_rounded_up(encoder: Encoder, samples: int) -> None:
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(0)) * 0.1
    codes = encoder.encode(wave)
    assert codes.shape == (-(-samples // 1920), 16)
    assert codes.min() >= 0 and codes.max() < 256


def test_encoding_is_causal(encoder: Encoder) -> None:
    """Later samples do not change earlier frames."""
    wave = torch.randn(24_000, generator=torch.Generator().manual_seed(1)) * 0.1
    whole, head = encoder.encode(wave), encoder.encode(wave[: 1920 * 6])
    assert torch.equal(whole[:6], head)
