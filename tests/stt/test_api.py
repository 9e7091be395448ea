"""The public names and signatures; a change here is a change for users."""

import subprocess
import sys

import megakernel_stt
from megakernel_stt import STT, Final, Partial, Session, Transcript
from tests.test_api import signature

NAMES = {
    "STT", "AudioError", "CheckpointError", "EngineBusyError", "EngineClosedError", "Final",
    "ForkedProcessError", "LanguageError", "LookaheadError", "MegakernelTTSError",
    "Partial", "RecognitionError", "Session", "Token", "Transcript", "Word",
}  # fmt: skip


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_exported_names_are_pinned() -> None:
    assert set(megakernel_stt.__all__) == NAMES
    assert all(getattr(megakernel_stt, name).__name__ == name for name in NAMES)


def test_public_signatures_are_pinned() -> None:
    assert signature(STT.load) == "(model='demo', device='auto', dtype='auto', slots=8)"
    assert signature(STT.transcribe) == "(wav, language='auto', lookahead_ms=None)"
    assert signature(STT.open) == "(language='auto', lookahead_ms=160)"
    assert signature(STT.warmup) == signature(STT.awarmup) == signature(STT.close) == "()"
    assert signature(STT.final_latency_s) == "(lookahead_ms=160)"
    assert signature(Session.push) == "(pcm, sample_rate)"
    for method in (Session.finalize, Session.end, Session.cancel):
        assert signature(method) == "()"
    assert {n for n in vars(STT) if not n.startswith("_")} == {
        "load", "transcribe", "open", "warmup", "awarmup", "warm", "close", "final_latency_s",
        "languages", "lookaheads_ms", "name", "running", "slots",
    }  # fmt: skip
    assert {n for n in vars(Session) if not n.startswith("_")} == {
        "push", "finalize", "end", "cancel",
    }  # fmt: skip
    assert signature(Transcript) == "(tokens, seconds)"
    assert {n for n in vars(Transcript) if not n.startswith("_")} == {"text", "words", "language"}
    assert signature(Partial) == "(transcript)" and signature(Final) == "(transcript, is_last)"


def test_import_loads_neither_torch_nor_numpy() -> None:
    program = "import megakernel_stt, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(program) == "False False\n"


def test_names_other_than_stt_need_no_torch() -> None:
    program = (
        "import sys, megakernel_stt as m\n"
        "names = [getattr(m, name) for name in m.__all__ if name != 'STT']\n"
        "m.Transcript((m.Token(1, ' a', 0.0, 0.1, 0.9),), 1.0).words\n"
        "print('torch' in sys.modules)"
    )
    assert run(program) == "False\n"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(megakernel_stt, "Microphone")
    assert set(megakernel_stt.__all__) <= set(dir(megakernel_stt))
