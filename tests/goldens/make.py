"""Records the outputs of the official package for the random checkpoints and the demo voice.

    python -m venv official
    official/bin/pip install torch==2.13.0
    official/bin/pip install transformers==4.57.3 accelerate==1.12.0 librosa soundfile einops \
        onnxruntime sox
    official/bin/pip install --no-deps qwen-tts==0.1.1
    PYTHONPATH=. official/bin/python tests/goldens/make.py [0b6] [1b7] [demo]

Of large arrays a part is recorded: every 61st sample of a waveform, every 17th logit.
"""

import importlib.machinery
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))
for _name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
    # Used only by the 25 Hz tokenizer, which is not released.
    _module: Any = types.ModuleType(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    _module.__path__ = []
    sys.modules[_name] = _module
sys.modules["torchaudio"].compliance = sys.modules["torchaudio.compliance"]  # type: ignore
sys.modules["torchaudio.compliance"].kaldi = sys.modules["torchaudio.compliance.kaldi"]  # type: ignore

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cases import (  # noqa: E402
    CHECKPOINTS,
    FRAMES,
    LONG_REFERENCE,
    REFERENCE_TEXT,
    Case,
    cases,
    codec_codes,
    reference_audio,
    tokenizer_texts,
)
from qwen_tts import Qwen3TTSModel  # noqa: E402  # pyright: ignore[reportMissingImports]

from megakernel_tts.model.hub import find_checkpoint  # noqa: E402
from megakernel_tts.model.random_checkpoint import Size, write_checkpoint  # noqa: E402

WAVE_STEP, LOGIT_STEP = 61, 17


def record(model: Any, case: Case, prompt: Any) -> dict[str, np.ndarray]:
    """Runs one greedy request and records the inputs and outputs of each stage."""
    recorded: dict[str, Any] = {"logits": [], "predictor": []}
    talker = model.model.talker
    generate, head = talker.generate, talker.codec_head
    heads = talker.code_predictor.lm_head

    def recording_talker_generate(**arguments: Any) -> Any:
        recorded["prefill"] = arguments["inputs_embeds"][0]
        recorded["trailing"] = arguments["trailing_text_hidden"][0]
        return generate(**arguments)

    def recording_hook(key: str) -> Any:
        return lambda _module, _inputs, out: recorded[key].append(out[0, -1])

    model_generate = model.model.generate

    def recording_model_generate(**arguments: Any) -> Any:
        codes, hidden = model_generate(**arguments)
        recorded["codes"], recorded["hidden"] = codes[0], hidden[0]
        return codes, hidden

    hooks = [head.register_forward_hook(recording_hook("logits"))]
    hooks += [h.register_forward_hook(recording_hook("predictor")) for h in heads]
    talker.generate, model.model.generate = recording_talker_generate, recording_model_generate
    greedy = dict(do_sample=False, subtalker_dosample=False, max_new_tokens=FRAMES + 1)
    full = case.layout == "full"
    common: dict[str, Any] = dict(text=case.text, language=case.language, non_streaming_mode=full)
    if case.kind == "custom_voice":
        waves, _ = model.generate_custom_voice(
            **common, speaker=case.speaker or "", instruct=case.instruct, **greedy
        )
    elif case.kind == "voice_design":
        waves, _ = model.generate_voice_design(**common, instruct=case.instruct, **greedy)
    else:
        waves, _ = model.generate_voice_clone(**common, voice_clone_prompt=prompt, **greedy)
    talker.generate, model.model.generate = generate, model_generate
    for hook in hooks:
        hook.remove()
    predictor = torch.stack(recorded["predictor"])[: FRAMES * 15].view(FRAMES, 15, -1)
    return {
        "prefill": recorded["prefill"].numpy(),
        "trailing": recorded["trailing"].numpy(),
        "codes": recorded["codes"].numpy().astype(np.int16),
        "hidden": recorded["hidden"].numpy()[::5],
        "logits": torch.stack(recorded["logits"])[:FRAMES:5, ::LOGIT_STEP].numpy(),
        "predictor": predictor[::7, :, :: 3 * LOGIT_STEP].numpy(),
        "wave": np.asarray(waves[0])[::WAVE_STEP],
        "samples": np.asarray(len(waves[0])),
    }


def load(folder: str | Path) -> Any:
    """The official model of a checkpoint, in float32."""
    return Qwen3TTSModel.from_pretrained(
        str(folder), device_map="cpu", dtype=torch.float32, attn_implementation="eager"
    )


def record_random(size: Size) -> dict[str, np.ndarray]:
    """Records the random checkpoints of one size."""
    kinds, codes = CHECKPOINTS[size]
    golden: dict[str, np.ndarray] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            # A temporary folder, whose name cannot be taken for a hub id.
            write_checkpoint(Path(folder), kind, size, codes=codes)
            model = load(folder)
        prompts: dict[str | None, Any] = {None: None}
        if kind == "base":
            audio = (reference_audio(), 24000)
            prompts["in-context"] = model.create_voice_clone_prompt(audio, REFERENCE_TEXT)
            prompts["x-vector"] = model.create_voice_clone_prompt(
                audio, None, x_vector_only_mode=True
            )
            item = prompts["in-context"][0]
            golden["reference/codes"] = item.ref_code.numpy().astype(np.int16)
            long = model.create_voice_clone_prompt(
                (reference_audio(LONG_REFERENCE), 24000), REFERENCE_TEXT
            )
            golden["reference/long"] = long[0].ref_code.numpy().astype(np.int16)
            golden["reference/x_vector"] = item.ref_spk_embedding.numpy()
        for case in cases(size):
            if case.kind == kind:
                arrays = record(model, case, prompts[case.reference])
                golden |= {f"{case.name}/{key}": value for key, value in arrays.items()}
                print(size, case.name, arrays["codes"].shape, arrays["prefill"].shape)
        if kind == "custom_voice":
            decoder = model.model.speech_tokenizer.model.decoder
            frames = torch.from_numpy(codec_codes(codes)).t()[None]
            golden["codec/full"] = decoder(frames)[0, 0, :: 3 * WAVE_STEP].numpy()
            chunked = decoder.chunked_decode(frames)[0, 0, :: 3 * WAVE_STEP]
            golden["codec/chunked"] = chunked.numpy()
            tokenizer = model.processor.tokenizer
            for i, text in enumerate(tokenizer_texts()):
                ids = tokenizer(text.strip())["input_ids"]
                golden[f"ids/{i}"] = np.asarray(ids, dtype=np.int32)
    return golden


def record_demo() -> dict[str, np.ndarray]:
    """Records the demo voice."""
    model = load(find_checkpoint("demo"))
    golden: dict[str, np.ndarray] = {}
    for case in cases("demo"):
        arrays = record(model, case, None)
        golden |= {f"{case.name}/{key}": value for key, value in arrays.items()}
        print("demo", case.name, arrays["codes"].shape, arrays["prefill"].shape)
    return golden


@torch.no_grad()
def main(models: list[str]) -> None:
    """Writes one file per model."""
    torch.manual_seed(0)
    for model in models or [*CHECKPOINTS, "demo"]:
        golden = record_demo() if model == "demo" else record_random(model)  # pyright: ignore
        file = Path(__file__).parent / f"official-{model}.npz"
        np.savez_compressed(file, **golden)  # pyright: ignore[reportArgumentType]
        print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
