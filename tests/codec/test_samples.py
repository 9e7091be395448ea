"""The samples of the codec's emulated kernels."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megakernel_common.checkpoint import map_leaves
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.model.random_checkpoint import random_tensor
from tests.codec.decoding import decode_chunks, decode_with_torch, some_codes
from tests.codec.test_cuda_decoder import low_rate_config
from tests.emulator.codec import emulated_codec_kernels


def test_samples_beyond_full_scale_are_clipped(tmp_path: Path) -> None:
    """As in plain torch."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    config = low_rate_config(tmp_path)
    weights = map_leaves(w.decoder_specs(config.decoder), random_tensor)
    loud = replace(weights.conv_out, weight=100 * weights.conv_out.weight)
    codes, codec = some_codes(4, 0), (replace(weights, conv_out=loud), config)
    decoder = CudaDecoder(*codec, slots=1, kernels=emulated_codec_kernels())
    samples = decode_chunks(decoder, 0, codes, [4])
    wave = decode_with_torch(codec, codes)
    is_clipped = np.abs(wave) == 1
    assert 0 < is_clipped.mean() < 1
    np.testing.assert_array_equal(samples[is_clipped], 32767 * wave[is_clipped])
