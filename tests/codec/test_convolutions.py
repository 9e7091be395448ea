import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.codec.convolutions import (
    Extend,
    by_taps,
    causal,
    history_length,
    transposed,
    transposed_by_taps,
)
from megakernel_tts.codec.weights import Conv

BATCH, INPUTS, OUTPUTS, COLUMNS = 2, 6, 4, 5


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def extend_with(history: Tensor) -> Extend:
    return lambda x: torch.cat([history, x], dim=-1)


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (7, 1), (7, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_causal_convolution_equals_that_of_torch(kernel: int, dilation: int, bias: bool) -> None:
    weight, offset = noise(OUTPUTS, INPUTS, kernel), noise(OUTPUTS) if bias else None
    conv = by_taps(Conv(weight, offset, dilation=dilation))
    history, x = noise(BATCH, INPUTS, history_length(conv)), noise(BATCH, INPUTS, COLUMNS)
    expected = F.conv1d(torch.cat([history, x], dim=-1), weight, offset, dilation=dilation)
    torch.testing.assert_close(causal(conv, x, extend_with(history)), expected)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 3), (6, 3), (16, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_transposed_convolution_equals_that_of_torch(kernel: int, stride: int, bias: bool) -> None:
    """The columns that depend on all of their inputs."""
    weight, offset = noise(INPUTS, OUTPUTS, kernel), noise(OUTPUTS) if bias else None
    conv = transposed_by_taps(Conv(weight, offset, stride=stride))
    history, x = noise(BATCH, INPUTS, kernel // stride - 1), noise(BATCH, INPUTS, COLUMNS)
    inputs = torch.cat([history, x], dim=-1)
    whole = F.conv_transpose1d(inputs, weight, offset, stride=stride)
    expected = whole[..., kernel - stride :][..., : stride * COLUMNS]
    torch.testing.assert_close(transposed(conv, x, extend_with(history)), expected)


def test_weights_keep_their_values() -> None:
    weight = noise(OUTPUTS, INPUTS, 7)
    for order in (by_taps, transposed_by_taps):
        assert torch.equal(order(Conv(weight, None)).weight, weight)
