"""How far the Pipecat service's estimate of word times is from a recogniser's alignment.

The demo voice says pairs of sentences; pocketsphinx, which knows the words, tells when each begins.

python -m bench.word_times --json bench/results/word-times-demo.json
"""

import argparse
import random
import re
from pathlib import Path

import numpy as np
import pocketsphinx
import soxr
from numpy.typing import NDArray

from bench.report import write
from megakernel_tts import TTS, Sampling
from pipecat_service.audio import Trimmer
from pipecat_service.timing import WordTimes

_RATE = 16_000  # that the recogniser hears
_TEXTS = Path(__file__).parent.parent / "examples" / "train_voice"


def aligned(words: list[str], pcm: NDArray[np.int16], rate: int) -> list[float] | None:
    """When each word begins, in seconds; None if the recogniser cannot follow."""
    decoder = pocketsphinx.Decoder(samprate=_RATE, loglevel="FATAL")
    if any(decoder.lookup_word(word) is None for word in words):
        return None
    decoder.set_align_text(" ".join(words))
    decoder.start_utt()
    decoder.process_raw(soxr.resample(pcm, rate, _RATE).tobytes(), full_utt=True)
    decoder.end_utt()
    segments = decoder.seg()
    if segments is None:
        return None
    begins = [s.start_frame / 100 for s in segments if s.word[0] not in "<["]
    return begins if len(begins) == len(words) else None


def estimated(text: str, pcm: NDArray[np.int16], rate: int) -> list[float]:
    """The same by the service."""
    times = WordTimes(rate)
    times.write(text)
    return [word.seconds for word in [*times.hear(pcm), *times.end()]]


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = (_TEXTS / "held_out.txt", _TEXTS / "replies.txt")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(1).shuffle(lines)
    errors: list[float] = []
    texts = 0
    with TTS.load() as tts:
        for seed in range(options.texts):
            text = " ".join(lines[2 * seed : 2 * seed + 2])
            words = re.findall(r"[a-z']+", text.lower())
            speech = tts.say(text, layout="streaming", sampling=Sampling(seed=seed))
            rate = speech.sample_rate
            pcm = Trimmer(rate).trim(speech.pcm)
            truth, guess = aligned(words, pcm, rate), estimated(text, pcm, rate)
            if truth is not None and len(truth) == len(guess):
                texts += 1
                errors += np.subtract(guess, truth).tolist()
    off = np.abs(errors)
    write(
        {
            "model": "demo",
            "texts": texts,
            "words": len(errors),
            "error_s": {
                "mean": round(float(np.mean(errors)), 3),
                **{f"p{p}": round(float(np.percentile(off, p)), 3) for p in (50, 90, 95)},
                "max": round(float(off.max()), 3),
            },
        },
        options.json,
    )


if __name__ == "__main__":
    main()
