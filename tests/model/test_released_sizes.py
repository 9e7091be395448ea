"""Random checkpoints of the released sizes: parameter counts of the public listings, and tokens."""

import re
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from megakernel_common.checkpoint import leaves
from megakernel_tts.bench.benchmark import ARRIVALS_TEXT, TEXT
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.model import random_released
from megakernel_tts.model.config import read_codec_config, read_model_config
from megakernel_tts.model.random_checkpoint import write_checkpoint
from megakernel_tts.model.random_released import write_released_codec_config, write_released_config
from megakernel_tts.model.weights import model_specs, speaker_specs
from megakernel_tts.text.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    ("kind", "size", "hidden", "intermediate", "num_tensors", "num_values"),
    [
        ("custom_voice", "0b6", 1024, 3072, 402, 905_788_672),
        ("base", "0b6", 1024, 3072, 478, 914_643_008),
        ("custom_voice", "1b7", 2048, 6144, 404, 1_916_676_352),
        ("base", "1b7", 2048, 6144, 480, 1_928_677_440),
    ],
)
def test_talker_and_predictor_have_the_released_parameter_counts(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    size: str,
    hidden: int,
    intermediate: int,
    num_tensors: int,
    num_values: int,
) -> None:
    file = write_released_config(
        checkpoint(kind, size) / "config.json", tmp_path / "config.json", hidden, intermediate
    )
    config = read_model_config(file)
    specs = list(leaves(model_specs(config)))
    if config.speaker is not None:
        specs += leaves(speaker_specs(config.speaker))
    assert len({spec.name for spec in specs}) == len(specs) == num_tensors
    assert sum(prod(spec.shape) for spec in specs) == num_values


def test_codec_decoder_has_the_released_parameter_count(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint() / "speech_tokenizer" / "config.json"
    file = write_released_codec_config(source, tmp_path / "config.json")
    specs = list(leaves(decoder_specs(read_codec_config(file).decoder)))
    # The quantiser's two input projections are stored in the file but never used.
    num_unused = 2 * 256 * 512
    assert len(specs) == 271 - 2
    assert sum(prod(spec.shape) for spec in specs) == 114_323_137 - num_unused


@pytest.mark.parametrize("text", [TEXT, ARRIVALS_TEXT])
def test_each_word_of_the_benchmarks_texts_is_one_token(tmp_path: Path, text: str) -> None:
    """As of the released vocabulary, so that prompts of random weights are as long."""
    write_checkpoint(tmp_path, words=random_released._WORDS)
    tokenizer = TextTokenizer(tmp_path, 1 << 20)
    assert len(tokenizer.encode(text)) == len(re.findall(r"\w+|[,.]", text))
