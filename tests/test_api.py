"""The public names and signatures; a change here is a change for users."""

import inspect
import subprocess
import sys
from pathlib import Path

import megakernel_tts
from megakernel_tts import TTS, ChunkPolicy, Pronunciations, Session, Speech, check_speed

NAMES = {
    "LANGUAGE_CODES", "TTS", "AudioChunk", "CheckpointError", "ChunkPolicy", "EngineBusyError",
    "EngineClosedError", "Finish", "ForkedProcessError", "InstructionError", "LivePolicy",
    "MegakernelTTSError",
    "MissingExtraError", "ModelInfo", "PronunciationError", "Pronunciations", "ReferenceAudioError",
    "Sampling", "SamplingError", "Session", "Speech", "SpeedError", "SynthesisError", "TextError",
    "Voice", "VoiceError", "Word", "WrittenWord", "audible", "check_speed", "has_spoken_words",
    "split_words",
}  # fmt: skip

VOICE = "voice=None, language='auto', instruct=None, layout='auto', sampling=None"
CONTROLS = "speed=1.0, pronunciations=None"


def signature(function: object) -> str:
    bare = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [
        p.replace(annotation=p.empty) for p in bare.parameters.values() if p.name != "self"
    ]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))


def test_exported_names_are_pinned() -> None:
    assert set(megakernel_tts.__all__) == NAMES
    kinds = NAMES - {"LANGUAGE_CODES"}  # a table has no name of its own
    assert all(getattr(megakernel_tts, name).__name__ == name for name in kinds)


def test_public_signatures_are_pinned() -> None:
    assert signature(TTS.load) == (
        "(model='demo', device='auto', dtype='auto', slots=8, cache_positions=None, "
        "prefill_positions=None)"
    )
    assert signature(TTS.say) == f"(text, {VOICE}, *, {CONTROLS}, retries=0)"
    assert signature(TTS.stream) == f"(text, {VOICE}, chunks=None, *, {CONTROLS})"
    assert signature(TTS.astream) == f"(text, {VOICE}, chunks=None, *, {CONTROLS})"
    assert signature(TTS.open) == f"({VOICE}, chunks=None, *, {CONTROLS}, text=None, priority=0)"
    assert signature(TTS.aopen) == signature(TTS.open)
    assert signature(TTS.check_voice) == "(voice=None, language='auto', instruct=None)"
    assert signature(TTS.clone) == "(wav, text=None)"
    assert signature(TTS.describe) == "(model='demo')"
    assert signature(TTS.warmup) == signature(TTS.awarmup) == signature(TTS.close) == "()"
    assert signature(check_speed) == "(speed)"
    assert signature(Pronunciations) == "(table=None)"
    assert signature(Pronunciations.load) == "(path)"
    assert signature(Session.push_text) == signature(Session.apush_text) == "(text)"
    for method in (Session.flush, Session.end, Session.cancel):
        assert signature(method) == "()"
    assert signature(ChunkPolicy) == "(first=1, largest=8, ahead=250)"
    assert {n for n in vars(TTS) if not n.startswith("_")} == {
        "load", "describe", "say", "stream", "astream", "open", "aopen", "check_voice", "clone",
        "warmup", "awarmup", "aligned", "warm", "close", "voices", "info", "sampling", "slots",
        "running", "frame_step_s",
    }  # fmt: skip
    assert {n for n in vars(Session) if not n.startswith("_")} == {
        "finish", "slot_wait_s", "num_waiting_segments", "push_text", "apush_text", "flush", "end",
        "cancel",
    }  # fmt: skip
    assert {n for n in vars(Speech) if not n.startswith("_")} == {"seconds", "save"}


def test_import_is_fast_and_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import time; t = time.process_time(); import megakernel_tts, sys; "
        "print(time.process_time() - t, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    outputs = [run.stdout.split() for run in runs]
    assert all(rest == ["False", "False"] for _, *rest in outputs)
    assert min(float(seconds) for seconds, *_ in outputs) < 0.1


def test_names_other_than_tts_need_no_torch(tmp_path: Path) -> None:
    """Programs that leave speaking to another process start without torch."""
    program = (
        "import sys, numpy, megakernel_tts as m\n"
        "names = [getattr(m, name) for name in m.__all__ if name != 'TTS']\n"
        "m.Voice(numpy.zeros(3, numpy.float32)).save(sys.argv[1])\n"
        "m.Voice.load(sys.argv[1]), m.Sampling(seed=1).seeded()\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "voice.safetensors")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(megakernel_tts, "Megaphone")
    assert set(megakernel_tts.__all__) <= set(dir(megakernel_tts))
