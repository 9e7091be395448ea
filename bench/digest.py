"""Digests of codes, samples and word times, to compare two versions or two launch paths.

Equal digests mean equal codes to the last bit. Run it with both versions on one machine:

python -m bench.digest --models demo 0.6B 1.7B --json digest.json
python -m bench.digest --models demo 0.6B 1.7B --against digest.json
"""

import argparse
import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_tts import TTS, AudioChunk, ChunkPolicy, Sampling
from megakernel_tts.model.random_released import SIZES, write_released_checkpoint

Digests = dict[str, str]

_TEXTS = (
    "Hello, it is good to hear you.",
    "The quick brown fox jumps over the lazy dog, twice: once at nine, and once at ten.",
    "Yes.",
)
_LAYOUTS: tuple[Literal["full", "streaming"], ...] = ("full", "streaming")
_NUM_SESSIONS = 12  # on eight slots


def _digest(*arrays: NDArray[np.generic]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _samplings(seed: int) -> Mapping[str, Sampling]:
    return {
        "sampled": Sampling(seed=seed + 1, max_frames=150, guard=False),
        "greedy": Sampling.greedy(seed=seed, max_frames=150, guard=False),
        "hot": Sampling(
            seed=9,
            temperature=1.3,
            top_p=0.7,
            predictor_top_p=0.9,
            repetition_penalty=1.4,
            max_frames=80,
        ),
    }


def digest_requests(tts: TTS) -> Digests:
    """Digests of single requests: three texts, both layouts, three samplings.

    Args:
        tts: A warm model with named voices.
    """
    found: Digests = {}
    for i, text in enumerate(_TEXTS):
        for layout in _LAYOUTS:
            for kind, sampling in _samplings(i).items():
                speech = tts.say(text, layout=layout, sampling=sampling)
                times = [[word.start, word.end or -1.0] for word in speech.words]
                digest = _digest(speech.codes, speech.pcm, np.array(times, np.float64))
                found[f"text {i}, {layout}, {kind}"] = digest
    return found


def digest_sessions(tts: TTS, max_frames: int = 60) -> Digests:
    """Digests of the codes of sessions that run together, with chunks of several sizes.

    Args:
        tts: A warm model with named voices.
        max_frames: Frames of a session, at most.
    """
    found: Digests = {}

    def run(k: int) -> None:
        sampling = Sampling(seed=100 + k, max_frames=max_frames)
        chunks = ChunkPolicy(1, 1 << k % 4)
        with tts.open(layout=_LAYOUTS[k % 2], sampling=sampling, chunks=chunks) as session:
            for word in _TEXTS[k % 2].split():
                session.push_text(f"{word} ")
            session.end()
            codes = [event.codes for event in session if isinstance(event, AudioChunk)]
            found[f"session {k}"] = _digest(*codes)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(_NUM_SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(found.items()))


def digest_model(model: str, device: str) -> Digests:
    """All digests of a model.

    Args:
        model: `demo`, or a released size with random weights, `0.6B` or `1.7B`.
        device: As `TTS.load` takes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path: str | Path = model
        if model in SIZES:
            path = Path(folder)
            write_released_checkpoint(path, model, torch.device(device))
        with TTS.load(path, device=device, slots=8) as tts:
            tts.warmup()
            return digest_requests(tts) | digest_sessions(tts)


def main() -> int:
    """Prints the digests; with --against, the differences, and returns 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("demo", *SIZES), default=["demo"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the digests")
    parser.add_argument("--against", type=Path, help="file of another version's digests")
    options = parser.parse_args()
    found = {model: digest_model(model, options.device) for model in options.models}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.against is None:
        print(json.dumps(found, indent=1))
        return 0
    expected = json.loads(options.against.read_text(encoding="utf-8"))
    different = [
        f"{model}: {name}"
        for model, digests in found.items()
        for name, digest in digests.items()
        if expected[model][name] != digest
    ]
    print("\n".join([*different, f"{len(different)} digests differ"]))
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
