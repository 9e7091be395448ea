"""The number of frames of a step does not change a stream's codes; a step ends when it must."""

import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import Backend, Frames, PrefillRequest
from megakernel_tts.backends.reference import Reference
from tests.comparison import SAMPLINGS, MakeComparison
from tests.rig import one_frame


@dataclass
class ScriptedStream:
    """A stream, its text, and the codes that it has made.

    Attributes:
        prompt: [positions, hidden].
        text: Text vectors [n, hidden] that follow the prompt.
        sampling: Sampling parameters.
        max_frames: Frames at max_step.
        made: Codes of every frame.
        num_fed: Text vectors fed.
        ended: Whether the speech ended.
    """

    prompt: Tensor
    text: Tensor
    sampling: Sampling
    max_frames: int
    made: list[list[int]] = field(default_factory=list[list[int]])
    num_fed: int = 0
    ended: bool = False

    def start(self, slot: int) -> PrefillRequest:
        """The request; all positions of the prompt but the last may be cached."""
        return PrefillRequest(slot, self.prompt, self.sampling, num_common=len(self.prompt) - 1)

    @property
    def ready(self) -> bool:
        return len(self.made) <= self.num_fed or self.num_fed == len(self.text)

    def feed(self, backend: Backend, slot: int, count: int) -> None:
        new = self.text[self.num_fed : self.num_fed + count]
        self.num_fed += len(new)
        backend.feed(slot, new, self.num_fed == len(self.text))

    def take(self, frames: Frames) -> None:
        self.made += frames.codes.tolist()
        self.ended = frames.ended


def frame_by_frame(backend: Backend, streams: list[ScriptedStream]) -> list[list[list[int]]]:
    """The codes of each stream in steps of one frame, with all of its text fed at the start."""
    for slot, stream in enumerate(streams):
        backend.prefill([stream.start(slot)])
        stream.feed(backend, slot, len(stream.text))
    made: list[list[list[int]]] = [[] for _ in streams]
    running = set(range(len(streams)))
    while running:
        slots = sorted(running)
        for slot, frame in zip(slots, one_frame(backend, slots), strict=True):
            if frame is not None:
                made[slot].append(frame.tolist())
            if frame is None or len(made[slot]) == streams[slot].max_frames:
                backend.release(slot)
                running.remove(slot)
    return made


def run_random_steps(
    backend: Backend, streams: list[ScriptedStream], rng: random.Random, max_step: int
) -> None:
    """Runs steps of random lengths: streams join, get text, are interrupted and leave at random."""
    waiting, free = list(streams), rng.sample(range(backend.num_slots), backend.num_slots)
    running: dict[int, ScriptedStream] = {}
    while waiting or running:
        while waiting and free and (not running or rng.random() < 0.5):
            stream, slot = waiting.pop(), free.pop()
            backend.prefill([stream.start(slot)])
            running[slot] = stream
        for slot, stream in running.items():
            if rng.random() < 0.5 or not any(s.ready for s in running.values()):
                stream.feed(backend, slot, rng.randint(1, 4))
        ready = [slot for slot, stream in running.items() if stream.ready]
        slots = rng.sample(ready, rng.randint(1, len(ready)))
        limits = [running[slot].max_frames - len(running[slot].made) for slot in slots]
        num_frames = min(rng.randint(1, max_step), *limits)
        interrupted = rng.random() < 0.25
        if interrupted:
            backend.interrupt()
        for slot, frames in zip(slots, backend.step(slots, num_frames), strict=True):
            assert 1 <= len(frames.codes) + frames.ended <= (1 if interrupted else num_frames)
            stream = running[slot]
            stream.take(frames)
            if stream.ended or len(stream.made) == stream.max_frames or rng.random() < 0.05:
                backend.release(slot)
                free.append(slot)
                del running[slot]
        backend.clear_interrupt()


def check(backend: Any, streams: list[ScriptedStream], num_runs: int, max_step: int) -> None:
    """Compares random steps with steps of one frame; one of the codes is the end of speech."""
    first = frame_by_frame(backend, [replace(s) for s in streams])
    early = {made[i][0] for made in first for i in range(2)}
    eos = next(frame[0] for made in first for frame in made[2:] if frame[0] not in early)
    talker = backend._config.talker
    control = replace(talker.control, eos=eos)
    backend._config = replace(backend._config, talker=replace(talker, control=control))
    if isinstance(backend, Megakernel):
        backend._buffers.params.eos_id = eos
    # Only the codes and the end of speech can be sampled: with another end, other codes are likely.
    expected = frame_by_frame(backend, [replace(s) for s in streams])
    assert any(
        len(made) < stream.max_frames for made, stream in zip(expected, streams, strict=True)
    )
    rng = random.Random(0)
    for _ in range(num_runs):
        fresh = [replace(s, made=[]) for s in streams]
        run_random_steps(backend, fresh, rng, max_step)
        for stream, made in zip(fresh, expected, strict=True):
            assert stream.made and stream.made == made[: len(stream.made)]
            assert not stream.ended or len(stream.made) == len(made) < stream.max_frames


def _streams(prompt: Tensor, text: Tensor, limits: list[int]) -> list[ScriptedStream]:
    """Streams of different lengths, with different sampling parameters."""
    return [
        ScriptedStream(prompt[i:].contiguous(), text[: len(text) - i], SAMPLINGS[i % 3], max_frames)
        for i, max_frames in enumerate(limits)
    ]


def test_step_lengths_do_not_change_codes_of_the_reference(
    comparison: MakeComparison,
) -> None:
    b = comparison("1b7", shallow=True)
    reference = Reference(b.exact.model, b.config, b.pad.float(), num_slots=4, max_positions=64)
    streams = _streams(b.prompt.float(), b.text.float().repeat(3, 1), [12, 3, 17, 9])
    check(reference, streams, num_runs=4, max_step=9)


def test_step_lengths_do_not_change_codes_of_the_kernel(
    any_comparison: MakeComparison,
) -> None:
    b = any_comparison("0b6")
    check(b.kernel, _streams(b.prompt, b.text, [4, 3]), num_runs=1, max_step=4)


@pytest.mark.gpu
def test_step_lengths_do_not_change_codes_on_a_gpu(gpu_comparison: MakeComparison) -> None:
    """Longer streams and steps than the emulator can run."""
    for size, max_step in (("0b6", 40), ("1b7", 5)):
        b = gpu_comparison(size)
        streams = _streams(b.prompt, b.text.repeat(3, 1), [17, 3, 26, 40])
        check(b.kernel, streams, num_runs=20, max_step=max_step)


def test_a_launch_ends_where_its_text_ends(any_comparison: MakeComparison) -> None:
    """The next launch continues with the frame after it."""
    b = any_comparison("0b6")
    b.begin(0, 0)
    expected = b.kernel.step([0], 3)[0].codes
    b.kernel.release(0)
    b.kernel.prefill([PrefillRequest(0, b.prompt, SAMPLINGS[0])])
    b.kernel.feed(0, b.text[:1], False)
    (before,) = b.kernel.step([0], 4)
    assert (len(before.codes), before.ended) == (2, False)
    b.kernel.feed(0, b.text[1:2], False)
    (after,) = b.kernel.step([0], 4)
    assert torch.equal(torch.cat([before.codes, after.codes]), expected)


def test_an_interruption_ends_a_launch_within_two_frames(any_comparison: MakeComparison) -> None:
    """Later frames are those of a launch that was not interrupted."""
    b = any_comparison("0b6")
    kernel, max_step = b.kernel, 30
    b.begin(0, 0)
    expected = kernel.step([0], max_step)[0].codes if b.pad.is_cuda else None
    kernel.release(0)
    b.begin(0, 0)
    kernel._buffers.num_published[:] = 0
    made: list[Frames] = []
    launch = threading.Thread(target=lambda: made.extend(kernel.step([0], max_step)))
    launch.start()
    while kernel._buffers.num_published[0] == 0:
        pass  # another thread writes it
    seen = int(kernel._buffers.num_published[0])
    kernel.interrupt()
    launch.join(60)
    count = len(made[0].codes)
    assert seen <= count <= seen + 2 < max_step
    kernel.clear_interrupt()
    made += kernel.step([0], 2)
    ours = torch.cat([frames.codes for frames in made])
    if expected is None:  # the emulator is slow
        kernel.release(0)
        b.begin(0, 0)
        expected = kernel.step([0], len(ours))[0].codes
    assert torch.equal(ours, expected[: len(ours)])


def test_a_step_in_a_full_slot_is_refused(comparison: MakeComparison) -> None:
    b = comparison("1b7")
    b.exact.prefill([PrefillRequest(0, b.prompt.float()[:1].repeat(60, 1), SAMPLINGS[0])])
    b.exact.feed(0, b.text.float()[:0], True)
    assert len(b.exact.step([0], 9)[0].codes) == 4
    with pytest.raises(ValueError, match="Slot 0 is full: it has 64 positions"):
        b.exact.step([0], 1)
