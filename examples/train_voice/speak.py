"""Speaks the held-out sentences and new texts with a trained voice, for `evaluate`.

python -m examples.train_voice.speak WORK [--device cuda]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import LANGUAGES, VOICES
from examples.train_voice.replies import Replies
from examples.train_voice.speech import FRAME, SAMPLE_RATE
from examples.train_voice.text import held_out_corpus, is_suitable
from megakernel_tts import TTS, AudioChunk, Finish, Sampling, Session

MANNERS = ("full", "streaming", "live")  # live: the text is pushed word by word
MAX_FRAMES = 600  # 48 s, twice as long as the longest text
_RUNAWAY_RATIO = 3.0  # duration relative to the usual one of a text of this length


@dataclass(frozen=True)
class SpokenCodes:
    """Speech of one text: codes [frames, groups] and the reason why it ended."""

    codes: NDArray[np.int64]
    reason: str


def speak(
    tts: TTS, corpus: list[tuple[str, str]], manner: str, sampling: Sampling, streams: int
) -> Iterator[SpokenCodes]:
    """Speaks texts, several at the same time.

    Args:
        tts: The voice.
        corpus: Speaker and text of each.
        manner: One of `MANNERS`.
        sampling: With the seed of the first text; each next one has the next seed.
        streams: Number of simultaneous texts.

    Yields:
        The speech of each text, in order.
    """
    for at in range(0, len(corpus), streams):
        part = corpus[at : at + streams]
        sessions = [
            _open(tts, one, manner, replace(sampling, seed=(sampling.seed or 0) + at + i))
            for i, one in enumerate(part)
        ]
        for session in sessions:
            *chunks, finish = session
            assert isinstance(finish, Finish) and finish.reason != "error", finish
            codes = [chunk.codes for chunk in chunks if isinstance(chunk, AudioChunk)]
            assert codes, f"no speech for {part}"
            yield SpokenCodes(np.concatenate(codes), finish.reason)


def _open(tts: TTS, line: tuple[str, str], manner: str, sampling: Sampling) -> Session:
    voice, text = line
    layout = "full" if manner == "full" else "streaming"
    session = tts.open(voice, VOICES[voice].language, layout=layout, sampling=sampling)
    first, *rest = text.split(" ") if manner == "live" else [text]
    session.push_text(first)
    for word in rest:
        session.push_text(f" {word}")
    session.end()
    return session


def speak_held_out(tts: TTS, work: Work, streams: int, max_frames: int = MAX_FRAMES) -> None:
    """Speaks the held-out sentences in all manners, and writes their codes."""
    corpus = held_out_corpus()
    sampling = replace(tts.sampling, seed=0, max_frames=max_frames)
    arrays: dict[str, NDArray[Any]] = {}
    for manner in MANNERS:
        found = speak(tts, corpus, manner, sampling, streams)
        rows = tqdm(found, total=len(corpus), desc=manner, disable=None)
        codes = [one.codes.astype(np.int16) for one in rows]
        frames = np.array([len(one) for one in codes])
        arrays |= {manner: np.concatenate(codes), f"{manner}_frames": frames}
    np.savez(work.spoken, allow_pickle=False, **arrays)


def new_texts(work: Work, count: int) -> list[tuple[str, str]]:
    """Speakers and replies that are not in the corpus; every fifth is Spanish."""
    known = set(work.texts())
    replies = {language: Replies(language, seed=987) for language in LANGUAGES}
    english = [v for v in VOICES if VOICES[v].language == "english"]
    spanish = [v for v in VOICES if VOICES[v].language == "spanish"]
    texts: list[tuple[str, str]] = []
    while len(texts) < count:
        voices = spanish if len(texts) % 5 == 4 else english
        voice = voices[len(texts) % len(voices)]
        text = replies[VOICES[voice].language].reply()
        if text not in known and is_suitable(text) and len(text) > 12:
            texts.append((voice, text))
    return texts


def ends(corpus: list[tuple[str, str]], spoken: list[SpokenCodes]) -> dict[str, Any]:
    """How the speech of texts ended without the guard."""
    seconds = np.array([len(one.codes) * FRAME / SAMPLE_RATE for one in spoken])
    letters = np.array([[1, len(text)] for _, text in corpus])
    usual = letters @ np.linalg.lstsq(letters, seconds, rcond=None)[0]
    ratios = seconds / np.maximum(usual, 0.5)
    reached = [one.reason == "eos" for one in spoken]
    odd = [i for i, r in enumerate(ratios) if not reached[i] or r > _RUNAWAY_RATIO]
    return {
        "texts": len(corpus),
        "ended": sum(reached),
        "runaways": len(odd),
        "odd": [
            {"text": corpus[i][1], "seconds": round(seconds[i], 2), "reason": spoken[i].reason}
            for i in odd
        ],
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `export`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=16, help="simultaneous texts")
    parser.add_argument("--texts", type=int, default=3000, help="texts whose ends are counted")
    options = parser.parse_args()
    work = Work(options.work)
    with TTS.load(work.voice, options.device, slots=options.streams) as tts:
        speak_held_out(tts, work, options.streams)
        texts = new_texts(work, options.texts)
        sampling = replace(tts.sampling, seed=10_000, guard=False, max_frames=MAX_FRAMES)
        found = speak(tts, texts, "full", sampling, options.streams)
        result = ends(texts, list(tqdm(found, total=len(texts), desc="ends", disable=None)))
    work.ends.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print({name: value for name, value in result.items() if name != "odd"})


if __name__ == "__main__":
    main()
