"""Word error rates: held-out texts in held-out voices and by the demo voice, real recordings.

python -m examples.train_ears.evaluate WORK --recordings recordings --json results.json
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_ears import real_speech
from examples.train_ears.layout import Work
from examples.train_ears.real_speech import Recording
from examples.train_ears.targets import plain, target
from examples.train_voice.layout import summary
from examples.train_voice.text import held_out
from megakernel_stt import STT
from megakernel_stt.model.config import SAMPLE_RATE
from megakernel_tts import TTS, Sampling

_MARGIN = np.zeros(SAMPLE_RATE // 5, np.int16)  # before and after each recording
_NOISE_S = 60.0
_ROUND_TRIP = 66  # sentences
_VOICES = "clara", "henry", "olivia"
Transcribe = Callable[[NDArray[np.int16]], str]


def errors(expected: Sequence[str], recognised: Sequence[str]) -> int:
    """Number of words to insert, delete or replace."""
    costs = [*range(len(recognised) + 1)]
    for i, word in enumerate(expected, 1):
        before, costs[0] = costs[0], i
        for j, other in enumerate(recognised, 1):
            best = min(costs[j] + 1, costs[j - 1] + 1, before + (word != other))
            before, costs[j] = costs[j], best
    return costs[-1]


def error_rate(
    name: str, recordings: Sequence[Recording], transcribe: Transcribe
) -> dict[str, Any]:
    """Word error rate over all recordings, and the transcripts with errors."""
    wrong: list[str] = []
    num_errors = num_words = 0
    for recording in tqdm(recordings, desc=name, disable=None):
        transcript = plain(transcribe(np.concatenate([_MARGIN, recording.wave, _MARGIN])))
        found = errors(recording.text.split(), transcript.split())
        num_errors += found
        num_words += len(recording.text.split())
        if found:
            wrong.append(f"{found} | {recording.name} | {recording.text} | {transcript}")
    return {"rate": round(num_errors / num_words, 4), "words": num_words, "wrong": wrong}


def held_out_recordings(work: Work) -> list[Recording]:
    """The held-out sentences in held-out voices."""
    texts = held_out()
    with np.load(work.held_out) as shard:
        waves = np.split(shard["wave"], np.cumsum(shard["samples"])[:-1])
        return [
            Recording(texts[i][0], wave, target(texts[i][1]))
            for i, wave in zip(shard["text"], waves, strict=True)
        ]


def spoken_recordings(tts: TTS, count: int) -> list[Recording]:
    """English held-out sentences that a voice speaks, evenly chosen, as speech of 16 kHz."""
    english = [text for category, text in held_out() if not category.startswith("spanish")]
    found: list[Recording] = []
    for i in tqdm(range(count), desc="demo voice", disable=None):
        text, voice = english[i * len(english) // count], _VOICES[i % len(_VOICES)]
        speech = tts.say(text, voice, "english", sampling=Sampling(seed=i))
        wave = soxr.resample(speech.pcm, speech.sample_rate, SAMPLE_RATE)
        found.append(Recording(f"{voice} {i}", wave, target(text)))
    return found


def words_of_noise(transcribe: Transcribe) -> dict[str, int]:
    """Words that are recognised in a minute without speech."""
    rng = np.random.default_rng(0)
    white = rng.standard_normal(round(_NOISE_S * SAMPLE_RATE))
    brown = np.cumsum(white)
    brown = brown - np.convolve(brown, np.ones(800) / 800, "same")  # without its drift
    sounds = {"silence": 0 * white, "white": white, "brown": brown}
    found: dict[str, int] = {}
    for name, sound in sounds.items():
        pcm = np.round(1000 * sound / max(sound.std(), 1)).astype(np.int16)
        found[name] = len(transcribe(pcm).split())
    return found


def real_sets(root: Path) -> dict[str, list[Recording]]:
    """Real recordings by the name of their set."""
    return {"asterisk": real_speech.asterisk(root), "librivox": real_speech.librivox(root)}


def pocketsphinx_transcriber() -> Transcribe:
    """The recogniser pocketsphinx with its own English model, for comparison."""
    from examples.train_voice.judge import Judge

    judge = Judge(None)
    return lambda wave: judge.transcribe(wave, SAMPLE_RATE)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `export`")
    parser.add_argument("--recordings", type=Path, help="folder that get_recordings.sh made")
    parser.add_argument(
        "--lookahead-ms", type=int, nargs="+", default=[80, 160, 1120], help="of the recogniser"
    )
    parser.add_argument("--pocketsphinx", action="store_true", help="for comparison")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    options = parser.parse_args()
    work = Work(options.work)
    sets = {"synthetic": held_out_recordings(work)}
    with TTS.load("demo", device="cpu", slots=1) as tts:
        sets["demo voice"] = spoken_recordings(tts, _ROUND_TRIP)
    if options.recordings:
        sets |= real_sets(options.recordings)
    results: dict[str, Any] = {}
    with STT.load(work.ears, device=options.device, slots=1) as stt:
        transcribers: dict[str, Transcribe] = {
            f"{ms} ms": lambda wave, ms=ms: (
                stt.transcribe((wave, SAMPLE_RATE), lookahead_ms=ms).text
            )
            for ms in options.lookahead_ms
        }
        noise = words_of_noise(transcribers[f"{options.lookahead_ms[-1]} ms"])
        if options.pocketsphinx:
            transcribers["pocketsphinx"] = pocketsphinx_transcriber()
        for listener, transcribe in transcribers.items():
            results[listener] = {
                name: error_rate(f"{listener}, {name}", recordings, transcribe)
                for name, recordings in sets.items()
            }
    for listener, rates in results.items():
        found = (f"{name} {one['rate']:.3f} of {one['words']}" for name, one in rates.items())
        print(f"{listener}: {', '.join(found)} words wrong")
    print(f"words in a minute of noise: {noise}")
    if options.json:
        content = results | {"noise": noise}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
