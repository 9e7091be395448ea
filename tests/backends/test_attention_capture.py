"""Attention capture: scores equal the reference's, and codes do not change."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megakernel_tts.backends.protocol import Backend, Frames, PendingCodes, PrefillRequest
from megakernel_tts.backends.reference import Reference
from tests.comparison import SAMPLINGS, Comparison, MakeComparison

HEADS = [(1, 3), (0, 0), (1, 0)]


def _begin(b: Comparison, backend: Backend, slots: int) -> None:
    for slot in range(slots):
        prompt = b.prompt[slot:].contiguous()
        backend.prefill([PrefillRequest(slot, prompt, SAMPLINGS[slot])])
        backend.feed(slot, b.text, True)


def _scores(frames: Frames) -> Tensor:
    assert frames.scores is not None
    return frames.scores


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def _run_steps(backend: Backend, slots: Sequence[int], steps: Sequence[int]) -> list[Frames]:
    """Each slot's frames of several steps, put together."""
    made = [backend.step(slots, count) for count in steps]
    return [
        Frames(
            torch.cat([step[i].codes for step in made]),
            False,
            None if made[0][i].scores is None else torch.cat([_scores(step[i]) for step in made]),
        )
        for i in range(len(slots))
    ]


def test_capture_does_not_change_codes_and_launches_do_not_change_scores(
    any_comparison: MakeComparison,
) -> None:
    b = any_comparison()
    capturing = b.make_kernel(HEADS)
    _begin(b, b.kernel, 2)
    _begin(b, capturing, 2)
    plain = _run_steps(b.kernel, [0, 1], [2])
    together = _run_steps(capturing, [0, 1], [2])
    for slot in range(2):
        assert plain[slot].scores is None
        assert torch.equal(together[slot].codes, plain[slot].codes)
        capturing.release(slot)
        capturing.prefill([PrefillRequest(slot, b.prompt[slot:].contiguous(), SAMPLINGS[slot])])
        capturing.feed(slot, b.text, True)
        solo = _run_steps(capturing, [slot], [1, 1])[0]
        assert torch.equal(solo.codes, plain[slot].codes)
        assert _same(_scores(solo), _scores(together[slot]))


def test_scores_end_where_the_keys_end(any_comparison: MakeComparison) -> None:
    b = any_comparison()
    capturing = b.make_kernel(HEADS)
    _begin(b, capturing, 1)
    (frames,) = capturing.step([0], 3)
    there = ~_scores(frames).isnan()
    assert there.shape == (3, 3, 64)
    assert there.sum(-1).tolist() == [[0] * 3] + [[len(b.prompt) + f] * 3 for f in (1, 2)]


def test_scores_are_as_exact_as_bfloat16_in_torch(
    any_comparison: MakeComparison,
) -> None:
    """All three get the same codes, so that their frames have the same inputs."""
    b = any_comparison()
    capturing = b.make_kernel(HEADS)
    references = [
        Reference(r.model, b.config, r._pad, num_slots=1, max_positions=64, captured_heads=HEADS)
        for r in (b.half, b.exact)
    ]
    _begin(b, capturing, 1)
    for r in references:
        r.prefill([PrefillRequest(0, b.prompt.to(r._pad.dtype), SAMPLINGS[0])])
        r.feed(0, b.text.to(r._pad.dtype), True)
        r.step([0], 1)
    (first,) = capturing.step([0], 1)
    for _ in range(2):
        for r in references:
            r._state[0] = replace(r._state[0], codes=first.codes[-1])
        ours, half, exact = (_scores(k.step([0], 1)[0])[0] for k in (capturing, *references))
        first = Frames(torch.tensor([capturing._state[0].codes]), False)
        there = ~exact.isnan()
        assert torch.equal(~ours.isnan(), there)
        error = (ours - exact)[there].norm()
        assert error <= 2 * (half - exact)[there].norm()
        assert exact[there].norm() > 0


def test_capture_does_not_change_codes_of_the_reference(
    any_comparison: MakeComparison,
) -> None:
    b = any_comparison()
    models = [b.exact.model, b.config, b.exact._pad]
    plain, capturing = (
        Reference(*models, num_slots=2, max_positions=64, captured_heads=heads)
        for heads in ((), HEADS)
    )
    made: list[list[Tensor]] = []
    for backend in (plain, capturing):
        for slot in range(2):
            prompt = b.prompt[slot:].to(backend._pad.dtype)
            backend.prefill([PrefillRequest(slot, prompt, SAMPLINGS[slot])])
            backend.feed(slot, b.text.to(backend._pad.dtype), True)
        made.append([frames.codes for frames in _run_steps(backend, [0, 1], [4, 3])])
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_capture_of_given_frames_equals_capture_while_they_are_made(
    any_comparison: MakeComparison,
) -> None:
    b = any_comparison()
    c = b.config.talker.stack
    every = [(layer, head) for layer in range(c.num_layers) for head in range(c.num_heads)]
    pad = b.exact._pad
    backend = Reference(
        b.exact.model, b.config, pad, num_slots=1, max_positions=64, captured_heads=every
    )
    prompt, text = b.prompt.to(pad.dtype), b.text.to(pad.dtype)
    backend.prefill([PrefillRequest(0, prompt, SAMPLINGS[0])])
    backend.feed(0, text, True)
    (frames,) = backend.step([0], 6)
    first, count = len(b.prompt) - 1, 4
    layers = b.exact.capture_attention(prompt, text, frames.codes, first, count)
    captured = torch.stack(layers).flatten(0, 1).transpose(0, 1)
    expected = _scores(frames)[:, :, first : first + count]
    assert torch.equal(captured.isnan(), expected.isnan()) and not expected[1:, :, 0].isnan().any()
    assert torch.allclose(captured.nan_to_num(), expected.nan_to_num(), atol=1e-4)


@pytest.mark.gpu
def test_scores_do_not_wait_for_later_device_work(
    gpu_comparison: MakeComparison,
) -> None:
    b = gpu_comparison()
    capturing, over = b.make_kernel(HEADS), torch.cuda.Event()
    _begin(b, capturing, 1)
    (expected,) = _run_steps(capturing, [0], [5])
    capturing.release(0)
    _begin(b, capturing, 1)
    capturing.step([0], 4)

    def give(_: PendingCodes) -> None:
        torch.cuda._sleep(2_000_000_000)  # a second
        over.record()

    torch.cuda._sleep(100_000_000)  # or the frame would be over before the host looks
    (frames,) = capturing.step([0], 1, on_last_frame=give)
    assert not over.query()
    assert _same(_scores(frames), _scores(expected)[4:])
