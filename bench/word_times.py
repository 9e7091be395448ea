"""Measures the error of the demo voice's word times, and of the estimate without attention.

Two kinds of speech are used: the voice's own, with word starts from pocketsphinx's forced
alignment, and with --truth recordings with known word starts, which are teacher-forced. The
sentences were not used to choose the alignment heads.

python -m examples.train_voice.truth WORK truth.json
python -m bench.word_times --truth truth.json --json bench/results/word-times-demo.json
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
from examples.train_voice.text import held_out
from megakernel_tts import TTS, Sampling
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.align.estimate import EstimatedWordTimer
from megakernel_tts.align.intervals import interval_peaks
from megakernel_tts.align.words import Transcript
from megakernel_tts.calibration.capture import LAYOUTS, SpeechCapture
from megakernel_tts.calibration.ground_truth import TimedSpeech, read_truth
from megakernel_tts.loader import LoadedModel

_RECOGNISER_RATE = 16_000  # Hz


def aligned(words: Sequence[str], pcm: NDArray[np.int16], rate: int) -> list[float] | None:
    """Word starts by forced alignment.

    Args:
        words: Lower-case words without punctuation.
        pcm: [samples], 16 bits.
        rate: Of `pcm`, in Hz.

    Returns:
        The start of each word in seconds, or None if the alignment failed.
    """
    decoder = pocketsphinx.Decoder(samprate=_RECOGNISER_RATE, loglevel="FATAL")
    if any(decoder.lookup_word(word) is None for word in words):
        return None
    decoder.set_align_text(" ".join(words))
    decoder.start_utt()
    decoder.process_raw(soxr.resample(pcm, rate, _RECOGNISER_RATE).tobytes(), full_utt=True)
    decoder.end_utt()
    segments = decoder.seg()
    if segments is None:
        return None
    starts = [entry.start_frame / 100 for entry in segments if entry.word[0] not in "<["]
    return starts if len(starts) == len(words) else None


def estimated(loaded: LoadedModel, text: str, frames: NDArray[np.int16]) -> list[float]:
    """Word starts by the estimate, in seconds, from PCM [frames, samples per frame]."""
    times = EstimatedWordTimer(Transcript(loaded.tokenizer.token_bytes))
    ids = loaded.tokenizer.encode(text)
    times.update_text(ids, len(ids))
    return [word.start for word in times.add_audio(interval_peaks(frames), last=True)]


Errors = dict[str, list[float]]  # of word starts, in seconds, by method


def own_speech(tts: TTS, texts: Sequence[str]) -> Errors:
    """Errors on the voice's own speech, where the forced alignment succeeds."""
    errors: Errors = {"attention": [], "estimate": []}
    for seed, text in enumerate(texts):
        words = re.findall(r"[a-z']+", text.lower())
        layout = LAYOUTS[seed % 2]
        speech = tts.say(text, layout=layout, sampling=Sampling(seed=seed))
        truth = aligned(words, speech.pcm, speech.sample_rate)
        frames = speech.pcm.reshape(len(speech.codes), -1)
        estimate = estimated(tts._loaded, text, frames)
        attention = [word.start for word in speech.words]
        if truth is not None and len(truth) == len(estimate) == len(attention):
            errors["attention"] += np.subtract(attention, truth).tolist()
            errors["estimate"] += np.subtract(estimate, truth).tolist()
    return errors


def recordings(
    loaded: LoadedModel, alignment: Alignment, speeches: Sequence[TimedSpeech]
) -> Errors:
    """Errors on recordings with known word starts, in both layouts."""
    capture = SpeechCapture(loaded, None, None)
    errors: Errors = {"attention": [], "estimate": []}
    for speech in speeches:
        assert speech.starts is not None
        for captured in capture.capture_attention(speech):
            attention = captured.word_starts(alignment.heads, alignment.lookahead)
            estimate = estimated(loaded, speech.text, captured.samples)
            errors["attention"] += np.subtract(attention, speech.starts).tolist()
            errors["estimate"] += np.subtract(estimate, speech.starts).tolist()
    return errors


def figures(errors: Errors) -> dict[str, object]:
    """Bias, and mean, percentiles and maximum of the absolute errors, in seconds."""
    result: dict[str, object] = {"words": len(errors["attention"])}
    for name, values in errors.items():
        off = np.abs(values)
        result[name] = {
            "bias": round(float(np.mean(values)), 3),
            "mean": round(float(off.mean()), 3),
            **{f"p{p}": round(float(np.percentile(off, p)), 3) for p in (50, 90, 95)},
            "max": round(float(off.max()), 3),
        }
    return result


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=33, help="pairs of held-out sentences")
    parser.add_argument("--truth", type=Path, help="recordings with known word starts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    lines = [text for category, text in held_out() if category == "plain"]
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
        }
        if options.truth:
            talker = tts._loaded.config.talker
            speeches = read_truth(options.truth, talker.num_groups, talker.num_codes)
            content["recordings_s"] = figures(recordings(tts._loaded, alignment, speeches))
    write(content, options.json, ("pocketsphinx",))


if __name__ == "__main__":
    main()
