"""Small codecs, codes for their decoders, what they make of them, and a random choice of tiles."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.checkpoint import map_leaves
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder, DecodeRequest
from megakernel_tts.kernels.codec_structs import ProjectionParams, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import AnyTile, Tile, fitting_tiles, reads_tiled_rows
from megakernel_tts.kernels.codec_unit_tiles import ResidualUnitTile, fitting_unit_tiles
from megakernel_tts.kernels.codec_warpgroup_tiles import WarpgroupTile
from megakernel_tts.model.config import CodecConfig, read_codec_config
from megakernel_tts.model.random_checkpoint import random_tensor, small_codec_config

CODES = 64
LOW_RATES = (2, 2, 2, 2)  # 64 samples per frame: histories are longer than a frame
Codec = tuple[w.DecoderWeights, CodecConfig]


def small_codec(
    folder: Path, rates: Sequence[int] | None = None, codes: int = CODES, **sizes: int
) -> Codec:
    """A codec with random weights.

    Args:
        folder: Receives the configuration.
        rates: Of the decoder's four blocks; by default those of `small_codec_config`.
        codes: Of a codebook.
        sizes: Of the decoder's layers.
    """
    content = small_codec_config(codes)
    content["decoder_config"] |= sizes
    if rates is not None:
        samples = 4 * math.prod(rates)
        content |= {"decode_upsample_rate": samples, "encode_downsample_rate": samples}
        content["decoder_config"]["upsample_rates"] = [*rates]
        content["encoder_config"]["upsampling_ratios"] = [2, 2, 2, samples // 16]
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    config = read_codec_config(file)
    return map_leaves(w.decoder_specs(config.decoder), random_tensor), config


def some_codes(frames: int, seed: int, codes: int = CODES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, codes, (frames, 16), generator=generator)


def _round_rows(weight: Tensor) -> Tensor:
    """Rows in half precision, each scaled by a power of two, as `weight_packing.pack` does."""
    _, exponents = torch.frexp(weight.flatten(1).abs().amax(1))
    units = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return ((weight.flatten(1) / units[:, None]).half().float() * units[:, None]).view_as(weight)


def _round_normed(weight: Tensor, norm: Tensor) -> Tensor:
    """The weights behind a norm, whose weight is folded into them."""
    return _round_rows(weight * norm) / norm


def _round_convolution(conv: w.Conv) -> w.Conv:
    return replace(conv, weight=_round_rows(conv.weight))


def _round_transposed(conv: w.Conv) -> w.Conv:
    """Its rows are the channels of `stride` output rows."""
    rows = conv.weight.unflatten(2, (-1, conv.stride)).permute(1, 3, 0, 2)
    rounded = _round_rows(rows.flatten(0, 1)).view(rows.shape)
    return replace(conv, weight=rounded.permute(2, 0, 3, 1).flatten(2))


def round_weights(codec: Codec) -> Codec:
    """A codec whose weights are those that the kernels have, in half precision."""
    weights, config = codec
    layers = tuple(
        replace(
            layer,
            **{name: _round_normed(getattr(layer, name), layer.input_norm) for name in "qkv"},
            gate=_round_normed(layer.gate, layer.post_norm),
            up=_round_normed(layer.up, layer.post_norm),
            o=_round_rows(layer.o),
            down=_round_rows(layer.down),
        )
        for layer in weights.layers
    )
    upsample = tuple(
        replace(
            stage,
            transposed=_round_transposed(stage.transposed),
            convnext=replace(
                stage.convnext,
                up=_round_rows(stage.convnext.up),
                down=_round_rows(stage.convnext.down),
            ),
        )
        for stage in weights.upsample
    )
    blocks = tuple(
        replace(
            block,
            transposed=_round_transposed(block.transposed),
            residuals=tuple(
                replace(
                    unit, conv1=_round_convolution(unit.conv1), conv2=_round_convolution(unit.conv2)
                )
                for unit in block.residuals
            ),
        )
        for block in weights.blocks
    )
    rounded = replace(
        weights,
        pre_conv=_round_convolution(weights.pre_conv),
        input=_round_rows(weights.input),
        layers=layers,
        output=_round_normed(weights.output, weights.norm),
        upsample=upsample,
        conv_in=_round_convolution(weights.conv_in),
        blocks=blocks,
    )
    return rounded, config


def decode_with_torch(codec: Codec, codes: Tensor) -> NDArray[np.float32]:
    """The waveform of plain torch, on the weights' device."""
    reference = Decoder(*codec)
    device = codec[0].input.device
    return reference.decode(codes[None].to(device), reference.start())[0][0].cpu().numpy()


def decode_chunks(
    decoder: CudaDecoder, slot: int, codes: Tensor, sizes: Sequence[int]
) -> NDArray[np.int16]:
    decoder.load_slot(slot)
    return np.concatenate([decode_one(decoder, slot, chunk) for chunk in codes.split(list(sizes))])


def decode_one(decoder: CudaDecoder, slot: int, codes: Tensor) -> NDArray[np.int16]:
    (samples,) = decoder.decode([DecodeRequest(slot, codes)])()
    assert samples is not None
    return samples


def signal_to_noise(samples: NDArray[np.int16], reference: NDArray[np.float32]) -> float:
    """In dB; the constant part is excluded, because it would hide noise."""
    error = samples / 32767.0 - reference
    return 20 * math.log10(float(reference.std()) / float(error.std()))


class RandomTiles:
    """Chooses any tile that a launch may have, first those of many rows that were not chosen yet.

    Attributes:
        used: The tiles that were chosen.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.used: set[AnyTile] = set()

    def __call__(self, params: ProjectionParams, num_sms: int) -> AnyTile:
        fitting = fitting_tiles(params)
        new = [t for t in fitting if not isinstance(t, Tile) and t not in self.used]
        tile = self._rng.choice(new or fitting)
        self.used.add(tile)
        return tile


class RandomWarpgroupTiles(RandomTiles):
    """Chooses a tile of sm_90a where one fits, first those that were not chosen yet."""

    def __call__(self, params: ProjectionParams, num_sms: int) -> AnyTile:
        fitting = fitting_tiles(params)
        for_warpgroups = [tile for tile in fitting if isinstance(tile, WarpgroupTile)]
        new = [tile for tile in for_warpgroups if tile not in self.used]
        tile = self._rng.choice(new or for_warpgroups or fitting)
        self.used.add(tile)
        return tile


class RandomUnitTiles:
    """Chooses one or two launches for a residual unit, first the tiles that were not chosen yet.

    Attributes:
        used: The tiles that were chosen; None: two launches.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._chosen: dict[tuple[int, int | None, int | None], ResidualUnitTile | None] = {}
        self.used: set[ResidualUnitTile | None] = set()

    def __call__(self, params: ResidualUnitParams, num_sms: int) -> ResidualUnitTile | None:
        # Of one launch the choice is asked for more than once, also before layouts are chosen.
        first, second = params.convolution, params.pointwise
        unit = (first.num_rows, first.weights.value, second.weights.value)
        if unit not in self._chosen:
            fitting = fitting_unit_tiles(params)
            new = [tile for tile in fitting if tile not in self.used]
            self._chosen[unit] = self._rng.choice(new or [*fitting, None])
        self.used.add(self._chosen[unit])
        return self._chosen[unit]


def joined(samples: list[NDArray[np.int16]]) -> NDArray[np.int16]:
    return np.concatenate([np.empty(0, np.int16), *samples])


def can_read_tiled_rows(params: ProjectionParams, num_sms: int) -> bool:
    """Whether a projection has a tile that reads tiled activations."""
    was_tiled, params.input.is_tiled = params.input.is_tiled, True
    fitting = fitting_tiles(params)
    params.input.is_tiled = was_tiled
    return any(reads_tiled_rows(tile) for tile in fitting)
