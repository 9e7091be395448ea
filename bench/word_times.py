"""How far the demo voice's word times are from the truth, beside the estimate without attention.

Twice: its own speech, where pocketsphinx, which knows the words, tells when each begins; and
flite's recordings, which it is made to say again, where the synthesiser tells. The sentences are
not those that its heads were calibrated with.

python -m bench.word_times --json bench/results/word-times-demo.json
"""

import argparse
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pocketsphinx
import soxr
from numpy.typing import NDArray

from bench.report import write
from bench.word_truth import timed_speeches
from examples.train_voice.text import held_out
from megakernel_tts import TTS, Sampling
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.align.estimate import EstimatedTimes
from megakernel_tts.align.words import Transcript
from megakernel_tts.calibration.capture import LAYOUTS, SpeechCapture
from megakernel_tts.calibration.ground_truth import TimedSpeech
from megakernel_tts.loader import Loaded

_RATE = 16_000  # that the recogniser hears


def aligned(words: Sequence[str], pcm: NDArray[np.int16], rate: int) -> list[float] | None:
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


def estimated(loaded: Loaded, text: str, frames: NDArray[np.int16], rate: int) -> list[float]:
    """The same by the estimate, from [frames, samples a frame]."""
    transcript = Transcript(loaded.tokenizer.spell)
    ids = loaded.tokenizer.encode(text)
    transcript.write(ids, len(ids))
    return [word.start for word in EstimatedTimes(transcript, rate).hear(frames, last=True)]


Errors = dict[str, list[float]]


def own_speech(tts: TTS, texts: Sequence[str]) -> Errors:
    """What it says itself, against the recogniser, where that can follow."""
    errors: Errors = {"attention": [], "estimate": []}
    for seed, text in enumerate(texts):
        words = re.findall(r"[a-z']+", text.lower())
        layout = LAYOUTS[seed % 2]
        speech = tts.say(text, layout=layout, sampling=Sampling(seed=seed))
        truth = aligned(words, speech.pcm, speech.sample_rate)
        frames = speech.pcm.reshape(len(speech.codes), -1)
        guess = estimated(tts._loaded, text, frames, speech.sample_rate)
        found = [word.start for word in speech.words]
        if truth is not None and len(truth) == len(guess) == len(found):
            errors["attention"] += np.subtract(found, truth).tolist()
            errors["estimate"] += np.subtract(guess, truth).tolist()
    return errors


def recordings(loaded: Loaded, alignment: Alignment) -> Errors:
    """Flite's recordings of the sentences that are in no corpus, in both layouts."""
    listener = SpeechCapture(loaded, None, None)
    errors: Errors = {"attention": [], "estimate": []}
    for speech in timed_speeches([text for text, _ in held_out()]):
        codes, starts = np.array(speech["codes"]), speech["starts"]
        for heard in listener.capture_attention(
            TimedSpeech(speech["text"], speech["voice"], codes, starts)
        ):
            found = heard.word_starts(alignment.heads, alignment.lookahead)
            guess = estimated(loaded, speech["text"], heard.samples, heard.rate)
            errors["attention"] += np.subtract(found, starts).tolist()
            errors["estimate"] += np.subtract(guess, starts).tolist()
    return errors


def figures(errors: Errors) -> dict[str, object]:
    """Means and percentiles, in seconds."""
    found: dict[str, object] = {"words": len(errors["attention"])}
    for name, values in errors.items():
        off = np.abs(values)
        found[name] = {
            "bias": round(float(np.mean(values)), 3),
            "mean": round(float(off.mean()), 3),
            **{f"p{p}": round(float(np.percentile(off, p)), 3) for p in (50, 90, 95)},
            "max": round(float(off.max()), 3),
        }
    return found


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=33, help="pairs of held-out sentences")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = [text for text, _ in held_out()]
    random.Random(1).shuffle(lines)
    texts = [" ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=False)]
    with TTS.load("demo", "cpu") as tts:
        alignment = tts._loaded.engine.alignment
        assert alignment is not None
        content = {
            "model": "demo",
            "heads": alignment.heads,
            "lookahead": alignment.lookahead,
            "own_speech_s": figures(own_speech(tts, texts[: options.texts])),
            "recordings_s": figures(recordings(tts._loaded, alignment)),
        }
    write(content, options.json, ("pocketsphinx",))


if __name__ == "__main__":
    main()
