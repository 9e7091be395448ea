import random
from collections.abc import Callable

import pytest
import torch

from megakernel_tts.codec.decoder import Decoder, State
from megakernel_tts.loader import LoadedModel

FRAMES = 160  # more than two attention windows


@pytest.fixture
def decoder(load: Callable[..., LoadedModel]) -> Decoder:
    return load().engine.decoder


def some_codes(frames: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (frames, 16), generator=torch.Generator().manual_seed(seed))


def decode_chunks(decoder: Decoder, codes: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    state, waves = decoder.start(), []
    for chunk in codes.split(sizes):
        wave, state = decoder.decode(chunk[None], state)
        waves.append(wave[0])
    return torch.cat(waves)


@pytest.mark.parametrize("size", [1, 3, 50, 72, 159])
def test_streaming_equals_whole(decoder: Decoder, size: int) -> None:
    codes = some_codes(FRAMES, 0)
    whole = decode_chunks(decoder, codes, [FRAMES])
    sizes = [size] * (FRAMES // size) + ([FRAMES % size] if FRAMES % size else [])
    streamed = decode_chunks(decoder, codes, sizes)
    assert (streamed - whole).abs().max() <= 2e-6 * whole.abs().max()


def test_streaming_equals_whole_for_random_chunks(decoder: Decoder) -> None:
    codes = some_codes(FRAMES, 1)
    whole = decode_chunks(decoder, codes, [FRAMES])
    rng = random.Random(0)
    for _ in range(3):
        sizes: list[int] = []
        while sum(sizes) < FRAMES:
            sizes.append(min(rng.choice([1, 2, 5, 13]), FRAMES - sum(sizes)))
        assert (
            decode_chunks(decoder, codes, sizes) - whole
        ).abs().max() <= 2e-6 * whole.abs().max()


def test_batching_streams_at_different_positions_does_not_change_samples(decoder: Decoder) -> None:
    codes = [some_codes(40, seed) for seed in range(3)]
    expected = [decode_chunks(decoder, c, [40]) for c in codes]
    states: list[State] = []
    made: list[list[torch.Tensor]] = []
    for i, c in enumerate(codes):  # stream i has a head start of 10 i frames
        wave, state = (
            decoder.decode(c[None, : 10 * i], decoder.start()) if i else (None, decoder.start())
        )
        states.append(state)
        made.append([wave[0]] if wave is not None else [])
    for step in range(0, 20, 4):
        batch = torch.stack([c[10 * i + step : 10 * i + step + 4] for i, c in enumerate(codes)])
        waves, joined = decoder.decode(batch, State.stack(states))
        states = joined.split()
        for stream_waves, wave in zip(made, waves, strict=True):
            stream_waves.append(wave)
    for whole, stream_waves in zip(expected, made, strict=True):
        streamed = torch.cat(stream_waves)
        reference = whole[: len(streamed)]
        assert (streamed - reference).abs().max() <= 2e-6 * reference.abs().max()


def test_decode_does_not_modify_its_state(decoder: Decoder) -> None:
    codes = some_codes(12, 3)
    _, state = decoder.decode(codes[None, :5], decoder.start())
    before = [c.clone() for c in (*state.columns, state.keys, state.values, state.position)]
    first, _ = decoder.decode(codes[None, 5:], state)
    second, _ = decoder.decode(codes[None, 5:], state)
    assert torch.equal(first, second)
    after = (*state.columns, state.keys, state.values, state.position)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_state_has_constant_size(decoder: Decoder) -> None:
    """The histories and the attention window, independent of the chunk length."""
    start = decoder.start()
    _, state = decoder.decode(some_codes(100, 4)[None], start)
    assert [c.shape for c in state.columns] == [c.shape for c in start.columns]
    assert state.keys.shape == start.keys.shape
    assert state.keys.shape[3] == decoder.config.sliding_window - 1
    for tensor in state.columns:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_frames_have_1920_samples_within_one(decoder: Decoder) -> None:
    wave = decode_chunks(decoder, some_codes(9, 5), [9])
    assert wave.shape == (9 * 1920,)
    assert wave.abs().max() <= 1


def test_split_states_share_no_memory(decoder: Decoder) -> None:
    """A stream must not keep the whole batch allocated."""
    state = State.stack([decoder.start() for _ in range(4)])
    _, state = decoder.decode(torch.stack([some_codes(2, seed) for seed in range(4)]), state)
    for one in state.split():
        for tensor in (*one.columns, one.keys, one.values, one.position):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
