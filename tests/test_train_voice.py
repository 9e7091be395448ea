"""The training stages from end to end at a tiny size: the checkpoint loads and speaks."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.train_voice import (
    codec,
    codec_model,
    codes,
    evaluate,
    export,
    speak,
    talker,
    text,
    training,
    vocoder,
)
from examples.train_voice.dialogue import Dataset
from examples.train_voice.layout import CODES, TINY, Work, write_folder
from examples.train_voice.own_codes import OwnCodes
from examples.train_voice.phonemes import LANGUAGES, PHONES, VOICES
from examples.train_voice.replies import Replies
from examples.train_voice.speech import SAMPLE_RATE, TeacherSpeech
from examples.train_voice.synthesis import missing_shards, synthesise
from examples.train_voice.talker_net import TalkerNet
from examples.train_voice.tokenizer import train_tokenizer
from examples.train_voice.truth import timed_speeches
from megakernel_tts import TTS, Sampling
from tests.fakes import TIMEOUT_S

ROOT = Path(__file__).parent.parent


def write_corpus(work: Work, texts: int) -> None:
    """Writes texts for all voices, and their letters as phonemes."""
    replies = {language: Replies(language, seed=0) for language in LANGUAGES}
    names = [list(VOICES)[i % len(VOICES)] for i in range(texts)]
    corpus = [(name, replies[VOICES[name].language].reply()) for name in names]
    work.folder.mkdir(exist_ok=True)
    work.write_corpus(corpus)
    for file, pairs in ((work.phonemes, corpus), (work.held_out_phonemes, text.held_out_corpus())):
        lines = ["|".join(one.lower()[:40].split()) for _, one in pairs]
        file.write_text("\n".join(lines) + "\n")


def hum(texts: list[tuple[str, str]]) -> list[TeacherSpeech]:
    """Stands in for the teacher: 50 ms of noise for each phoneme."""
    rng = np.random.default_rng(0)
    speeches: list[TeacherSpeech] = []
    for phonemes, _ in texts:
        edges = np.linspace(0.1, 0.1 + 0.05 * len(phonemes), len(phonemes) + 1)
        samples = round((edges[-1] + 0.2) * SAMPLE_RATE)
        audio = (0.2 * rng.standard_normal(samples)).astype(np.float32)
        speeches.append(TeacherSpeech(audio, phonemes, edges[:-1], edges[1:]))
    return speeches


def run(stage: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"examples.train_voice.{stage}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def assert_speaks(voice: Path) -> None:
    with TTS.load(voice, device="cpu", slots=1) as tts:
        assert list(tts.voices) == list(VOICES)
        speech = tts.say("Hello.", "henry", "english", sampling=Sampling(seed=0, max_frames=4))
    assert len(speech.pcm) == 1920 * len(speech.codes)


def assert_is_evaluated(work: Work) -> None:
    """Speech and recordings are compared; transcripts with one error in three have that rate.

    Live text has the codes of the layout streaming here, which are judged once.
    """
    with TTS.load(work.voice, device="cpu", slots=2) as tts:
        speak.speak_held_out(tts, work, streams=2, max_frames=6)
    speech = evaluate.recordings(work)
    assert all(len(recorded) == 3 for recorded in speech.values())
    assert speech["live"] is speech["streaming"]
    transcripts = iter(4 * ["Maybe.", "Not to-day.", "Hasta pronto."])
    with ThreadPoolExecutor(1) as pool:
        spoken = evaluate.sentences()
        rates = evaluate.understanding(
            spoken, speech, lambda *_: next(transcripts), LANGUAGES, pool
        )
    assert all(found["rate"] == 0.2 and found["relative"] == 1 for found in rates.values())
    assert rates["live"]["groups"]["lucia"] == rates["live"]["groups"]["spanish"] == 0.5
    assert next(transcripts, None) is None, "equal recordings are judged twice"
    fewer = evaluate.recordings(work, every=2)
    assert evaluate.sentences(every=2) == spoken[::2]
    for name, recorded in fewer.items():
        assert all(map(np.array_equal, recorded, speech[name][::2]))
    assert set(evaluate.durations(speech)) == set(speak.MANNERS)


def test_a_sentence_counts_once_in_each_group() -> None:
    """One of three Spanish words is wrong, in the category with the language's name."""
    spoken = [
        evaluate.Sentence("spanish", "lucia", "Hasta luego."),
        evaluate.Sentence("spanish-short", "lucia", "Perfecto."),
    ]
    speech = {"teacher": [np.zeros(1, np.int16)] * 2}
    transcripts = iter(["Hasta pronto.", "Perfecto."])
    with ThreadPoolExecutor(1) as pool:
        rates = evaluate.understanding(
            spoken, speech, lambda *_: next(transcripts), LANGUAGES, pool
        )
    groups = rates["teacher"]["groups"]
    assert groups["spanish"] == groups["lucia"] == rates["teacher"]["rate"] == 0.3333
    assert groups["spanish-short"] == 0


def test_surprisal_is_that_of_the_teachers_transcript_per_word() -> None:
    """Recordings are single samples, whose values are their tokens and their rates."""
    spoken = [
        evaluate.Sentence("short", "clara", "Not to-day."),
        evaluate.Sentence("spanish", "lucia", "Perfecto."),
    ]

    def recordings(*values: int) -> list[np.ndarray]:
        return [np.array([value], np.int16) for value in values]

    speech = {"teacher": recordings(10, 20), "full": recordings(3, 5)}
    with ThreadPoolExecutor(1) as pool:
        found = evaluate.surprisal(
            spoken,
            speech,
            lambda pcm, *_: [int(pcm[0])],
            lambda pcm, _rate, _language, tokens: float(pcm[0]) * tokens[0],
            pool,
        )
    one_of_three, other = {"english": 33.333, "clara": 33.333}, {"spanish": 400.0, "lucia": 400.0}
    assert found["teacher"] == {"all": 125.0, **one_of_three, **other}
    assert found["full"]["all"] == 32.5 and found["full"]["spanish"] == 100.0


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations have the types of a GPU; optimisers reject what the fused one there rejects."""
    step = torch.optim.AdamW.step

    def checked_step(optimizer: torch.optim.AdamW) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.grad.dtype == p.dtype
                    pairs = zip(p.shape, p.stride(), p.grad.stride(), strict=True)
                    assert all(a == b for size, a, b in pairs if size > 1), p.shape
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", checked_step)
    for module in (codec_model, vocoder):
        monkeypatch.setattr(module, "fast_type", lambda _: torch.bfloat16)


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes 40 ms, so that stages make the same steps on every machine."""
    clock = itertools.count(step=0.04)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def assert_inputs_are_predicted(work: Work) -> None:
    """Code 0 and positions without a frame stay; other codes of input frames change."""
    config, device = work.model_config(), torch.device("cpu")
    dataset, net = Dataset(work, config, device), TalkerNet(config, device)
    batch = dataset.build_held_out(full=True)
    codes, fed = talker.Losses(net, dataset).predicted_inputs(batch), batch.previous >= 0
    recorded = dataset.codes_of(batch.previous)
    assert codes.shape == recorded.shape
    assert (codes[..., 0] == recorded[..., 0]).all()
    assert (codes[~fed] == recorded[~fed]).all()
    assert (codes[fed][:, 1:] != recorded[fed][:, 1:]).any(1).all()


def assert_recordings_are_encoded_twice(work: Work) -> None:
    """The second time half a frame later, and without the held-out text, the first one."""
    with np.load(work.codes) as file:
        tables = dict(file)
    texts, ends = tables["text"], np.cumsum(tables["frames"])
    count = len(texts) // 2 + 1
    assert texts.tolist() == [*range(count), *range(1, count)]
    assert ends[-1] == len(tables["codes"])
    for name in ("phones", "words"):
        halves = np.split(tables[name], ends[:-1])
        for once, later in zip(halves[1:count], halves[count:], strict=True):
            assert (later.flatten()[1:] == once.flatten()[:-1]).all()


@pytest.mark.usefixtures("as_on_gpu", "virtual_time")
def test_stages_train_on_given_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages after `pronunciation`, on noise instead of speech, for a second each."""
    sentences = [("words", "Maybe."), ("short", "Not today."), ("spanish", "Hasta luego.")]
    monkeypatch.setattr(text, "held_out", lambda: sentences)
    work = Work(tmp_path)
    write_corpus(work, 40)
    write_folder(work.voice, *train_tokenizer(work.texts()), TINY)
    assert sum(synthesise(shard, hum) for shard in missing_shards(work)) > 20
    codec.train(work, minutes=0.02, crops=4, frames=2, seed=0)
    codes.encode(work)
    assert_recordings_are_encoded_twice(work)
    vocoder.train(work, minutes=0.01, crops=4, frames=2, channels=2, seed=0)
    talker.train(work, minutes=0.02, positions=600, seed=0)
    used_minutes = torch.load(work.state("vocoder"))["used"] / 60
    vocoder.train(work, used_minutes + 0.01, crops=4, frames=2, channels=2, seed=0)
    assert_inputs_are_predicted(work)
    export.export(work)
    assert_speaks(work.voice)
    (speech,) = timed_speeches(work, 9)
    pieces = [piece for piece in speech["text"].split() if any(map(str.isalnum, piece))]
    assert len(speech["starts"]) == len(pieces)
    assert_is_evaluated(work)
    for stage in ("codec", "vocoder", "talker"):
        last = json.loads(work.log(stage).read_text().splitlines()[-1])
        held_out = [value for name, value in last.items() if name.startswith("held_")]
        assert held_out and np.isfinite(held_out).all(), stage


def write_random_codes(work: Work, corpus: list[tuple[str, str]], frames: list[int]) -> None:
    """Writes a run's corpus, tokenizer and random codes of so many frames for each text."""
    work.write_corpus(corpus)
    sizes = replace(TINY, hidden=64, predictor_hidden=64)
    write_folder(work.voice, *train_tokenizer(8 * work.texts()), sizes)
    rng, total = np.random.default_rng(0), sum(frames)
    words = [np.arange(n) * len(t.split()) // n for n, (_, t) in zip(frames, corpus, strict=True)]
    np.savez(
        work.codes,
        codes=rng.integers(0, CODES, (total, 16)).astype(np.uint8),
        phones=rng.integers(0, len(PHONES), (total, 2)).astype(np.uint8),
        words=np.repeat(np.concatenate(words)[:, None], 2, 1).astype(np.int16),
        frames=np.array(frames),
        text=np.arange(len(corpus)),
        speaker=np.array([list(VOICES).index(voice) for voice, _ in corpus]),
    )


@pytest.mark.usefixtures("virtual_time")
def test_speech_has_the_codes_that_the_talker_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy speech of two texts with random codes, after training with own input codes."""
    monkeypatch.setattr(talker, "_PEAK_RATE", 1.5e-2)
    monkeypatch.setattr(training, "_WARM_STEPS", 20)
    work, frames = Work(tmp_path), [2, 2, 3]
    corpus = [("clara", "Held out."), ("henry", "One."), ("lucia", "Two or three?")]
    write_random_codes(work, corpus, frames)
    talker.train(work, minutes=0.25, positions=64, seed=0)
    assert '"predicted": 1.0' in work.log("talker").read_text()
    codec = codec_model.CodecModel(work.codec_config(), torch.device("cpu"))
    training.save_state(work.state("codec"), codec.state(list(codec.parameters.values())))
    export.export(work)
    recorded = np.split(np.load(work.codes)["codes"], np.cumsum(frames)[:-1])
    greedy = Sampling(temperature=0, predictor_temperature=0, max_frames=20)
    with TTS.load(work.voice, device="cpu", slots=1) as tts:
        for (voice, text), codes in list(zip(corpus, recorded, strict=True))[1:]:
            for layout in ("full", "streaming"):
                speech = tts.say(text, voice, layout=layout, sampling=greedy)
                assert speech.codes.tolist() == codes.tolist()


def test_own_codes_replace_recorded_ones_in_their_share(tmp_path: Path) -> None:
    work, device = Work(tmp_path), torch.device("cpu")
    write_random_codes(work, [("clara", "A b c.")] * 400, [8] * 400)
    dataset = Dataset(work, work.model_config(), device)
    own = OwnCodes(dataset, CODES)
    chosen, flags = torch.arange(400), torch.zeros(400, dtype=torch.bool)
    batch = dataset.build(chosen, flags, flags, 20)
    recorded, fed = dataset.codes_of(batch.previous), batch.previous >= 0
    count = batch.frame.numel()
    certain = torch.full((count, CODES), -1e9)
    certain[:, 7] = 0.0  # every sample is 7
    rest = certain[:, None].expand(-1, 15, -1)
    own.store(batch, certain, torch.arange(count), rest)
    assert torch.equal(own.inputs(batch, torch.tensor(0.0), 0.0), recorded)
    changed = (own.inputs(batch, torch.tensor(0.5), 0.0) == 7)[fed].view(400, 8, 16)
    utterances = changed[..., 1:].all(-1).all(-1)
    assert 0.4 < utterances.float().mean() < 0.6
    assert 0.1 < changed[utterances][..., 0].float().mean() < 0.2
    assert changed[~utterances].float().mean() < 0.02


@pytest.mark.slow
def test_commands_train_a_checkpoint_that_speaks(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write_corpus(Work(work), 40)
    run("tokenizer", str(work), "--tiny")
    assert sum(synthesise(shard, hum) for shard in missing_shards(Work(work))) > 20
    small = ("--crops", "4", "--frames", "2")
    run("codec", str(work), "--minutes", "0.04", *small)
    first = (work / "codec.jsonl").read_text()
    used_s = torch.load(work / "codec.pt")["used"]  # more than the budget on a busy machine
    run("codec", str(work), "--minutes", str(used_s / 60 + 0.05), *small)  # resumes
    lines = [json.loads(line) for line in (work / "codec.jsonl").read_text().splitlines()]
    assert len(lines) > len(first.splitlines()) and lines[-1]["seconds"] > used_s
    run("codes", str(work))
    run("vocoder", str(work), "--minutes", "0.02", *small, "--channels", "2")
    run("talker", str(work), "--minutes", "0.03", "--positions", "600")
    run("export", str(work))
    assert_speaks(work / "voice")
    run("truth", str(work), str(tmp_path / "truth.json"))
