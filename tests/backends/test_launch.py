"""A launch from the host's side: it waits for nothing, never hangs, and says what is wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel_tts import ChunkPolicy, Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.prefill_batching import PrefillSegment, pack_passes
from megakernel_tts.backends.protocol import PendingCodes
from megakernel_tts.engine.engine import Engine
from megakernel_tts.errors import DeviceError
from megakernel_tts.loader import Loaded
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from tests.comparison import Comparison, MakeComparison
from tests.emulator import COLUMNS, WIDE
from tests.rig import drain, one_frame

_LOST = r"block \d+ waited in vain for 0 s at the phase (qkv|attend|combine|out|gate_up|down|head|"


class Hurry:
    """While it is on, blocks wait for nobody, and one comes late."""

    def __init__(self, b: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ops, self._patch = b.ops, monkeypatch

    def on(self) -> None:
        self._patch.setattr("megakernel_tts.backends.megakernel._PATIENCE", 0)
        if self._ops is not None:  # emulated blocks keep step, those of a GPU never do
            self._ops.late = 2000

    def off(self) -> None:
        self._patch.undo()
        if self._ops is not None:
            self._ops.late = 0


def test_a_wait_in_vain_names_block_and_phase_and_leaves_no_trace(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, kernel = (found := any_comparison("0b6")), found.kernel
    hurry = Hurry(b, monkeypatch)
    b.begin(0, 0)
    expected = kernel.step([0], 2)[0].codes
    kernel.release(0)
    b.begin(0, 0)
    made = [one_frame(kernel, [0])[0]]
    hurry.on()
    for _ in range(2):
        with pytest.raises(DeviceError, match=_LOST + "draw|project)"):
            kernel.step([0], 2)
    hurry.off()
    made.append(one_frame(kernel, [0])[0])
    assert torch.equal(torch.stack([m for m in made if m is not None]), expected)


def test_a_prompt_that_was_lost_is_never_spoken(
    any_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a prompt: the next launch tells of it, and its stream has no beginning."""
    b, kernel = (found := any_comparison("0b6")), found.kernel
    hurry = Hurry(b, monkeypatch)
    hurry.on()
    b.begin(0, 0)
    hurry.off()
    with pytest.raises(DeviceError):
        kernel.step([0], 1)
    with pytest.raises(FloatingPointError):
        kernel.step([0], 1)


def test_a_late_block_changes_nothing(comparison: MakeComparison) -> None:
    b = comparison("0b6", blocks=2)
    b.begin(0, 0)
    expected = b.kernel.step([0], 2)[0].codes
    b.kernel.release(0)
    assert b.ops is not None
    b.ops.late = 2000
    b.begin(0, 0)
    assert torch.equal(b.kernel.step([0], 2)[0].codes, expected)


def test_the_engine_tells_the_streams_and_goes_on(
    any_comparison: MakeComparison,
    load: Callable[..., Loaded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, b = load("custom_voice", "0b6"), any_comparison("0b6")
    hurry = Hurry(b, monkeypatch)
    prompt_builder = PromptBuilder(b.half.model.embeddings, loaded.config, loaded.tokenizer)
    decoder = loaded.engine.decoder
    engine = Engine(b.kernel, prompt_builder, decoder)

    def say() -> tuple[str, str, int]:
        script = TextQueue(loaded.tokenizer, Splitter())
        script.push("hello.")
        script.end()
        prefix = prompt_builder.prefix("ryan", "english", None)
        sampling = Sampling(seed=1, max_frames=3)
        session = engine.open(script, prefix, None, "full", sampling, ChunkPolicy(3, 3))
        _, finish = drain(session)
        return finish.reason, str(finish.error), finish.frames

    hurry.on()
    reason, error, frames = say()
    hurry.off()
    assert (reason, frames) == ("error", 0)
    assert "lost each other" in error and "try again" in error
    assert say() == ("length", "None", 3)
    engine.close()
    assert not engine._thread.is_alive()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing_between_the_first_frame_and_the_last(
    gpu_comparison: MakeComparison,
) -> None:
    b = gpu_comparison("0b6")
    for slot in range(3):
        b.begin(slot, slot)
    whole = [frames.codes for frames in b.kernel.step([0, 1, 2], 30)]
    for slot in range(3):
        b.kernel.release(slot)
        b.begin(slot, slot)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            b.kernel._hidden.sum().item()  # the mode would tell
        b.begin(3, 1)
        b.kernel._launch([0, 1, 2], 30)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    b.kernel._wait(30)
    made = b.kernel._collect(3, 30)
    for ours, expected in zip(made, whole, strict=True):
        assert torch.equal(torch.from_numpy(ours[: len(expected), 1:]), expected)


class _Clock:
    """A launch of which the host sees another frame each time that it dozes."""

    cuda_event = 7

    def __init__(self, kernel: Megakernel, over_after: int) -> None:
        self.told: list[str] = []
        self._kernel, self._over_after = kernel, over_after
        self._made = 0

    def doze(self, _: float) -> None:
        self._made += 1
        self._kernel._published[1] = self._made
        self.told.append("doze")

    def query(self) -> bool:
        return self._made >= self._over_after

    def wait(self, event: int, nanoseconds: int) -> None:
        assert event == self.cuda_event and nanoseconds > 0, "it slept, and wakes up late"
        self.told.append("look")


@pytest.mark.parametrize(
    ("frames", "over_after", "dozes"), [(1, 1, 0), (2, 2, 1), (8, 8, 7), (8, 3, 3)]
)
def test_the_host_dozes_until_the_last_frame_and_looks_for_its_end(
    comparison: MakeComparison,
    monkeypatch: pytest.MonkeyPatch,
    frames: int,
    over_after: int,
    dozes: int,
) -> None:
    """Whichever stream makes it; a launch that is over sooner is seen."""
    kernel = comparison("0b6").kernel
    clock = _Clock(kernel, over_after)
    monkeypatch.setattr("megakernel_tts.backends.megakernel.time.sleep", clock.doze)
    monkeypatch.setattr(kernel, "_done", clock)
    monkeypatch.setattr(kernel, "_ops", clock)
    kernel._published[:] = 0
    kernel._wait(frames, lambda: clock.told.append("ending"))
    last = ["ending"] if over_after == frames else []
    assert clock.told == ["doze"] * dozes + last + ["look"]


def test_where_codes_are_coming_is_told_of_a_launch_that_is_alone(
    comparison: MakeComparison,
) -> None:
    kernel, told = comparison("0b6").kernel, list[PendingCodes]()
    kernel._tell(told.append, range(COLUMNS + 1), 2)
    assert not told, "the second launch would write to the same place"
    kernel._tell(told.append, range(3), 2)
    (coming,) = told
    kernel._frames[:] = np.arange(len(kernel._frames))
    assert [rows[:, 0].tolist() for rows in coming] == [[1, 18], [35, 52], [69, 86]]
    assert all(rows.shape == (2, 16) for rows in coming)


# --- the operators ---


def _arguments(b: Comparison) -> tuple[Any, ...]:
    """What a launch of one frame is given; the mailbox is no pinned one, for copies are not."""
    b.begin(0, 0)
    lists: Any = b.kernel._lists()
    weights, memory, mailbox, *rest = lists
    mailbox = [mail.to(b.pad.device) for mail in mailbox]
    return b.kernel._model, weights, memory, mailbox, *rest


def _check_operators(b: Comparison, operators: Any) -> None:
    rows, passes = pack_passes([PrefillSegment(0, b.prompt, 0, len(b.prompt))], COLUMNS, WIDE)
    for name in ("generate", "prefill"):
        arguments = _arguments(b)
        last = (b.kernel._streams([0]), 1, []) if name == "generate" else (rows, passes)
        found = torch.library.opcheck(getattr(operators, name).default, (*arguments, *last))
        assert set(found.values()) == {"SUCCESS"}, found


def test_the_schemas_tell_what_the_kernel_changes(comparison: MakeComparison) -> None:
    """The emulated kernel behind the schemas of csrc/ops.cpp."""
    b = comparison("0b6", blocks=1)
    source = (Path(__file__).parents[2] / "csrc/decode/ops.cpp").read_text(encoding="utf-8")
    found = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', source)
    schemas = ["".join(re.findall(r'"([^"]*)"', text)) for text in found]
    assert [schema.partition("(")[0] for schema in schemas] == ["generate", "prefill"]
    library = torch.library.Library("megakernel_tts_emulated", "DEF")
    for schema in schemas:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, getattr(b.ops, name), "CPU")
        library.impl(name, lambda *_: None, "Meta")
    _check_operators(b, torch.ops.megakernel_tts_emulated)
    library._destroy()


@pytest.mark.gpu
def test_the_operators_are_what_torch_expects(gpu_comparison: MakeComparison) -> None:
    _check_operators(gpu_comparison("0b6"), torch.ops.megakernel_tts)


def _wrong(b: Comparison, place: int, which: int | None, value: Any) -> tuple[Any, ...]:
    """Arguments of which one is replaced; in a list, by what is made of it."""
    arguments = [*_arguments(b), b.kernel._streams([0]), 1, []]
    if which is None:
        arguments[place] = value(arguments[place]) if callable(value) else value
    else:
        arguments[place] = list(arguments[place])
        arguments[place][which] = value(arguments[place][which])
    return tuple(arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("place", "which", "value", "sentence"),
    [
        (0, None, 99, "There is no model 99"),
        (1, None, [], "The lists have 0, 10 and 4 tensors"),
        (1, 0, lambda t: t.float(), "stack must be contiguous, of type BFloat16; found Float"),
        (1, 11, lambda t: t[:3], "turns must cover 64 positions"),
        (2, 0, lambda t: t[..., :60, :].contiguous(), "positions a multiple of 16"),
        (2, 4, lambda t: t.cpu(), "The memory must be on a GPU"),
        (2, 5, lambda t: t.t(), "hidden must be contiguous, of type Float; found Float"),
        (2, 7, lambda t: t[1:], r"The workspace must have \d+ words"),
        (3, 0, lambda t: t.cpu(), "The mailbox must be pinned, or on a GPU"),
        (3, 0, lambda t: t[:17], "has room for 1 frames, asked for 2 of 1 streams"),
        (6, None, -1, "The patience is -1 ns"),
        (7, None, lambda t: t[:, 1:], r"The streams must be \[columns, 132\] bytes on the host"),
        (7, None, lambda t: t.cuda(), r"on the host, found \[1, 132\] on cuda"),
        (7, None, lambda t: t.repeat(9, 1), "One launch takes 1 to 8 streams, found 9"),
        (7, None, lambda t: t.fill_(4), r"There is no slot \d+ among 4"),
        (8, None, 0, "asked for 0 of 1 streams"),
        (9, None, [99], r"There is no head 99 among \d+"),
        (9, None, [0] * 9, "At most 8 heads can be watched, found 9"),
        (9, None, [0], "The scores need room for 64 numbers, found 0"),
    ],
)
def test_what_is_wrong_is_said(
    gpu_comparison: MakeComparison,
    place: int,
    which: int | None,
    value: Any,
    sentence: str,
) -> None:
    arguments = _wrong(gpu_comparison("0b6"), place, which, value)
    if "asked for 2" in sentence:
        arguments = (*arguments[:-2], 2, [])
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.megakernel_tts.generate(*arguments)


@pytest.mark.gpu
def test_a_wrong_prompt_is_said(gpu_comparison: MakeComparison) -> None:
    b = gpu_comparison("0b6")
    rows, passes = pack_passes([PrefillSegment(0, b.prompt, 0, len(b.prompt))], COLUMNS, WIDE)

    def beyond(place: int, value: int) -> Tensor:
        wrong = passes.clone()
        wrong[0, place] = value
        return wrong

    for prompt, table, sentence in (
        (rows[:, 1:].contiguous(), passes, r"The prompt must be \[columns, 128\] on the host"),
        (rows.to(b.pad.device), passes, r"on the host, found \[\d+, 128\] on cuda"),
        (rows.float(), passes, "prompt must be contiguous, of type BFloat16"),
        (rows[1:].contiguous(), passes, r"The passes have \d+ columns and the prompt \d+ rows"),
        (rows, passes[:, 1:], r"The passes must be \[passes, 51\] on the host"),
        (rows, passes.to(b.pad.device), "on the host, found .* on cuda"),
        (rows, beyond(0, 17), "A pass takes 1 to 16 columns, found 17"),
        (rows, beyond(1, 1), "Pass 0 must begin with row 0 of the prompt, found 1"),
        (rows, beyond(3, 4), "There is no position 0 of slot 4 among 4 slots of 64 positions"),
        (rows, beyond(4, 64), "There is no position 64 of slot 0"),
        (rows, beyond(5, 1), "or no first column 1 for column 0"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            torch.ops.megakernel_tts.prefill(*_arguments(b), prompt, table)
