"""Launches from the host: waiting, timeouts, refused arguments and the torch operator."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel_common.kernels.operator_module import OperatorModule
from megakernel_tts import ChunkPolicy, Sampling
from megakernel_tts.backends.decode_buffers import PHASES
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import LOW_LATENCY_STREAMS, PendingCodes, PrefillRequest
from megakernel_tts.engine.engine import Engine
from megakernel_tts.errors import DeviceError
from megakernel_tts.kernels.structs import Params
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.comparison import SAMPLINGS, Comparison, MakeComparison
from tests.emulator import MAX_STREAMS
from tests.rig import drain, one_frame

_TIMED_OUT = "thread block {} waited 0 s for values or weights of the phase {}."


class ShortTimeout:
    """While it is on, waits fail at the first poll, and block 0 begins late."""

    def __init__(self, b: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module, self._patch = b.module, monkeypatch

    def on(self) -> None:
        self._patch.setattr("megakernel_tts.backends.megakernel._TIMEOUT_NS", 0)
        if self._module is not None:  # emulated blocks run in turns, those of a GPU never do
            self._module.late = 2000

    def off(self) -> None:
        self._patch.undo()
        if self._module is not None:
            self._module.late = 0


def test_a_timeout_names_block_and_phase_and_changes_no_later_frame(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, kernel = (found := any_comparison("0b6")), found.kernel
    timeout = ShortTimeout(b, monkeypatch)
    b.begin(0, 0)
    expected = kernel.step([0], 2)[0].codes
    kernel.release(0)
    b.begin(0, 0)
    made = [one_frame(kernel, [0])[0]]
    timeout.on()
    block, phase = (r"\d+", f"({'|'.join(PHASES)})") if b.module is None else ("1", "qkv")
    for _ in range(2):
        with pytest.raises(DeviceError, match=_TIMED_OUT.format(block, phase)):
            kernel.step([0], 2)
    timeout.off()
    made.append(one_frame(kernel, [0])[0])
    assert torch.equal(torch.stack([m for m in made if m is not None]), expected)


def test_a_timeout_of_a_prompt_fails_the_next_step(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not wait for prompts; the next step reports it, and the stream cannot begin."""
    b, kernel = (found := any_comparison("0b6")), found.kernel
    timeout = ShortTimeout(b, monkeypatch)
    timeout.on()
    b.begin(0, 0)
    timeout.off()
    with pytest.raises(DeviceError):
        kernel.step([0], 1)
    with pytest.raises(FloatingPointError):
        kernel.step([0], 1)


def test_a_late_block_does_not_change_codes(comparison: MakeComparison) -> None:
    b = comparison("0b6", blocks=2, shallow=True)
    b.begin(0, 0)
    expected = b.kernel.step([0], 2)[0].codes
    b.kernel.release(0)
    assert b.module is not None
    b.module.late = 2000
    b.begin(0, 0)
    assert torch.equal(b.kernel.step([0], 2)[0].codes, expected)


def test_the_engine_reports_a_timeout_and_continues(
    any_comparison: MakeComparison,
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, b = load("custom_voice", "0b6"), any_comparison("0b6")
    timeout = ShortTimeout(b, monkeypatch)
    prompt_builder = PromptBuilder(b.half.model.embeddings, loaded.config, loaded.tokenizer)
    decoder = loaded.engine.decoder
    engine = Engine(b.kernel, prompt_builder, decoder)

    def say() -> tuple[str, str, int]:
        text = TextQueue(loaded.tokenizer, Splitter())
        text.push("hello.")
        text.end()
        prefix = prompt_builder.prefix("ryan", "english", None)
        sampling = Sampling(seed=1, max_frames=3)
        session = engine.open(text, prefix, None, "full", sampling, ChunkPolicy(3, 3))
        _, finish = drain(session)
        return finish.reason, str(finish.error), finish.frames

    timeout.on()
    reason, error, frames = say()
    timeout.off()
    assert (reason, frames) == ("error", 0)
    assert "timed out" in error and "where-to-change.md" in error
    assert say() == ("length", "None", 3)
    engine.close()
    assert not engine._thread.is_alive()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_launch_does_not_synchronise_with_the_gpu(
    gpu_comparison: MakeComparison,
) -> None:
    b = gpu_comparison("0b6")
    for slot in range(3):
        b.begin(slot, slot)
    expected_codes = [frames.codes for frames in b.kernel.step([0, 1, 2], 30)]
    for slot in range(3):
        b.kernel.release(slot)
        b.begin(slot, slot)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            b.kernel._buffers.prompt_hidden.sum().item()  # the mode works
        b.begin(3, 1)
        b.kernel._launch([0, 1, 2], 30)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    b.kernel._wait(30)
    published = b.kernel._collect(3, 30)
    for ours, expected in zip(published, expected_codes, strict=True):
        assert torch.equal(torch.from_numpy(ours[: len(expected), 1:]), expected)


class _VirtualEvent:
    """The event of a launch that publishes a frame whenever the host sleeps."""

    def __init__(self, kernel: Megakernel, over_after: int) -> None:
        self.calls: list[str] = []
        self._kernel, self._over_after = kernel, over_after
        self._num_frames = 0

    def sleep(self, _: float) -> None:
        self._num_frames += 1
        self._kernel._buffers.num_published[1] = self._num_frames
        self.calls.append("sleep")

    def query(self) -> bool:
        return self._num_frames >= self._over_after

    def synchronize(self) -> None:
        self.calls.append("over" if self.query() else "spin")


@pytest.mark.parametrize(
    ("frames", "over_after", "sleeps"), [(1, 1, 0), (2, 2, 1), (8, 8, 7), (8, 3, 3)]
)
@pytest.mark.parametrize(
    ("num_streams", "end"),
    [(LOW_LATENCY_STREAMS, ["spin"]), (LOW_LATENCY_STREAMS + 1, ["sleep", "over"])],
)
def test_the_host_polls_until_the_last_frame_and_spins_for_its_end_if_streams_are_few(
    comparison: MakeComparison,
    monkeypatch: pytest.MonkeyPatch,
    frames: int,
    over_after: int,
    sleeps: int,
    num_streams: int,
    end: list[str],
) -> None:
    """Any stream may publish the frame; a launch that ends early ends the wait."""
    kernel = comparison("0b6").kernel
    event = _VirtualEvent(kernel, over_after)
    monkeypatch.setattr(time, "sleep", event.sleep)
    monkeypatch.setattr(kernel, "_done", event)
    kernel._buffers.num_published[:] = 0
    kernel._buffers.params.num_streams = num_streams
    kernel._wait(frames, lambda: event.calls.append("last frame"))
    last = ["last frame", *end] if over_after == frames else ["over"]
    assert event.calls == ["sleep"] * sleeps + last


def test_pending_codes_are_reported_for_a_single_launch_only(comparison: MakeComparison) -> None:
    kernel, reported = comparison("0b6").kernel, list[PendingCodes]()
    kernel._report_pending(reported.append, range(MAX_STREAMS + 1), 2)
    assert not reported, "the second launch would overwrite the codes"
    kernel._report_pending(reported.append, range(3), 2)
    (pending,) = reported
    kernel._buffers.frames[:] = np.arange(len(kernel._buffers.frames))
    assert [rows[:, 0].tolist() for rows in pending] == [[1, 18], [35, 52], [69, 86]]
    assert all(rows.shape == (2, 16) for rows in pending)


def test_a_launch_writes_the_declared_tensors_only(comparison: MakeComparison) -> None:
    """The schema of the operator `launch` relies on the list."""
    kernel = (b := comparison("0b6", blocks=1, shallow=True)).kernel
    written = {tensor.data_ptr() for tensor in kernel._buffers.written_tensors()}
    others = [t for t in kernel._buffers._references if t.data_ptr() not in written]
    before = [tensor.clone() for tensor in others]
    b.begin(0, 0)
    kernel.step([0], 2)
    changed = [
        i
        for i, (t, copy) in enumerate(zip(others, before, strict=True))
        if not torch.equal(t, copy)
    ]
    by_host = {t.data_ptr() for t in (kernel._buffers.page_table, kernel._buffers.text)}
    assert {others[i].data_ptr() for i in changed} == by_host
    assert len(others) > 20


def test_each_run_of_prefill_batches_is_one_launch(comparison: MakeComparison) -> None:
    b = comparison("0b6")
    assert b.module is not None
    b.module.launched.clear()
    prompt = b.prompt.repeat(5, 1)[: 8 + 16 + 16 + 2]  # a first batch, two wide ones, a rest
    b.kernel.prefill([PrefillRequest(0, prompt, SAMPLINGS[0])])
    assert b.module.launched == ["prefill_medium", "prefill_large", "prefill_small"]


# --- what is refused ---


def test_prompts_of_the_wrong_form_are_refused(comparison: MakeComparison) -> None:
    b = comparison("0b6")
    for slot, prompt, sentence in (
        (4, b.prompt, "There is no slot 4 among 4"),
        (-1, b.prompt, "There is no slot -1 among 4"),
        (
            0,
            b.prompt[:, 1:],
            r"A prompt must be \[positions, 128\] on the host, found \[\d+, 127\]",
        ),
        (0, b.prompt.to("meta"), r"on the host, found \[\d+, 128\] on meta"),
        (0, b.prompt.repeat(1, 2)[:, ::2], r"must be contiguous, found strides \(256, 2\)"),
        (0, b.prompt.float(), "A prompt must be of type bfloat16, found torch.float32"),
        (0, b.prompt.repeat(9, 1)[:64], "A prompt of 64 does not fit 64 positions"),
    ):
        with pytest.raises(ValueError, match=sentence):
            b.kernel.prefill([PrefillRequest(slot, prompt, SAMPLINGS[0])])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda table: table.float(), "must be contiguous, of type torch.bfloat16; found torch.fl"),
        (
            lambda table: table.mT,
            "must be contiguous, of type torch.bfloat16",
        ),
        (lambda table: table.to("meta"), "must be on cpu, found meta"),
    ],
)
def test_weights_of_the_wrong_form_are_refused(
    comparison: MakeComparison, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    b = comparison("0b6")
    embeddings = b.half.model.embeddings
    model = replace(b.half.model, embeddings=replace(embeddings, codec=change(embeddings.codec)))
    with pytest.raises(ValueError, match=f"The code embedding {sentence}"):
        Megakernel(
            model,
            b.config,
            b.pad,
            num_slots=1,
            max_positions=64,
            kernels=b.kernel._kernels,
        )


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        ([(99, 0)], "There is no head 0 of layer 99: the talker has 3 layers of 4 heads"),
        ([(0, 4)], "There is no head 4 of layer 0"),
        ([(0, 0)] * 9, "At most 8 heads can be captured, found 9"),
    ],
)
def test_heads_that_cannot_be_captured_are_refused(
    comparison: MakeComparison, heads: list[tuple[int, int]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        comparison("0b6").make_kernel(heads)


def test_a_workspace_of_the_wrong_size_is_refused(comparison: MakeComparison) -> None:
    kernel = comparison("0b6").kernel
    with pytest.raises(ValueError, match=r"The workspace must have \d+ values, found 7"):
        kernel._kernels.set_workspace(Params(), torch.zeros(7, dtype=torch.int32))


def test_a_gpu_with_too_few_multiprocessors_is_refused(comparison: MakeComparison) -> None:
    b = comparison("0b6", blocks=1, shallow=True)
    stack = replace(b.config.talker.stack, hidden_size=1024)
    config = replace(b.config, talker=replace(b.config.talker, stack=stack))
    with pytest.raises(ValueError, match="needs a GPU of 4 multiprocessors, found 1"):
        b.kernel._kernels.check_gpu(config)


# --- the operator ---


@pytest.mark.gpu
def test_the_operator_passes_opcheck(gpu_comparison: MakeComparison) -> None:
    b = gpu_comparison("0b6")
    b.begin(0, 0)
    kernel = b.kernel
    module = kernel._kernels._module
    assert isinstance(module, OperatorModule)
    kernel._launch([0], 1)
    kernel._wait(1)
    config = kernel._kernels._configs["generate_single"]
    buffers = kernel._buffers
    written = [tensor for tensor in buffers.written_tensors() if tensor.is_cuda]
    arguments = module.arguments(
        "generate_single", buffers.params, config, written, buffers.workspace
    )
    found = torch.library.opcheck(torch.ops.megakernel_tts.launch.default, arguments)
    assert set(found.values()) == {"SUCCESS"}, found
