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
from examples.train_voice.speech import SAMPLE_RATE
from examples.train_voice.text import held_out_corpus, is_suitable
from megakernel_tts import TTS, AudioChunk, Finish, Session

MANNERS = ("full", "streaming", "live")  # live: the text is pushed word by word
_MAX_FRAMES = 600  # 48 s, twice as long as the longest text
_RUNAWAY_RATIO = 3.0  # duration relative to the usual one of a text of this length


@dataclass(frozen=True)
class Spoken:
    """Speech of one text: samples [samples] and the reason why it ended."""

    pcm: NDArray[np.int16]
    reason: str


def speak(
    tts: TTS, corpus: list[tuple[str, str]], manner: str, *, seed: int, guard: bool, streams: int
) -> Iterator[Spoken]:
    """Speaks texts, several at the same time.

    Args:
        tts: The voice.
        corpus: Speaker and text of each.
        manner: One of `MANNERS`.
        seed: Of the first text; each next one has the next seed.
        guard: Whether speech that does not end is stopped.
        streams: Number of simultaneous texts.

    Yields:
        The speech of each text, in order.
    """
    for at in range(0, len(corpus), streams):
        part = corpus[at : at + streams]
        sessions = [_open(tts, one, manner, seed + at + i, guard) for i, one in enumerate(part)]
        for session in sessions:
            *chunks, finish = session
            assert isinstance(finish, Finish) and finish.reason != "error", finish
            pcm = [chunk.pcm for chunk in chunks if isinstance(chunk, AudioChunk)]
            yield Spoken(np.concatenate([np.zeros(0, np.int16), *pcm]), finish.reason)


def _open(tts: TTS, line: tuple[str, str], manner: str, seed: int, guard: bool) -> Session:
    voice, text = line
    sampling = replace(tts.sampling, seed=seed, guard=guard, max_frames=_MAX_FRAMES)
    layout = "full" if manner == "full" else "streaming"
    session = tts.open(voice, VOICES[voice].language, layout=layout, sampling=sampling)
    first, *rest = text.split(" ") if manner == "live" else [text]
    session.push_text(first)
    for word in rest:
        session.push_text(f" {word}")
    session.end()
    return session


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


def ends(corpus: list[tuple[str, str]], spoken: list[Spoken], rate: int) -> dict[str, Any]:
    """How the speech of texts ended without the guard."""
    seconds = np.array([len(one.pcm) / rate for one in spoken])
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
    arrays: dict[str, NDArray[Any]] = {}
    with TTS.load(work.voice, options.device, slots=options.streams) as tts:
        sentences = held_out_corpus()
        for manner in MANNERS:
            found = speak(tts, sentences, manner, seed=0, guard=True, streams=options.streams)
            pcm = [one.pcm for one in tqdm(found, total=len(sentences), desc=manner, disable=None)]
            arrays |= {manner: np.concatenate(pcm), f"{manner}_samples": np.array([*map(len, pcm)])}
        texts = new_texts(work, options.texts)
        found = speak(tts, texts, "full", seed=10_000, guard=False, streams=options.streams)
        spoken = list(tqdm(found, total=len(texts), desc="ends", disable=None))
        result = ends(texts, spoken, SAMPLE_RATE)
    np.savez(work.spoken, allow_pickle=False, **arrays)
    work.ends.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print({name: value for name, value in result.items() if name != "odd"})


if __name__ == "__main__":
    main()
