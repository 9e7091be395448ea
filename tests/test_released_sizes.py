"""The released sizes, by arithmetic: parameter counts as in the public listings."""

from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path

import pytest
import torch

from megakernel_tts import Sampling
from megakernel_tts.checkpoint import leaves
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.config import read_codec_config, read_model_config
from megakernel_tts.frames import Start
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.random_released import released, released_codec, write_released
from megakernel_tts.weights import model_specs, speaker_specs


@pytest.mark.parametrize(
    ("kind", "size", "hidden", "intermediate", "tensors", "values"),
    [
        ("custom_voice", "0b6", 1024, 3072, 402, 905_788_672),
        ("base", "0b6", 1024, 3072, 478, 914_643_008),
        ("custom_voice", "1b7", 2048, 6144, 404, 1_916_676_352),
        ("base", "1b7", 2048, 6144, 480, 1_928_677_440),
    ],
)
def test_talker_and_predictor(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    size: str,
    hidden: int,
    intermediate: int,
    tensors: int,
    values: int,
) -> None:
    file = released(
        checkpoint(kind, size) / "config.json", tmp_path / "config.json", hidden, intermediate
    )
    config = read_model_config(file)
    found = list(leaves(model_specs(config)))
    if config.speaker is not None:
        found += leaves(speaker_specs(config.speaker))
    assert len({leaf.name for leaf in found}) == len(found) == tensors
    assert sum(prod(leaf.shape) for leaf in found) == values


def test_codec_decoder(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint() / "speech_tokenizer" / "config.json"
    file = released_codec(source, tmp_path / "config.json")
    found = list(leaves(decoder_specs(read_codec_config(file).decoder)))
    # The two input projections of the quantiser are stored and never used.
    unused = 2 * 256 * 512
    assert len(found) == 271 - 2
    assert sum(prod(leaf.shape) for leaf in found) == 114_323_137 - unused


@pytest.mark.gpu
def test_eight_streams_of_the_wider_size_are_the_same_a_hundred_times(tmp_path: Path) -> None:
    """Their ring of weights is the shortest, so that a slot is soon written again."""
    cuda = torch.device("cuda")
    write_released(tmp_path, "1.7B", cuda)
    with closing(load_checkpoint(tmp_path, cuda, torch.bfloat16, 8).engine) as engine:
        kernel = engine.backend
        assert kernel.name == "megakernel"
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randn(9, 2048, generator=generator).bfloat16()

        def speak() -> list[list[list[int]]]:
            kernel.prefill([Start(slot, prompt, Sampling(seed=slot)) for slot in range(8)])
            for slot in range(8):
                kernel.feed(slot, prompt, True)
            made = kernel.step(range(8), 32)
            for slot in range(8):
                kernel.release(slot)
            return [frames.codes.tolist() for frames in made]

        first = speak()
        assert max(map(len, first)) > 16
        assert [speak() == first for _ in range(100)] == 100 * [True]
