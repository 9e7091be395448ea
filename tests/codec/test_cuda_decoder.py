"""CudaDecoder against plain torch, with emulated kernels on the CPU."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.checkpoint import Checkpoint
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.cuda_decoder import CudaDecoder, rounds
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest
from megakernel_tts.kernels.codec_structs import Epilogue, ProjectionParams, ResidualUnitParams
from megakernel_tts.kernels.codec_tiles import (
    MANY_ROW_TILES,
    AnyTile,
    Tile,
    choose_tile,
    fitting_tiles,
)
from megakernel_tts.kernels.codec_unit_tiles import (
    RESIDUAL_UNIT_TILES,
    ResidualUnitTile,
)
from megakernel_tts.kernels.codec_warpgroup_tiles import WARPGROUP_TILES
from megakernel_tts.model.config import read_codec_config
from megakernel_tts.model.hub import find_checkpoint
from tests.codec.decoding import (
    CODES,
    LOW_RATES,
    Codec,
    RandomTiles,
    RandomUnitTiles,
    decode_chunks,
    decode_one,
    decode_with_torch,
    joined,
    round_weights,
    signal_to_noise,
    small_codec,
    some_codes,
)
from tests.emulator.codec import emulated_codec_kernels

Make = Callable[..., CudaDecoder]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """With weights in half precision, whose rounding would hide that of the activations."""
    return round_weights(small_codec(tmp_path_factory.mktemp("codec"), LOW_RATES))


@pytest.fixture(scope="module")
def make() -> Make:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")

    def make_decoder(codec: Codec, num_sms: int = 4, **choices: Any) -> CudaDecoder:
        return CudaDecoder(*codec, slots=3, kernels=emulated_codec_kernels(num_sms, **choices))

    return make_decoder


@pytest.fixture(scope="module")
def decoder(codec: Codec, make: Make) -> CudaDecoder:
    return make(codec)


@pytest.fixture(scope="module")
def streams(decoder: CudaDecoder) -> list[tuple[Tensor, NDArray[np.int16]]]:
    """Codes of three streams, and the samples of each alone in one chunk."""
    codes = [some_codes(12, seed) for seed in range(3)]
    return [(one, decode_chunks(decoder, 0, one, [12])) for one in codes]


def test_samples_match_plain_torch(codec: Codec, decoder: CudaDecoder) -> None:
    """For more frames than the attention window and the KV ring have.

    If the input of a product had one plane instead of two, the ratio would be below the bound.
    """
    codes = some_codes(100, 0)
    samples = decode_chunks(decoder, 0, codes, [100])
    assert signal_to_noise(samples, decode_with_torch(codec, codes)) >= 63


def test_demo_voice_matches_plain_torch(make: Make) -> None:
    """At the demo voice's frame rate, with codes of its own speech."""
    folder = find_checkpoint("demo") / "speech_tokenizer"
    config = read_codec_config(folder / "config.json")
    weights = Checkpoint(folder).load(
        w.decoder_specs(config.decoder), torch.device("cpu"), torch.float32
    )
    golden = np.load(Path(__file__).parent.parent / "goldens/official-demo.npz")
    codes = torch.from_numpy(golden["demo-full/codes"]).long()
    samples = decode_chunks(make((weights, config)), 0, codes, [1, 2, 4, 9])
    assert signal_to_noise(samples, decode_with_torch((weights, config), codes)) >= 60


def test_batching_and_chunking_do_not_change_samples(
    decoder: CudaDecoder, streams: list[tuple[Tensor, NDArray[np.int16]]]
) -> None:
    codes, solo = zip(*streams, strict=True)
    for slot in range(3):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    rng, at = random.Random(0), [0, 0, 0]
    while min(at) < 12:
        slots = [s for s in rng.sample(range(3), rng.randint(1, 3)) if at[s] < 12]
        ends = {s: min(12, at[s] + rng.choice([1, 1, 2, 5, 11])) for s in slots}
        requests = [DecodeRequest(s, codes[s][at[s] : ends[s]]) for s in slots]
        for s, samples in zip(slots, decoder.decode(requests)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] = ends[s]
    for s in range(3):
        np.testing.assert_array_equal(np.concatenate(made[s]), solo[s])


def pending_request(
    slot: int, codes: Tensor, received: int, frames: int, rng: random.Random
) -> tuple[PendingDecodeRequest, NDArray[np.int32]]:
    """A request of `frames` frames of which the first `received` have codes.

    Returns:
        The request, and its pending codes [frames - received, 16], filled with arbitrary values;
        the rows have a stride of 17.
    """
    junk = [rng.choice([-7, 0, CODES, 2150, 2**31 - 1]) for _ in range((frames - received) * 17)]
    rows = np.array(junk, np.int32).reshape(frames - received, 17)[:, 1:]
    return PendingDecodeRequest(slot, codes[:received].numpy(), rows), rows


def test_discarded_pending_frames_do_not_change_samples(
    decoder: CudaDecoder, streams: list[tuple[Tensor, NDArray[np.int16]]]
) -> None:
    codes, solo = zip(*streams, strict=True)
    for slot in range(3):
        decoder.load_slot(slot)
    made: list[list[NDArray[np.int16]]] = [[], [], []]
    rng, at, fewer = random.Random(0), [0, 0, 0], 0
    while min(at) < 12:
        slots = [s for s in rng.sample(range(3), rng.randint(1, 3)) if at[s] < 12]
        requests: list[PendingDecodeRequest] = []
        counts: list[int] = []
        for s in slots:
            left, frames = codes[s][at[s] :], rng.randint(1, 8)
            received, count = (rng.randint(0, min(frames, len(left))) for _ in range(2))
            request, rows = pending_request(s, left, received, frames, rng)
            rows[: max(count - received, 0)] = left[received : max(count, received)]
            requests.append(request)
            counts.append(count)
            fewer += 0 < count < frames
        confirm = decoder.decode_pending(requests)
        confirmed = [(s, count) for s, count in zip(slots, counts, strict=True) if count]
        for (s, count), samples in zip(confirmed, confirm(counts)(), strict=True):
            assert samples is not None
            made[s].append(samples)
            at[s] += count
    assert fewer > 5
    for s in range(3):
        np.testing.assert_array_equal(np.concatenate(made[s]), solo[s])


def test_tile_choice_does_not_change_samples(
    codec: Codec, decoder: CudaDecoder, make: Make
) -> None:
    """The number of multiprocessors selects the tiles."""
    codes = some_codes(8, 1)
    large = make(codec, num_sms=1000)
    np.testing.assert_array_equal(
        decode_chunks(large, 0, codes, [8]), decode_chunks(decoder, 0, codes, [8])
    )


@pytest.mark.parametrize("sizes", [[1, 8, 2], [11], [3, 7, 1]])
def test_no_tile_changes_samples(
    codec: Codec, decoder: CudaDecoder, make: Make, sizes: list[int]
) -> None:
    codes = some_codes(11, 9)
    expected = decode_chunks(decoder, 0, codes, [11])
    for seed in range(3):
        tiles = RandomTiles(seed)
        samples = decode_chunks(make(codec, choose=tiles), 1, codes, sizes)
        np.testing.assert_array_equal(samples, expected)
        assert len(tiles.used) > 12


def test_tiles_of_48_columns_do_not_change_samples(tmp_path: Path, make: Make) -> None:
    """They have more threads than whole rows."""
    codec = small_codec(
        tmp_path, [8, 2, 2, 2], decoder_dim=384, hidden_size=512, num_hidden_layers=1
    )
    used: set[tuple[int, int]] = set()

    def choose(params: ProjectionParams, num_sms: int) -> AnyTile:
        for tile in fitting_tiles(params):
            if isinstance(tile, Tile) and tile.columns == 48:
                used.add((params.epilogue.value, params.num_rows))
                return tile
        return choose_tile(params, num_sms)

    codes = some_codes(13, 9)
    with_tile = make(codec, choose=choose, choose_tiling=lambda *_: False)
    samples = decode_chunks(with_tile, 0, codes, [8, 5])
    np.testing.assert_array_equal(samples, decode_chunks(make(codec), 0, codes, [8, 5]))
    of_rope = {(Epilogue.ROPE_QKV, 5), (Epilogue.ROPE_QKV, 8)}
    assert used == {*of_rope, *((Epilogue.SNAKE, rows) for rows in (20, 32, 160, 256))}


def test_tiles_of_wide_layers_do_not_change_samples(tmp_path: Path, make: Make) -> None:
    """Tiles with more columns, or more rows of a frame, than the layers of the small codec have.

    Streams have chunks of different lengths in a call.
    """
    codec = small_codec(tmp_path, [8, 4, 2, 2], decoder_dim=768)
    plain = make(codec, choose_unit=lambda *_: None)
    tiles, unit_tiles = RandomTiles(0), RandomUnitTiles(0)
    # Three thread blocks: in a last round, some have an item for one of two consumers only.
    other = make(
        codec,
        num_sms=3,
        choose=tiles,
        choose_unit=unit_tiles,
        choose_tiling=lambda *_: False,
    )
    codes = [some_codes(2, seed) for seed in range(2)]
    made: list[list[NDArray[np.int16]]] = [[], []]
    for slot in range(2):
        other.load_slot(slot)
    for ends in ((1, 0), (2, 2)):  # one chunk has a history
        starts = [len(samples) // other.samples_per_frame for samples in map(joined, made)]
        slots = [slot for slot in range(2) if ends[slot] > starts[slot]]
        requests = [DecodeRequest(slot, codes[slot][starts[slot] : ends[slot]]) for slot in slots]
        for slot, samples in zip(slots, other.decode(requests)(), strict=True):
            assert samples is not None
            made[slot].append(samples)
    for slot in range(2):
        expected = decode_chunks(plain, slot, codes[slot], [1, 1])
        np.testing.assert_array_equal(joined(made[slot]), expected)
    assert tiles.used >= {*MANY_ROW_TILES, *(t for t in WARPGROUP_TILES if not t.is_tiled)}
    assert unit_tiles.used >= {*RESIDUAL_UNIT_TILES}


@pytest.mark.parametrize("sizes", [[1, 1, 3], [5], [2, 3]])
def test_residual_units_as_one_launch_do_not_change_samples(
    tmp_path: Path, make: Make, sizes: list[int]
) -> None:
    """Nor the histories, which are the float16 inputs of all convolutions."""
    codec = small_codec(tmp_path, [16, 2, 2, 2], decoder_dim=384)
    separate, codes = make(codec, choose_unit=lambda *_: None), some_codes(5, 3)
    expected = decode_chunks(separate, 0, codes, sizes)
    for tile in RESIDUAL_UNIT_TILES:
        dilations: set[int] = set()

        def fuse(
            params: ResidualUnitParams,
            num_sms: int,
            tile: ResidualUnitTile = tile,
            dilations: set[int] = dilations,
        ) -> ResidualUnitTile | None:
            if not tile.fits(params):
                return None
            dilations.add(params.convolution.dilation)
            return tile

        fused = make(codec, choose_unit=fuse)
        np.testing.assert_array_equal(decode_chunks(fused, 1, codes, sizes), expected)
        assert torch.equal(fused.save_slot(1).history, separate.save_slot(0).history)
        assert dilations == {1, 3, 9}


def test_a_saved_state_continues_in_any_slot(decoder: CudaDecoder) -> None:
    codes = some_codes(12, 2)
    whole = decode_chunks(decoder, 0, codes, [12])
    decode_chunks(decoder, 1, codes[:5], [5])
    state = decoder.save_slot(1)
    decode_chunks(decoder, 1, some_codes(7, 3), [7])  # does not change the saved state
    for slot in (1, 2):
        decoder.load_slot(slot, state)
        rest = decode_one(decoder, slot, codes[5:])
        np.testing.assert_array_equal(rest, whole[5 * decoder.samples_per_frame :])


def test_a_new_stream_begins_without_history(codec: Codec, decoder: CudaDecoder) -> None:
    """Whether it is decoded, saved, or begins in plain torch."""
    codes, start = some_codes(6, 9), decoder.prepare_state(Decoder(*codec).start())
    assert start is None
    expected = decode_chunks(decoder, 0, codes, [6])
    for slot in range(3):
        decode_chunks(decoder, slot, some_codes(5, slot), [5])
    decoded = decoder.save_slot(2)
    for slot in range(3):
        decoder.load_slot(slot, start)
    state = decoder.save_slot(1)
    assert not state.history.any() and state.position == 0
    decoder.load_slot(2, start)
    decoder.load_slot(2, decoded)  # its history replaces the one that was to be cleared
    decoder.load_slot(1, state)
    for slot in range(2):
        np.testing.assert_array_equal(decode_one(decoder, slot, codes), expected)
    rest = decode_one(decoder, 2, some_codes(3, 1))
    whole = torch.cat([some_codes(5, 2), some_codes(3, 1)])
    samples = decode_chunks(decoder, 2, whole, [8])
    np.testing.assert_array_equal(rest, samples[-len(rest) :])


def test_a_torch_state_continues_in_a_slot(codec: Codec, decoder: CudaDecoder) -> None:
    codes, reference = some_codes(94, 7), Decoder(*codec)
    _, state = reference.decode(codes[None, :90], reference.start())
    decoder.load_slot(2, decoder.prepare_state(state))
    samples = decode_one(decoder, 2, codes[90:])
    expected, _ = reference.decode(codes[None, 90:], state)
    assert signal_to_noise(samples, expected[0].numpy()) >= 60


def test_a_failed_launch_does_not_change_slots(
    decoder: CudaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = some_codes(3, 8)
    solo = decode_chunks(decoder, 0, codes, [3])
    decoder.load_slot(0)
    first = decode_one(decoder, 0, codes[:1])
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(decoder, "_launch", lambda count: 1 / 0)
        decoder.decode([DecodeRequest(0, codes[1:])])
    rest = decode_one(decoder, 0, codes[1:])
    np.testing.assert_array_equal(np.concatenate([first, rest]), solo)


def test_non_finite_samples_are_reported_for_their_stream_only(decoder: CudaDecoder) -> None:
    codes = some_codes(4, 4)
    solo = decode_chunks(decoder, 0, codes, [4])
    decoder.load_slot(0)
    decoder.load_slot(1)
    state = decoder.save_slot(1)
    nan_history = torch.full(state.history.shape, torch.nan, dtype=state.history.dtype)
    decoder.load_slot(1, replace(state, history=nan_history.to(state.history.device)))
    finite, non_finite = decoder.decode([DecodeRequest(0, codes), DecodeRequest(1, codes)])()
    assert non_finite is None
    assert finite is not None
    np.testing.assert_array_equal(finite, solo)


def test_activations_beyond_the_float16_range_stay_finite(codec: Codec, make: Make) -> None:
    weights, config = codec
    loud = replace(weights.conv_in, weight=weights.conv_in.weight * 1e7)
    decoder = make((replace(weights, conv_in=loud), config))
    decoder.load_slot(0)
    (samples,) = decoder.decode([DecodeRequest(0, some_codes(2, 5))])()
    assert samples is not None, "the samples are not finite"


def test_small_weights_keep_their_precision(codec: Codec, make: Make) -> None:
    """float16 loses bits below 6e-5; every column is scaled by its own power of two."""
    weights, config = codec
    first = weights.upsample[0]
    down = first.convnext.down * torch.logspace(-8, 0, len(first.convnext.down))[:, None]
    convnext = replace(first.convnext, down=down, gamma=first.convnext.gamma * 100)
    small = replace(weights, upsample=(replace(first, convnext=convnext), *weights.upsample[1:]))
    codes = some_codes(4, 6)
    samples = decode_chunks(make((small, config)), 0, codes, [4])
    assert signal_to_noise(samples, decode_with_torch((small, config), codes)) >= 60


def test_invalid_requests_and_shapes_are_refused(
    codec: Codec, decoder: CudaDecoder, make: Make
) -> None:
    with pytest.raises(ValueError, match="between 0 and 63, found 0 to 64 in slot 1"):
        decoder.decode([DecodeRequest(1, torch.tensor([[0] * 15 + [64]]))])
    with pytest.raises(ValueError, match=r"each slot once, found \[1, 1\]"):
        decoder.decode([DecodeRequest(1, some_codes(1, 0)), DecodeRequest(1, some_codes(1, 0))])
    weights, config = codec
    other = replace(config, decoder=replace(config.decoder, sliding_window=71))
    with pytest.raises(ValueError, match=r"sliding_window in \(72,\), found 71"):
        make((weights, other))
    with pytest.raises(ValueError, match="a multiple of 16 samples, found 72"):
        make((weights, replace(config, samples_per_frame=72)))


def test_rounds_fill_the_capacity_in_order() -> None:
    def chunk(slot: int, frames: int) -> tuple[int, NDArray[np.int64]]:
        return slot, np.arange(frames, dtype=np.int64)[:, None]

    made = list(rounds([chunk(0, 3), chunk(1, 20), chunk(2, 0), chunk(3, 9)], 16))
    assert [[(slot, len(codes)) for slot, codes in chunks] for chunks in made] == [
        [(0, 3), (1, 8)],
        [(1, 8), (3, 8)],
        [(1, 4), (3, 1)],
    ]
    slot_1 = np.concatenate([codes for chunks in made for slot, codes in chunks if slot == 1])
    assert slot_1[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize(("num_frames", "spinning"), [(8, True), (9, False)])
def test_the_host_spins_for_a_call_of_few_frames(
    decoder: CudaDecoder, monkeypatch: pytest.MonkeyPatch, num_frames: int, spinning: bool
) -> None:
    """A call of more frames takes longer than a millisecond."""
    codes = some_codes(num_frames, 0).numpy()
    requests = [
        PendingDecodeRequest(slot, part, part[:0])
        for slot, part in enumerate((codes[:4], codes[4:]))
    ]
    waits: list[tuple[object, bool]] = []
    monkeypatch.setattr(
        "megakernel_tts.codec.cuda_decoder.wait_for_event",
        lambda event, *, spinning: waits.append((event, spinning)),
    )
    monkeypatch.setattr(decoder, "_cuda_stream", SimpleNamespace(decoded="decoded"))
    decoder._collect(requests, [request.num_frames for request in requests])
    assert waits == [("decoded", spinning)]
