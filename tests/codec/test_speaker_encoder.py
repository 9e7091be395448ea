from collections.abc import Callable

import torch

from megakernel_tts.codec.speaker_encoder import log_mel, mel_filters
from megakernel_tts.loader import LoadedModel


def test_slaney_filters_have_unit_area_and_cover_the_band() -> None:
    filters = mel_filters(128)
    assert filters.shape == (128, 513)
    bin_width = 12_000 / 512
    areas = filters.sum(dim=1) * bin_width
    assert (areas[80:] - 1).abs().max() < 0.02  # narrow low filters span only a few bins
    assert filters.sum(dim=0)[2:-1].min() > 0


def test_a_tone_is_loudest_in_its_band() -> None:
    t = torch.arange(24_000) / 24_000
    filters = mel_filters(128)
    mel = log_mel(torch.sin(2 * torch.pi * 1000 * t), filters)
    assert mel.shape == (128, 24_000 // 256)
    loudest = int(mel.mean(dim=1).argmax())
    assert filters[loudest, round(1000 / (12_000 / 512))] > 0


def test_speaker_embeddings_are_deterministic_and_distinct(
    load: Callable[..., LoadedModel],
) -> None:
    loaded = load("base")
    assert loaded.cloner is not None
    embed = loaded.cloner.speaker.embed
    one = torch.randn(24_000, generator=torch.Generator().manual_seed(0)) * 0.1
    other = torch.sin(torch.arange(24_000) / 20) * 0.3
    assert embed(one).shape == (loaded.config.talker.stack.hidden_size,)
    assert torch.equal(embed(one), embed(one))
    assert torch.cosine_similarity(embed(one), embed(other), dim=0) < 0.999
