"""Prompts that are run in chunks: the same speech as of prompts that are run whole."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megakernel_tts.backends.protocol import Backend, PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import LoadedModel
from megakernel_tts.sampling import Sampling
from tests.comparison import MakeComparison
from tests.rig import one_frame


def said(backend: Backend, slots: Sequence[int], num_frames: int) -> list[list[list[int]]]:
    """The codes of each slot's next frames."""
    for slot in slots:
        backend.feed(slot, torch.zeros(0, 1), True)
    made = [one_frame(backend, slots) for _ in range(num_frames)]
    return [[row[i].tolist() for row in made] for i in range(len(slots))]  # type: ignore[union-attr]


def run_in_chunks(
    backend: Backend,
    requests: list[PrefillRequest],
    budget: int | None,
    between: Callable[[], object] = lambda: None,
) -> list[int]:
    """Runs prompts, and `between` after each call; returns the positions that each call ran."""
    num_run: list[int] = []
    while requests:
        result = backend.prefill(requests, budget)
        num_run.append(result.num_run)
        between()
        requests = [
            PrefillRequest(r.slot, r.prompt, r.sampling, r.first_frame, r.num_common, end)
            for r, end in zip(requests, result.in_place, strict=True)
            if end < len(r.prompt)
        ]
    return num_run


def requests_of(prompts: Sequence[Tensor], num_common: int) -> list[PrefillRequest]:
    return [
        PrefillRequest(slot, prompt, Sampling(seed=slot), 0, num_common)
        for slot, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_common", [0, 150])
def test_chunks_of_a_prompt_do_not_change_codes_of_the_reference(
    load: Callable[..., LoadedModel], num_common: int
) -> None:
    """Two prompts of one prefix, which is run once, while another stream speaks."""
    loaded = load()
    backend = loaded.engine.backend
    assert isinstance(backend, Reference)
    pad = loaded.engine.prompt_builder.pad[0]

    def make() -> Reference:
        model = backend.model
        return Reference(model, loaded.config, pad, num_slots=3, max_positions=400)

    rows = torch.randn(340, len(pad), generator=torch.Generator().manual_seed(1))
    prompts = [rows[:300], torch.cat([rows[:num_common], rows[300:]])]
    whole, chunked = make(), make()
    assert run_in_chunks(whole, requests_of(prompts, num_common), None) == [340]
    expected = said(whole, [0, 1], 2)
    chunked.prefill([PrefillRequest(2, rows[:5], Sampling(seed=9))])
    num_run = run_in_chunks(
        chunked, requests_of(prompts, num_common), 1, lambda: said(chunked, [2], 1)
    )
    assert max(num_run) <= 128 and sum(num_run) == 340
    assert said(chunked, [0, 1], 2) == expected


def test_chunks_of_a_prompt_do_not_change_codes_of_the_kernel(
    comparison: MakeComparison,
) -> None:
    b = comparison("0b6", blocks=2, shallow=True)
    prompts = [torch.cat([b.prompt, b.prompt, b.prompt]), b.prompt]
    for num_common in (0, len(b.prompt) - 1):
        hidden: list[Tensor] = []
        calls: list[list[int]] = []
        for budget in (None, 1, 12):
            b.kernel.clear_prefix_cache()
            calls.append(run_in_chunks(b.kernel, requests_of(prompts, num_common), budget))
            hidden.append(b.kernel._buffers.prompt_hidden[:2].clone())
            for slot in (0, 1):
                b.kernel.release(slot)
        assert torch.equal(hidden[1], hidden[0]) and torch.equal(hidden[2], hidden[0])
        assert len(calls[0]) == 1 and len(calls[1]) > len(calls[2]) > 1
        assert {sum(num_run) for num_run in calls} == {sum(calls[0])}


def test_a_launch_of_batches_of_eight_and_three_columns_has_the_bits_of_two_launches(
    comparison: MakeComparison,
) -> None:
    """Between the batches, rows of the residual pass from one warp to another."""
    b = comparison("0b6", blocks=6)
    assert b.module is not None
    prompt = torch.cat([b.prompt, b.prompt])[:11].contiguous()
    hidden: list[Tensor] = []
    for budget in (None, 8):
        b.module.launched.clear()
        run_in_chunks(b.kernel, requests_of([prompt], 0), budget)
        hidden.append(b.kernel._buffers.prompt_hidden[0].clone())
        b.kernel.release(0)
        assert b.module.launched == ["prefill_medium"] * len(hidden)
    assert torch.equal(*hidden)


def test_a_prompt_that_is_said_to_be_complete_is_refused(load: Callable[..., LoadedModel]) -> None:
    backend = load().engine.backend
    request = PrefillRequest(0, torch.zeros(10, 128), Sampling(seed=0), 0, 0, 10)
    with pytest.raises(ValueError, match="10 positions of a prompt of 10 are said to be in place"):
        backend.prefill([request])
