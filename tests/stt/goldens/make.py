"""Writes what transformers computes: `python -m tests.stt.goldens.make` (transformers 5.23)."""

import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np

from megakernel_stt.comparison import generate, load_reference
from megakernel_stt.model.random_checkpoint import write_checkpoint
from tests.stt.goldens.cases import CASES, FILE, LENGTHS, audio, mels
from tests.stt.oracle import encode


def main() -> None:
    transformers = import_module("transformers")

    arrays: dict[str, np.ndarray] = {}
    for name in ("NemotronAsrStreamingFeatureExtractor", "ParakeetFeatureExtractor"):
        extractor = getattr(transformers, name)(feature_size=128)
        output = extractor(audio(), sampling_rate=16_000, return_tensors="pt")
        arrays[name] = output.input_features[0, : int(output.attention_mask.sum())].numpy()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write_checkpoint(path, case.kind, bias=case.bias, blank_bias=case.blank_bias)
            model = load_reference(path, case.kind)
            recordings = [mels(length) for length in LENGTHS]
            for length, recording in zip(LENGTHS, recordings, strict=True):
                frames = encode(model, recording, case.lookahead)
                arrays[f"{case.name}-{length}-frames"] = frames.numpy()
            if case.kind == "tdt":  # fails in transformers where a duration has the highest logit
                continue
            tokens = generate(model, recordings, case.lookahead)
            for length, ids in zip(LENGTHS, tokens, strict=True):
                arrays[f"{case.name}-{length}-tokens"] = np.array(ids, np.int64)
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
