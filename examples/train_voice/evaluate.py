"""Compares a voice with its teacher on the held-out sentences.

Words are recognised by pocketsphinx (English only), and with --whisper also by Whisper base, which
also gives the surprisal of the teacher's transcripts; with the extra `judge`, naturalness is rated
by DNSMOS.

python -m examples.train_voice.evaluate WORK --json RESULTS.json --whisper WHEELS
"""

import argparse
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice import listeners, pitch
from examples.train_voice import text as texts
from examples.train_voice.judge import Judge, normalised_words, text_errors
from examples.train_voice.layout import Work, summary
from examples.train_voice.phonemes import VOICES
from examples.train_voice.speak import MANNERS
from examples.train_voice.speech import SAMPLE_RATE, starts_of_words
from examples.train_voice.workers import worker_processes
from megakernel_common.checkpoint import Checkpoint
from megakernel_tts import TTS, AudioChunk
from megakernel_tts.calibration.capture import SpeechCapture
from megakernel_tts.calibration.ground_truth import TimedSpeech
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.codec.weights import decoder_specs, encoder_specs

_CPU = torch.device("cpu")
_SILENCE = 200  # largest sample of silence at the end, which is cut off for DNSMOS
_TIMED = 24  # sentences that are spoken to measure the speed
_JUDGES = "speech", "naturalness", "whisper", "surprisal", "pocketsphinx"  # in this order
Recordings = list[NDArray[np.int16]]
Transcribe = Callable[[NDArray[np.int16], int, str], str]
Recognise = Callable[[NDArray[np.int16], int, str], list[int]]
Score = Callable[[NDArray[np.int16], int, str, list[int]], float]


class Sentence(NamedTuple):
    """A held-out sentence."""

    category: str
    voice: str
    text: str


def sentences(every: int = 1) -> list[Sentence]:
    """The held-out sentences, or every so many of them from the first on."""
    pairs = zip(texts.held_out(), texts.held_out_corpus(), strict=True)
    return [Sentence(category, voice, text) for (category, text), (voice, _) in pairs][::every]


def recordings(work: Work, every: int = 1) -> dict[str, Recordings]:
    """Recordings of the sentences: the teacher's, these through the codec, the voice's speech.

    Two manners of the same codes have one list, so that it is judged once: live text usually has
    the codes of the layout `streaming`.
    """
    with np.load(work.held_out_speech) as file:
        assert len(file["text"]) == len(texts.held_out()), "run `synthesis` again"
        ends = np.cumsum(file["frames"]) * (len(file["wave"]) // int(file["frames"].sum()))
        found = {"teacher": np.split(file["wave"], ends[:-1])[::every]}
    encoder, decoder = _encoder(work), _decoder(work)
    encoded = tqdm(map(encoder, found["teacher"]), desc="encoding", disable=None)
    found["resynthesis"] = [decoder(codes) for codes in encoded]
    with np.load(work.spoken) as file:
        arrays = dict(file)
    for i, manner in enumerate(MANNERS):
        if twin := next((m for m in MANNERS[:i] if _same_codes(arrays, m, manner)), None):
            found[manner] = found[twin]
            continue
        codes = np.split(arrays[manner], np.cumsum(arrays[f"{manner}_frames"])[:-1])[::every]
        found[manner] = [decoder(one) for one in tqdm(codes, desc="decoding", disable=None)]
    return found


def _same_codes(arrays: dict[str, NDArray[Any]], one: str, other: str) -> bool:
    return all(
        np.array_equal(arrays[f"{one}{end}"], arrays[f"{other}{end}"]) for end in ("", "_frames")
    )


def _decoder(work: Work) -> Callable[[NDArray[Any]], NDArray[np.int16]]:
    """Codes [frames, groups] to samples, by the voice's codec."""
    config, folder = work.codec_config(), work.voice / "speech_tokenizer"
    tensors = Checkpoint(folder).load(decoder_specs(config.decoder), _CPU, torch.float32)
    decoder = Decoder(tensors, config)

    def run(codes: NDArray[Any]) -> NDArray[np.int16]:
        wave, _ = decoder.decode(torch.from_numpy(codes).long()[None], decoder.start())
        return (wave[0].numpy() * 32767).round().astype(np.int16)

    return run


def _encoder(work: Work) -> Callable[[NDArray[np.int16]], NDArray[Any]]:
    """Samples to codes [frames, groups], by the voice's codec."""
    config, folder = work.codec_config(), work.voice / "speech_tokenizer"
    specs = encoder_specs(config.encoder, config.decoder.num_groups)
    encoder = Encoder(Checkpoint(folder).load(specs, _CPU, torch.float32), config)

    def run(pcm: NDArray[np.int16]) -> NDArray[Any]:
        return encoder.encode(torch.from_numpy(pcm.astype(np.float32) / 32768)).numpy()

    return run


def understanding(
    spoken: Sequence[Sentence],
    speech: dict[str, Recordings],
    transcribe: Transcribe,
    languages: tuple[str, ...],
    pool: Executor,
) -> dict[str, Any]:
    """Word error rates.

    Args:
        spoken: The sentences.
        speech: Their recordings under each condition.
        transcribe: Samples, rate and language to text.
        languages: Of the sentences that are used.
        pool: Runs `transcribe`.

    Returns:
        For each condition the rate over all words, its ratio to the teacher's, the rates by
        language, voice and category, and the transcripts with errors.
    """
    used = [i for i, one in enumerate(spoken) if VOICES[one.voice].language in languages]

    def judge(condition: str, recorded: Recordings) -> dict[str, Any]:
        counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        wrong: list[str] = []
        transcripts = pool.map(
            transcribe,
            [recorded[i] for i in used],
            itertools.repeat(SAMPLE_RATE),
            [VOICES[spoken[i].voice].language for i in used],
        )
        found = tqdm(transcripts, total=len(used), desc=condition, disable=None)
        for i, transcript in zip(used, found, strict=True):
            category, voice, text = spoken[i]
            language = VOICES[voice].language
            num_errors = text_errors(text, transcript, language)
            # Once each: a category is named `spanish`.
            for group in dict.fromkeys(("all", language, voice, category)):
                counts[group][0] += num_errors
                counts[group][1] += len(normalised_words(text, language))
            if num_errors:
                wrong.append(f"{num_errors} | {voice} | {text} | {transcript.strip()}")
        rates = {group: round(e / n, 4) for group, (e, n) in counts.items()}
        rate = {"rate": rates.pop("all"), "words": counts["all"][1]}
        return rate | {"groups": rates, "wrong": wrong}

    results = _judge_once(speech, judge)
    for result in results.values():
        result["relative"] = round(result["rate"] / max(results["teacher"]["rate"], 1e-4), 2)
    return results


def surprisal(
    spoken: Sequence[Sentence],
    speech: dict[str, Recordings],
    recognise: Recognise,
    score: Score,
    pool: Executor,
) -> dict[str, Any]:
    """How unlikely the transcripts of the teacher's recordings are, in nats per word.

    It depends continuously on the speech, unlike a number of wrong words, and so finds smaller
    differences with as many sentences.

    Args:
        spoken: The sentences.
        speech: Their recordings under each condition.
        recognise: Samples, sample rate and language to tokens.
        score: These and tokens to nats.
        pool: Runs `recognise` and `score`.

    Returns:
        The mean over all words, by language and by voice, for each condition. Sentences of whose
        recording nothing was recognised do not count.
    """
    languages = [VOICES[one.voice].language for one in spoken]
    sample_rates = itertools.repeat(SAMPLE_RATE)
    tokens = [*pool.map(recognise, speech["teacher"], sample_rates, languages)]
    words = [
        len(normalised_words(one.text, language)) if found else 0
        for one, language, found in zip(spoken, languages, tokens, strict=True)
    ]

    def judge(condition: str, recorded: Recordings) -> dict[str, Any]:
        scores = pool.map(score, recorded, sample_rates, languages, tokens)
        nats = tqdm(scores, total=len(recorded), desc=condition, disable=None)
        sums: defaultdict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
        for one, language, *row in zip(spoken, languages, nats, words, strict=True):
            for group in ("all", language, one.voice):
                sums[group] += row
        return {group: round(total / max(count, 1), 3) for group, (total, count) in sums.items()}

    return _judge_once(speech, judge)


def _judge_once(
    speech: dict[str, Recordings], judge: Callable[[str, Recordings], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Results of all conditions; those with the same list of recordings share one."""
    judged: dict[int, dict[str, Any]] = {}
    for condition, recorded in speech.items():
        if id(recorded) not in judged:
            judged[id(recorded)] = judge(condition, recorded)
    return {condition: judged[id(recorded)] for condition, recorded in speech.items()}


def naturalness(
    spoken: Sequence[Sentence], speech: dict[str, Recordings], pool: Executor
) -> dict[str, Any]:
    """Mean scores of DNSMOS for each condition, and by voice; silence at the end is cut off."""

    def judge(condition: str, recorded: Recordings) -> dict[str, Any]:
        rated = pool.map(
            partial(listeners.naturalness, rate=SAMPLE_RATE), map(_without_end, recorded)
        )
        scores = np.array([*tqdm(rated, total=len(recorded), desc=condition, disable=None)])
        return _scores(scores) | {
            name: _scores(scores[[one.voice == name for one in spoken]])
            for name in VOICES
            if any(one.voice == name for one in spoken)
        }

    return _judge_once(speech, judge)


def _scores(scores: NDArray[np.float64]) -> dict[str, float]:
    p808, overall = scores.mean(0).round(3).tolist()
    return {"p808": p808, "ovrl": overall}


def _without_end(pcm: NDArray[np.int16]) -> NDArray[np.int16]:
    loud = np.flatnonzero(np.abs(pcm.astype(np.int32)) > _SILENCE)
    return pcm[: loud[-1] + 1] if len(loud) else pcm


def intonation(speech: dict[str, Recordings]) -> dict[str, Any]:
    """Correlation of log-F0 with the teacher and ratio of standard deviations, means."""
    results: dict[str, Any] = {}
    for manner in MANNERS:
        pairs = zip(speech["teacher"], speech[manner], strict=True)
        found = [pitch.compare(one, other, SAMPLE_RATE) for one, other in pairs]
        values = np.array([one for one in found if one])
        results[manner] = {"sentences": len(values)}
        if len(values):  # a voice that was hardly trained has no voiced frames
            correlation, ratio = values.mean(0).round(3).tolist()
            results[manner] |= {"correlation": correlation, "deviation_ratio": ratio}
    return results


def durations(speech: dict[str, Recordings]) -> dict[str, Any]:
    """Durations relative to the teacher's: mean and percentiles."""
    results: dict[str, Any] = {}
    for manner in MANNERS:
        pairs = zip(speech["teacher"], speech[manner], strict=True)
        ratios = np.array([len(other) / len(one) for one, other in pairs])
        low, high = np.percentile(ratios, (10, 90)).round(3).tolist()
        results[manner] = {"mean": round(float(ratios.mean()), 3), "p10": low, "p90": high}
    return results


def word_times(work: Work, tts: TTS, originals: Recordings, every: int = 1) -> dict[str, Any]:
    """Errors of word starts in seconds on the teacher's recordings, in both layouts.

    Args:
        work: The run.
        tts: The voice.
        originals: The recordings.
        every: They are of every so many sentences.
    """
    alignment = tts._loaded.engine.alignment
    if alignment is None:
        return {}
    encoder = _encoder(work)
    with np.load(work.held_out_speech) as file:
        starts = file["starts"]
    corpus = texts.held_out_corpus()
    ends = np.cumsum([len(text.split()) for _, text in corpus])
    capture = SpeechCapture(tts._loaded, None, None)
    off: list[float] = []
    rows = zip(corpus[::every], originals, np.split(starts, ends[:-1])[::every], strict=True)
    for (voice, text), pcm, pieces in rows:
        truth = starts_of_words(text, pieces.tolist())
        speech = TimedSpeech(text, voice, encoder(pcm), truth)
        for captured in capture.capture_attention(speech):
            found = captured.word_starts(alignment.heads, alignment.lookahead)
            off += np.abs(np.subtract(found, truth)).tolist()
    mean, late = float(np.mean(off)), float(np.percentile(off, 95))
    return {"words": len(off), "mean_s": round(mean, 4), "p95_s": round(late, 4)}


def speed(tts: TTS) -> dict[str, float]:
    """Time to the first chunk and real-time factor of single texts on this CPU, medians."""
    firsts: list[float] = []
    factors: list[float] = []
    for voice, text in texts.held_out_corpus()[:_TIMED]:
        start, samples, first = time.perf_counter(), 0, 0.0
        for event in tts.stream(text, voice, VOICES[voice].language):
            if isinstance(event, AudioChunk):
                first = first or time.perf_counter() - start
                samples += len(event.pcm)
        firsts.append(first)
        factors.append((time.perf_counter() - start) * SAMPLE_RATE / samples)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "first_chunk_ms": round(1000 * float(np.median(firsts)), 1),
        "real_time_factor": round(float(np.median(factors)), 3),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `speak`")
    parser.add_argument("--json", type=Path, required=True, help="file for the results; replaced")
    parser.add_argument("--whisper", type=Path, help="folder of the wheels of Whisper base")
    parser.add_argument(
        "--every", type=int, default=1, help="judge every so many held-out sentences (default: 1)"
    )
    parser.add_argument(
        "--judges",
        type=lambda names: names.split(","),
        metavar="NAME,...",
        help=f"what is measured: {','.join(_JUDGES)} (default: all for which this machine has the "
        "packages)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=max((os.cpu_count() or 1) // 2, 1),
        help="that recognise and rate, with two threads each (default: half of the processors)",
    )
    options = parser.parse_args()
    if options.every < 1:
        parser.error(f"--every must be at least 1, found {options.every}")
    if unknown := set(options.judges or ()) - set(_JUDGES):
        parser.error(f"--judges takes {', '.join(_JUDGES)}; found {', '.join(sorted(unknown))}")
    obstacles = _obstacles(options.whisper)
    judges = set(options.judges or set(_JUDGES) - obstacles.keys())
    for judge in judges & obstacles.keys():
        parser.error(f"--judges {judge}: {obstacles[judge]}")
    if not options.judges:
        for judge, obstacle in obstacles.items():
            print(f"without {judge}: {obstacle}")
    work, start = Work(options.work), time.monotonic()
    spoken, speech = sentences(options.every), recordings(work, options.every)
    results: dict[str, Any] = {"sentences": len(spoken)}

    def add(name: str, found: dict[str, Any]) -> None:
        """Adds a result, and writes all: judging takes more than an hour on two processors."""
        results[name] = found
        results["seconds"] = round(time.monotonic() - start, 1)
        text = json.dumps(results, indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")

    if "speech" in judges:
        add("durations", durations(speech))
        add("intonation", intonation(speech))
        with TTS.load(work.voice, "cpu", slots=1) as tts:
            add("cpu", speed(tts))
            add("word_starts", word_times(work, tts, speech["teacher"], options.every))
        add("ends", json.loads(work.ends.read_text(encoding="utf-8")))
    with worker_processes(options.processes, threads=2) as pool:
        if "naturalness" in judges:
            add("naturalness", naturalness(spoken, speech, pool))
        if "whisper" in judges:
            whisper = partial(_transcribe_by_whisper, options.whisper)
            languages = ("english", "spanish")
            add("whisper", understanding(spoken, speech, whisper, languages, pool))
        if "surprisal" in judges:
            recognise = partial(_recognise_by_whisper, options.whisper)
            score = partial(_score_by_whisper, options.whisper)
            add("surprisal", surprisal(spoken, speech, recognise, score, pool))
        if "pocketsphinx" in judges:
            pocketsphinx = _transcribe_by_pocketsphinx
            add("pocketsphinx", understanding(spoken, speech, pocketsphinx, ("english",), pool))
    for judge in {"whisper", "pocketsphinx"} & results.keys():
        for condition, found in results[judge].items():
            print(f"{judge:12} {condition:11} {found['rate']:.3f} ({found['relative']})")
    for condition, found in results.get("surprisal", {}).items():
        print(f"{'surprisal':12} {condition:11} {found['all']:.3f} nats per word")


def _obstacles(whisper: Path | None) -> dict[str, str]:
    """Why a judge cannot run, by its name."""
    missing = listeners.missing_packages()
    if missing:
        reason = f"{', '.join(missing)} not installed; the extra judge has them"
        return dict.fromkeys(("naturalness", "whisper", "surprisal"), reason)
    return {} if whisper else dict.fromkeys(("whisper", "surprisal"), "--whisper is missing")


@cache
def _whisper(wheels: Path) -> listeners.Whisper:
    """The recogniser of this process."""
    return listeners.Whisper(wheels)


def _transcribe_by_whisper(wheels: Path, pcm: NDArray[np.int16], rate: int, language: str) -> str:
    return _whisper(wheels).transcribe(pcm, rate, language)


def _recognise_by_whisper(
    wheels: Path, pcm: NDArray[np.int16], rate: int, language: str
) -> list[int]:
    return _whisper(wheels).tokens(pcm, rate, language)


def _score_by_whisper(
    wheels: Path, pcm: NDArray[np.int16], rate: int, language: str, tokens: list[int]
) -> float:
    return _whisper(wheels).surprisal(pcm, rate, language, tokens)


@cache
def _judge() -> Judge:
    """The recogniser of this process."""
    return Judge(None)


def _transcribe_by_pocketsphinx(pcm: NDArray[np.int16], rate: int, _language: str) -> str:
    return _judge().transcribe(pcm, rate)


if __name__ == "__main__":
    main()
