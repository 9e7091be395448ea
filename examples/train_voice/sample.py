"""Speaks ten held-out sentences with all voices in turn, and writes them as one WAV file.

python -m examples.train_voice.sample docs/demo-voice.wav
"""

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from examples.train_voice.layout import summary
from examples.train_voice.phonemes import VOICES
from examples.train_voice.speech import SAMPLE_RATE
from examples.train_voice.text import held_out, language_of
from megakernel_tts import TTS, Sampling
from megakernel_tts.audio import WavWriter, audible

# The last two are Spanish, which one voice speaks.
CATEGORIES = (
    *("plain", "times", "questions", "units", "exclamations", "ellipses", "percentages", "short"),
    *("spanish", "spanish-exclamations"),
)
_MIN_WORDS = 3
_PAUSE_S = 0.02  # besides the silence that speech begins with


def sentences() -> list[tuple[str, str]]:
    """Speaker and text of each: the shortest sentence of its category, voices in turn."""
    found: list[tuple[str, str]] = []
    for category in CATEGORIES:
        texts = [text for name, text in held_out() if name == category]
        language = language_of(category)
        voices = [name for name, voice in VOICES.items() if voice.language == language]
        text = min((t for t in texts if len(t.split()) >= _MIN_WORDS), key=len)
        found.append((voices[len(found) % len(voices)], text))
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("output", type=Path, help="the WAV file")
    parser.add_argument("--model", default="demo", help="demo (the default) or a folder")
    options = parser.parse_args()
    with TTS.load(options.model) as tts, WavWriter(options.output, SAMPLE_RATE) as file:
        for voice, text in tqdm(sentences(), disable=None):
            language = VOICES[voice].language
            pcm = tts.say(text, voice, language, sampling=Sampling(seed=0)).pcm
            end = np.flatnonzero(audible(pcm))[-1] + 1
            file.write(np.pad(pcm[:end], (0, round(_PAUSE_S * SAMPLE_RATE))))


if __name__ == "__main__":
    main()
