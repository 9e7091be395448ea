"""Measures a voice on held-out sentences: word error rates, and how speech ends.

python -m examples.train_voice.evaluate WORK --json RESULTS.json
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.flite import Flite
from examples.train_voice.judge import Judge, words_of, write_language_model
from examples.train_voice.layout import VOICES, Work, summary
from examples.train_voice.synthesis import resample
from examples.train_voice.text import held_out, make_corpus, read_words
from megakernel_tts import TTS, AudioChunk, Finish, Session
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.model.checkpoint import Checkpoint

RATE = 24_000
_CPU = torch.device("cpu")
_NUM_STREAMS = 16  # per process
_MAX_FRAMES = 400  # 32 s, ten times the usual length
_LONG_RATIO, _RUNAWAY_RATIO = 2.0, 3.0  # duration relative to the synthesiser's


@dataclass(frozen=True)
class _Job:
    """A text to speak."""

    folder: Path
    text: str
    voice: str
    manner: str  # full, streaming or live
    seed: int
    guard: bool


@cache
def _tts(folder: Path) -> TTS:
    """The model; one per process."""
    torch.set_num_threads(1)
    return TTS.load(folder, device="cpu", slots=_NUM_STREAMS)


def _say(jobs: list[_Job]) -> list[tuple[NDArray[np.int16], str]]:
    """Speaks texts at the same time; gives samples and finish reason of each."""
    sessions = [_open(job) for job in jobs]
    results: list[tuple[NDArray[np.int16], str]] = []
    for session in sessions:
        *chunks, finish = session
        assert isinstance(finish, Finish) and finish.reason != "error", finish
        pcm = [chunk.pcm for chunk in chunks if isinstance(chunk, AudioChunk)]
        results.append((np.concatenate([np.zeros(0, np.int16), *pcm]), finish.reason))
    return results


def _open(job: _Job) -> Session:
    tts = _tts(job.folder)
    sampling = replace(tts.sampling, seed=job.seed, guard=job.guard, max_frames=_MAX_FRAMES)
    layout = "full" if job.manner == "full" else "streaming"
    session = tts.open(job.voice, "english", layout=layout, sampling=sampling)
    first, *rest = job.text.split(" ") if job.manner == "live" else [job.text]
    session.push_text(first)
    for word in rest:
        session.push_text(f" {word}")
    session.end()
    return session


def _resynthesis(folder: Path) -> Callable[[NDArray[np.int16]], NDArray[np.int16]]:
    """Gives a function that encodes and decodes a recording."""
    config = Work(folder.parent).codec_config()
    tensors = Checkpoint(folder / "speech_tokenizer")
    encoder = Encoder(
        tensors.load(encoder_specs(config.encoder, config.decoder.num_groups), _CPU, torch.float32),
        config,
    )
    decoder = Decoder(tensors.load(decoder_specs(config.decoder), _CPU, torch.float32), config)

    def run(samples: NDArray[np.int16]) -> NDArray[np.int16]:
        codes = encoder.encode(torch.from_numpy(samples.astype(np.float32) / 32768))
        wave, _ = decoder.decode(codes[None], decoder.start())
        return (wave[0].numpy() * 32767).round().astype(np.int16)

    return run


def _synthesise(texts: list[str], voices: list[str]) -> list[NDArray[np.int16]]:
    flite = Flite()
    return [
        resample(flite.speak(text, VOICES[voice]).samples)
        for text, voice in zip(texts, voices, strict=True)
    ]


def _alternate(count: int) -> list[str]:
    return [list(VOICES)[i % len(VOICES)] for i in range(count)]


class Evaluation:
    """Evaluation of a voice in parallel processes."""

    def __init__(self, work: Work, processes: int) -> None:
        self._work = work
        self._pool = multiprocessing.get_context("spawn").Pool(processes)

    def speak(
        self, texts: list[str], manner: str, *, seed: int, guard: bool
    ) -> tuple[list[NDArray[np.int16]], list[str]]:
        """Speaks all texts with alternating voices."""
        jobs = [
            _Job(self._work.voice, text, voice, manner, seed + i, guard)
            for i, (text, voice) in enumerate(zip(texts, _alternate(len(texts)), strict=True))
        ]
        return self._run(jobs)

    def _run(self, jobs: list[_Job]) -> tuple[list[NDArray[np.int16]], list[str]]:
        batches = [jobs[i : i + _NUM_STREAMS] for i in range(0, len(jobs), _NUM_STREAMS)]
        results: list[tuple[NDArray[np.int16], str]] = []
        with tqdm(total=len(jobs), desc="sentences", disable=None) as progress:
            for batch_results in self._pool.imap(_say, batches):
                results += batch_results
                progress.update(len(batch_results))
        return [pcm for pcm, _ in results], [reason for _, reason in results]

    def understanding(self) -> dict[str, Any]:
        """Word error rates on the held-out sentences, with the same recognisers throughout."""
        written, spoken = (list(column) for column in zip(*held_out(), strict=True))
        corpus = self._work.texts()
        lower = "\n".join(corpus).lower()
        assert not any(text.lower() in lower for text in written), "a held-out text was learned"
        model = self._work.folder / "judge.lm"
        write_language_model(model, corpus, spoken)
        judges = {"corpus": Judge(model), "general": Judge(None)}
        originals = _synthesise(written, _alternate(len(written)))
        again = _resynthesis(self._work.voice)
        conditions = {"originals": originals, "resynthesis": [again(x) for x in originals]}
        lengths: dict[str, list[float]] = {}
        for manner in ("full", "streaming", "live"):
            conditions[manner], _ = self.speak(written, manner, seed=0, guard=True)
            lengths[manner] = [
                len(pcm) / len(original)
                for pcm, original in zip(conditions[manner], originals, strict=True)
            ]
        rates: dict[str, dict[str, float]] = {}
        transcripts: dict[str, dict[str, list[str]]] = {}
        for name, speech in conditions.items():
            found = {j: judge.error_rate(speech, RATE, spoken) for j, judge in judges.items()}
            rates[name] = {j: round(rate, 4) for j, (rate, _) in found.items()}
            transcripts[name] = {j: texts for j, (_, texts) in found.items()}
        return {
            "sentences": len(written),
            "words": sum(len(words_of(s)) for s in spoken),
            "written": written,
            "word_error_rate": rates,
            "length_ratio": {name: _spread(values) for name, values in lengths.items()},
            "heard": transcripts,
        }

    def ends(self, texts: list[str], manner: str) -> dict[str, Any]:
        """How speech ends without the guard, and with it for speech that does not end normally.

        The guard only ends speech, so that all other speech is the same with and without it.
        """
        free, reasons = self.speak(texts, manner, seed=10_000, guard=False)
        references = _synthesise(texts, _alternate(len(texts)))
        ratios = [
            len(pcm) / len(reference) for pcm, reference in zip(free, references, strict=True)
        ]
        odd = [i for i, r in enumerate(ratios) if reasons[i] != "eos" or r > _LONG_RATIO]
        voices = _alternate(len(texts))
        _, guarded = self._run(
            [
                _Job(self._work.voice, texts[i], voices[i], manner, 10_000 + i, guard=True)
                for i in odd
            ]
        )
        return {
            "manner": manner,
            "sentences": len(texts),
            "ended": reasons.count("eos"),
            "runaways": sum(reasons[i] != "eos" or ratios[i] > _RUNAWAY_RATIO for i in odd),
            "runaways_past_the_guard": sum(
                reason == "length" or (reason == "eos" and ratios[i] > _RUNAWAY_RATIO)
                for i, reason in zip(odd, guarded, strict=True)
            ),
            "length_ratio": _spread(ratios),
            "odd": [
                {"text": texts[i], "ratio": round(ratios[i], 2), "free": reasons[i], "guarded": g}
                for i, g in zip(odd, guarded, strict=True)
            ],
        }


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {
        "mean": round(float(np.mean(values)), 3),
        "median": round(float(middle), 3),
        "p10": round(float(low), 3),
        "p90": round(float(high), 3),
        "most": round(float(max(values)), 3),
    }


def fresh_sentences(work: Work, count: int, words: Path) -> list[str]:
    """Sentences of the corpus's grammar that are not in the corpus."""
    corpus = set(work.texts())
    candidates = make_corpus(3 * count, read_words(words), seed=987)
    fresh = [t for t in candidates if t not in corpus and 3 <= len(t.split()) <= 20]
    return fresh[:count]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `export`")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument(
        "--sentences", type=int, default=3000, help="sentences that are searched for runaways"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument(
        "--words", type=Path, default=Path("/usr/share/dict/american-english-small")
    )
    options = parser.parse_args()
    work = Work(options.work)
    start = time.monotonic()
    evaluation = Evaluation(work, options.processes)
    results: dict[str, Any] = evaluation.understanding()
    for name, rates in results["word_error_rate"].items():
        shown = ", ".join(f"{rate:.3f} ({model} model)" for model, rate in rates.items())
        print(f"{name:12} word error rate {shown}")
    texts = fresh_sentences(work, options.sentences, options.words)
    few = texts[: options.sentences // 10]
    results["ends"] = [
        evaluation.ends(few, "streaming"),
        evaluation.ends(few, "live"),
        evaluation.ends(texts, "full"),
    ]
    for one in results["ends"]:
        print({name: value for name, value in one.items() if name != "odd"})
    results["seconds"] = round(time.monotonic() - start, 1)
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
