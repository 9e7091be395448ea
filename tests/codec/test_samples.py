"""The samples of the codec's emulated kernels."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.kernel_layers import FRAME
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.codec_structs import SamplesParams
from tests.codec.decoding import (
    LOW_RATES,
    decode_chunks,
    decode_with_torch,
    small_codec,
    some_codes,
)
from tests.emulator.codec import EmulatedCodecModule


@pytest.fixture(scope="module")
def module() -> EmulatedCodecModule:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedCodecModule()


@pytest.fixture(scope="module")
def kernels(module: EmulatedCodecModule) -> CodecKernels:
    return CodecKernels(module, 4, overlap=True, has_warpgroups=True)


@pytest.mark.parametrize(
    ("written", "is_early"), [(None, False), ("input", False), ("weights", True)]
)
def test_samples_are_those_of_a_convolution_of_any_number_of_channels(
    module: EmulatedCodecModule, kernels: CodecKernels, written: str | None, is_early: bool
) -> None:
    """Of two frames of one stream; 160 channels are more than sixteen lanes have at once.

    The previous kernel may still write the input, but no weights: these are read before it ends.
    """
    rows, channels, taps = 32, 160, 7
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(taps - 1 + rows, channels, generator=generator)
    weight = 0.01 * torch.randn(taps, channels, generator=generator)
    x = x.half().float()
    history, data = x[: taps - 1].half(), x[taps - 1 :].half()
    frames = np.zeros(2, FRAME)
    pcm, non_finite = torch.zeros(rows, dtype=torch.int16), torch.zeros(2, dtype=torch.int32)
    params = SamplesParams(
        frames=frames.ctypes.data,
        num_rows=rows,
        weights=weight.data_ptr(),
        bias=0.1,
        pcm=pcm.data_ptr(),
        non_finite=non_finite.data_ptr(),
    )
    params.input.data, params.input.history = data.data_ptr(), history.data_ptr()
    params.input.num_planes, params.input.num_channels = 1, channels
    params.input.history_rows, params.input.rows_per_frame = taps - 1, rows // 2
    tensors = {"input": data, "weights": weight}
    before = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    module.writes.add(*[(tensors[written], before[written])] if written else [])
    kernels.samples(params, [data, pcm, non_finite])
    wave = F.conv1d(x.t()[None], weight.t()[None].contiguous())[0, 0] + 0.1
    assert wave.abs().max() < 1
    assert np.allclose(pcm, (32767 * wave).round(), rtol=0, atol=1) != is_early
    assert not non_finite.any()


def test_samples_beyond_full_scale_are_clipped(kernels: CodecKernels, tmp_path: Path) -> None:
    """As in plain torch."""
    weights, config = small_codec(tmp_path, LOW_RATES)
    loud = replace(weights.conv_out, weight=100 * weights.conv_out.weight)
    codes, codec = some_codes(4, 0), (replace(weights, conv_out=loud), config)
    decoder = CudaDecoder(*codec, slots=1, kernels=kernels)
    samples = decode_chunks(decoder, 0, codes, [4])
    wave = decode_with_torch(codec, codes)
    is_clipped = np.abs(wave) == 1
    assert 0 < is_clipped.mean() < 1
    np.testing.assert_array_equal(samples[is_clipped], 32767 * wave[is_clipped])
