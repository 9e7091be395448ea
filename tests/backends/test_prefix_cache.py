"""The prefix cache does not change codes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.step import random_model
from megakernel_tts import Voice
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.prefix_cache import PrefixCache
from megakernel_tts.backends.protocol import Backend, PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.errors import DeviceError
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.prompt import Prompt
from tests.comparison import SAMPLINGS, MakeComparison
from tests.rig import one_frame

Said = list[list[int] | None]


# --- the cache itself ---


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache = PrefixCache(max_bytes=3 * 16)
    keys = [bytes([i]) for i in range(4)]
    for key in keys[:3]:
        cache.put(key, [torch.full((2,), float(key[0])), torch.zeros(2)])
    assert cache.get(keys[0]) is not None  # used again: the next oldest is 1
    cache.put(keys[3], [torch.zeros(4)])
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    parts = cache.get(keys[2])
    assert parts is not None and parts[0].tolist() == [2.0, 2.0]


def test_the_cache_stays_within_its_limit() -> None:
    rng = random.Random(0)
    cache, sizes = PrefixCache(max_bytes=100), dict[bytes, int]()
    for i in range(200):
        key, size = i.to_bytes(2, "big"), rng.randint(1, 60)
        sizes[key] = size
        cache.put(key, [torch.zeros(size, dtype=torch.uint8)])
        assert sum(size for key, size in sizes.items() if cache.get(key) is not None) <= 100
        assert cache.get(key) is not None
    copies = cache.put(b"large", [torch.ones(101, dtype=torch.uint8)])
    assert cache.get(b"large") is None and copies[0].sum() == 101
    assert len(cache) > 0  # a too large entry evicts none
    cache.clear()
    assert len(cache) == 0


def test_entries_are_copies() -> None:
    cache, part = PrefixCache(), torch.zeros(3)
    cache.put(b"", [part])
    part += 1
    kept = cache.get(b"")
    assert kept is not None and kept[0].sum() == 0


# --- prompts ---


def _prompts(loaded: LoadedModel) -> list[Prompt]:
    """Of three voices, two of equal length, in both layouts, with texts of several lengths."""
    prompt_builder, made = loaded.engine.prompt_builder, list[Prompt | None]()
    for voice, language in (("ryan", "english"), ("serena", "english"), ("serena", "auto")):
        prefix = prompt_builder.prefix(voice, language, None)
        for ids in ([7], [5, 9, 200], list(range(20, 31))):
            for layout in ("streaming", "full"):
                made.append(prompt_builder.build(prefix, ids, layout, text_ended=True))
    return [prompt for prompt in made if prompt is not None]


def test_common_positions_do_not_depend_on_the_text(load: Callable[..., LoadedModel]) -> None:
    """With a named voice and with a recording, long and short beside its transcript."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("custom_voice", "base"):
        prompt_builder = load(kind).engine.prompt_builder
        voices: list[str | Voice] = ["ryan"]
        if kind == "base":
            voices = [
                Voice(
                    torch.randn(128, generator=generator),
                    torch.randint(0, 256, (frames, 16), generator=generator),
                    transcript,
                )
                for frames, transcript in ((20, "Hi."), (3, "A transcript of many words."))
            ]
        for voice in voices:
            prefix = prompt_builder.prefix(voice, "english", None)
            for layout in ("streaming", "full"):
                one, other = (
                    prompt_builder.build(prefix, ids, layout, text_ended=True)
                    for ids in ([7, 8, 9], [200, 201, 202, 203])
                )
                assert one is not None and other is not None
                count = one.num_common
                assert count == other.num_common >= len(prefix.vectors)
                assert count < min(len(one.prefill), len(other.prefill))
                assert torch.equal(one.prefill[:count], other.prefill[:count])


# --- the backends ---


def _begin(backend: Backend, chosen: dict[int, tuple[int, Prompt]], text: Tensor) -> None:
    """Prompts by slot, each with its number, all in one call."""
    dtype = text.dtype
    backend.prefill(
        [
            PrefillRequest(slot, p.prefill.to(dtype), SAMPLINGS[number % 3], number, p.num_common)
            for slot, (number, p) in chosen.items()
        ]
    )
    for slot in chosen:
        backend.feed(slot, text, True)


def _said(backend: Backend, slots: Sequence[int], frames: int) -> list[Said]:
    made = [one_frame(backend, slots) for _ in range(frames)]
    return [
        [None if row[i] is None else row[i].tolist() for row in made]  # type: ignore[union-attr]
        for i in range(len(slots))
    ]


def _without(backend: Any, prompts: list[Prompt], text: Tensor, frames: int) -> list[Said]:
    """The codes of each prompt solo, without the cache."""
    said: list[Said] = []
    for number, prompt in enumerate(prompts):
        backend._prefixes = PrefixCache(max_bytes=0)
        _begin(backend, {0: (number, prompt)}, text)
        said += _said(backend, [0], frames)
        assert len(backend._prefixes) == 0
        backend.release(0)
    return said


def _check(
    backend: Any, prompts: list[Prompt], text: Tensor, groups: int, frames: int, limit: int
) -> None:
    """Random groups begin together in random slots while another stream speaks."""
    solo = _without(backend, prompts, text, frames)
    backend._prefixes = PrefixCache(limit)
    rng, others = random.Random(1), backend.num_slots - 1
    _begin(backend, {others: (0, prompts[0])}, text)
    speaker: Said = []
    for _ in range(groups):
        slots = rng.sample(range(others), rng.randint(1, others))
        numbers = [rng.randrange(len(prompts)) for _ in slots]
        chosen = {slot: (n, prompts[n]) for slot, n in zip(slots, numbers, strict=True)}
        _begin(backend, chosen, text)
        *said, beside = _said(backend, [*slots, others], frames)
        assert said == [solo[n] for n in numbers]
        speaker += beside
        for slot in slots:
            backend.release(slot)
    backend.release(others)
    backend._prefixes = PrefixCache(max_bytes=0)
    _begin(backend, {1: (0, prompts[0])}, text)
    assert _said(backend, [1], len(speaker))[0] == speaker
    backend.release(1)


def _bytes_of_one(backend: Any, prompt: Prompt, text: Tensor) -> int:
    backend._prefixes = PrefixCache()
    _begin(backend, {0: (0, prompt)}, text)
    backend.release(0)
    (parts,) = backend._prefixes._entries.values()
    return sum(part.nbytes for part in parts)


@pytest.mark.parametrize("limit_bytes", [1, 2])
def test_the_cache_does_not_change_codes_of_the_reference(
    load: Callable[..., LoadedModel], limit_bytes: int
) -> None:
    """With a limit of one voice, so that they evict each other, and of two."""
    loaded = load("custom_voice", "1b7", shallow=True)
    backend, prompts = loaded.engine.backend, _prompts(loaded)
    assert isinstance(backend, Reference)
    pad = loaded.engine.prompt_builder.pad
    reference = Reference(backend.model, loaded.config, pad[0], num_slots=4, max_positions=128)
    limit = limit_bytes * _bytes_of_one(reference, prompts[0], pad)
    _check(reference, prompts, pad, groups=15, frames=2, limit=limit)


def test_the_cache_does_not_change_codes_of_the_kernel(
    any_comparison: MakeComparison, load: Callable[..., LoadedModel]
) -> None:
    b, prompts = any_comparison("0b6"), _prompts(load("custom_voice", "0b6"))[::5]
    assert {len(p.prefill) for p in prompts} >= {10, 22}  # of two passes, and of three
    limit_bytes = _bytes_of_one(b.kernel, prompts[0], b.text)
    groups, frames = (12, 3) if b.module is None else (2, 1)  # the emulator is slow
    _check(b.kernel, prompts, b.text, groups, frames, limit=limit_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_the_cache_does_not_change_codes_of_a_released_size(size: str) -> None:
    """Eight slots, prompts of one pass to five, prefixes of one to three."""
    model, config = random_model(size)
    generator = torch.Generator().manual_seed(0)
    hidden = config.talker.stack.hidden_size
    noise = 0.05 * torch.randn(100, hidden, generator=generator).bfloat16()
    prefixes = (noise[:8], noise[10:19], noise[20:46])
    prompts = [
        Prompt(
            torch.cat([prefix, noise[60 : 60 + own]]),
            len(prefix),
            noise[:0],
            num_tokens=own,
            text_start=len(prefix),
            text_complete=False,
        )
        for prefix in prefixes
        for own in (1, 2, 11)
    ]
    kernel = Megakernel(model, config, noise[99].cuda(), num_slots=8, max_positions=256)
    limit_bytes = _bytes_of_one(kernel, prompts[0], noise[:40])
    _check(kernel, prompts, noise[:40], groups=12, frames=3, limit=2 * limit_bytes)


def test_a_prefix_is_run_once_for_all_prompts(
    comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, rows = comparison("0b6", blocks=2, shallow=True), list[int]()
    prefill = b.kernel._kernels.prefill

    def counted(params: Any, batches: Any, *rest: Any) -> None:
        rows.append(sum(batch.num_columns for batch in batches))
        prefill(params, batches, *rest)

    monkeypatch.setattr(b.kernel._kernels, "prefill", counted)
    starts = [
        PrefillRequest(slot, b.prompt, SAMPLINGS[slot], 0, len(b.prompt) - 1) for slot in range(3)
    ]
    own = len(b.prompt) - 8
    b.kernel.prefill(starts)
    assert rows == [8, 3 * own]
    b.kernel.prefill([replace(starts[0], slot=3)])
    assert rows == [8, 3 * own, own]
    hidden = b.kernel._buffers.prompt_hidden
    assert torch.equal(hidden, hidden[:1].expand(4, -1))
    ours, theirs = (b.kernel._cache.views(slot, len(b.prompt))[0] for slot in (3, 0))
    assert torch.equal(ours, theirs)


def test_a_prefix_in_place_is_not_copied(
    any_comparison: MakeComparison,
) -> None:
    """A changed copy takes effect in another slot, or after another stream."""
    b = any_comparison("0b6")

    def begin(slot: int) -> Tensor:
        b.kernel.prefill([PrefillRequest(slot, b.prompt, SAMPLINGS[0], 0, len(b.prompt) - 1)])
        b.kernel.feed(slot, b.text, True)
        return b.kernel._buffers.prompt_hidden[slot].clone()

    expected = begin(0)
    (kept,) = b.kernel._prefixes._entries.values()
    with torch.inference_mode():
        for part in kept:
            part.fill_(1.0)
    b.kernel.release(0)
    assert torch.equal(begin(0), expected)
    assert not torch.equal(begin(1), expected)
    b.kernel.swap_in(1, b.kernel.swap_out(0))
    b.kernel.release(1)
    assert not torch.equal(begin(1), expected)
    b.kernel.clear_prefix_cache()
    for slot in (0, 1):
        assert torch.equal(begin(slot), expected)


def test_a_prefix_that_could_not_be_cached_is_run_again(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = any_comparison("0b6")

    def begin(prompt: Tensor) -> Tensor:
        b.kernel.prefill([PrefillRequest(0, prompt, SAMPLINGS[0], 0, len(prompt) - 1)])
        return b.kernel._buffers.prompt_hidden[0].clone()

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    expected = begin(b.prompt)
    with monkeypatch.context() as full:
        full.setattr(b.kernel._prefixes, "put", out_of_memory)
        with pytest.raises(MemoryError):
            begin(b.prompt.flip(0))
    assert torch.equal(begin(b.prompt), expected)


def test_a_prefix_of_a_failed_launch_is_run_again(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that fails may leave any values, so that its prefixes are not cached."""
    b = any_comparison("0b6")

    def begin(slot: int) -> None:
        b.kernel.prefill([PrefillRequest(slot, b.prompt, SAMPLINGS[0], 0, len(b.prompt) - 1)])
        b.kernel.feed(slot, b.text, True)

    begin(0)
    expected = b.kernel._buffers.prompt_hidden[0].clone()
    b.kernel.clear_prefix_cache()
    with monkeypatch.context() as hurry:
        hurry.setattr("megakernel_tts.backends.megakernel._TIMEOUT_NS", 0)
        if b.module is not None:
            hurry.setattr(b.module, "late", 2000)
        begin(1)
    begin(2)  # a launch of its own, in no hurry
    assert b.kernel._buffers.prompt_hidden[1:3].isnan().all()
    with pytest.raises(DeviceError):
        b.kernel.step([1, 2], 1)
    for slot in (1, 2):
        with pytest.raises(FloatingPointError):
            b.kernel.step([slot], 1)
    for slot in (3, 1):
        begin(slot)
        assert torch.equal(b.kernel._buffers.prompt_hidden[slot], expected)


def test_a_prompt_without_positions_of_its_own_is_refused(load: Callable[..., LoadedModel]) -> None:
    backend = load().engine.backend
    with pytest.raises(ValueError, match="10 positions of a prompt of 10 are said to be common"):
        backend.prefill([PrefillRequest(0, torch.zeros(10, 128), SAMPLINGS[0], 0, 10)])
