"""The recogniser's stages from end to end at a tiny size: the checkpoint loads and transcribes."""

import gzip
import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from examples.train_ears import evaluate, export, net, programs, real_speech, text, train
from examples.train_ears.augmentation import CLEAN, TRAINING, Augmentation, Conditions, masked
from examples.train_ears.layout import LOOKAHEADS, TINY, Work, write_folder
from examples.train_ears.real_speech import Recording
from examples.train_ears.recordings import Recordings
from examples.train_ears.run import stages
from examples.train_ears.synthesis import missing_shards, synthesise, write_shard
from examples.train_ears.targets import target
from examples.train_ears.tokenizer import train_tokenizer
from examples.train_ears.voices import draw_style, held_out_style
from examples.train_voice import training
from examples.train_voice.layout import Work as VoiceWork
from examples.train_voice.phonemes import VOICES
from examples.train_voice.text import contains_held_out, held_out, held_out_corpus
from megakernel_stt import STT, Final
from megakernel_stt.comparison import compare
from megakernel_stt.model.config import SAMPLE_RATE
from tests.test_train_voice import hum

CPU = torch.device("cpu")
TEXTS = ["Held out.", "Alpha, beta, gamma!", "We hear 2 tones."]


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes 0.1 s, so that stages make the same steps on every machine."""
    clock = itertools.count(step=0.1)
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(training, "time", fake)
    monkeypatch.setattr(train, "time", fake)


def tones(seed: int, count: int) -> NDArray[np.float32]:
    """Tones of 0.2 s."""
    time = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    pitches = np.random.default_rng(seed).uniform(200, 3000, count)
    waves = [0.3 * np.sin(2 * np.pi * pitch * time) for pitch in pitches]
    return np.concatenate(waves).astype(np.float32)


def write_texts(work: Work, texts: list[str]) -> None:
    """Writes corpus, letters as phonemes, tokenizer and the checkpoint's folder."""
    text.write_corpus(work, [("clara", one, target(one)) for one in texts])
    voice_work = VoiceWork(work.folder)
    others = [one for _, one in held_out_corpus()]
    for file, said in ((voice_work.phonemes, texts), (voice_work.held_out_phonemes, others)):
        lines = ["|".join(one.lower()[:20].split()) for one in said]
        file.write_text("\n".join(lines) + "\n")
    targets = work.targets.read_text().splitlines()
    write_folder(work.ears, train_tokenizer(targets, TINY.vocab), TINY)


def stream(stt: STT, wave: NDArray[np.float32], lookahead_ms: int) -> str:
    """The last transcript of a session that gets packets of 20 ms."""
    size = SAMPLE_RATE // 50
    with stt.open(lookahead_ms=lookahead_ms) as session:
        for first in range(0, len(wave), size):
            session.push(wave[first : first + size], SAMPLE_RATE)
        session.end()
        (final,) = [event for event in session if isinstance(event, Final)]
    return final.transcript.text


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_time")
def test_the_engine_transcribes_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts of tones, streamed in small packets with every lookahead."""
    monkeypatch.setattr(train, "_PEAK_RATE", 8e-3)
    monkeypatch.setattr(training, "_WARM_STEPS", 20)
    monkeypatch.setattr(net, "_DROPOUT", 0.0)
    work = Work(tmp_path)
    recordings = write_tones(work)
    waves = np.split(recordings.wave.numpy(), recordings.starts[1:].numpy())
    train.train(work, 2.4, batch_s=4, seed=0, conditions=CLEAN, mask=False)
    export.export(work)
    with STT.load(work.ears, device="cpu", slots=1) as stt:
        assert stt.lookaheads_ms == tuple(80 * (lookahead + 1) for lookahead in LOOKAHEADS)
        for lookahead_ms in stt.lookaheads_ms:
            assert stream(stt, waves[1], lookahead_ms) == "alpha beta gamma"
            assert stream(stt, waves[2], lookahead_ms) == "we hear two tones"


def write_tones(work: Work) -> Recordings:
    """A run with three texts, spoken by tones, of which the first one is held out."""
    write_texts(work, TEXTS)
    work.recordings.mkdir()
    waves = [tones(seed, count) for seed, count in enumerate((5, 9, 10))]
    write_shard(work.recordings / "tones.npz", waves, range(3))
    return Recordings(work, CPU, batch_s=4)


@pytest.mark.usefixtures("virtual_time")
def test_recordings_are_changed_more_and_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None in the first step, most after the share of the time in which the CTC weight falls."""
    work, seen = Work(tmp_path), list[tuple[float, float]]()
    write_tones(work)
    call = train.Trainer.__call__

    def observed(*arguments: Any) -> dict[str, torch.Tensor]:
        *_, ctc_weight, changed, _ = arguments
        seen.append((ctc_weight, changed.mean()))
        return call(*arguments)

    monkeypatch.setattr(train.Trainer, "__call__", observed)
    train.train(work, 1.0, batch_s=4, seed=0)
    weights, shares = zip(*seen, strict=True)
    assert weights[0] > 0.95 and shares[0] == 0
    assert 0 < np.mean([share for weight, share in seen if 0.15 < weight < 1]) < 1
    late = [share for weight, share in seen if weight < 0.1501]
    assert len(late) > 50
    assert np.mean(late) == pytest.approx(train._CHANGED_SHARE, abs=0.1)


def test_the_features_of_recordings_that_are_not_changed_are_not_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "_DROPOUT", 0.0)
    work = Work(tmp_path)
    recordings = write_tones(work)
    (group,) = recordings.groups

    def loss(changed: bool, mask: bool) -> float:
        torch.manual_seed(0)
        trainer = train.Trainer(net.Net(work.config(), CPU), recordings, CLEAN, mask=mask)
        chosen, flags = np.array([1, 2]), np.array([changed, changed])
        return float(trainer(group, chosen, 3, 1.0, flags, 0.0)["transducer"])

    assert loss(False, True) == loss(True, False) != loss(True, True)


@pytest.mark.usefixtures("virtual_time")
def test_stages_make_a_checkpoint_from_given_speech(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages after `pronunciation`, on noise instead of speech; training continues."""
    work = Work(tmp_path)
    write_texts(work, [f"Text {i} of some words." for i in range(6)])
    assert sum(synthesise(shard, hum) for shard in missing_shards(work, seed=0)) > 5
    assert not missing_shards(work, seed=0)
    train.train(work, 0.1, batch_s=4, seed=0, pause_after=0.03)
    first = json.loads(work.log.read_text().splitlines()[-1])
    train.train(work, 0.1, batch_s=4, seed=0)
    last = json.loads(work.log.read_text().splitlines()[-1])
    assert last["step"] > first["step"] and last["seconds"] > 0.1 * 60 > first["seconds"]
    assert np.isfinite([last["held_transducer"], last["held_ctc"]]).all()
    assert export.export(work) < 1e6
    with STT.load(work.ears, device="cpu", slots=1) as stt:
        assert stt.transcribe((tones(0, 5), SAMPLE_RATE)).seconds == 1.0
    assert_is_evaluated(work, monkeypatch)


def assert_is_evaluated(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes rates of held-out sentences."""
    recordings = evaluate.held_out_recordings(work)
    assert len(recordings) == len([c for c, _ in held_out() if not c.startswith("spanish")])
    assert {one.text for one in recordings} <= {target(text) for _, text in held_out()}
    monkeypatch.setattr(evaluate, "held_out_recordings", lambda _: recordings[:2])
    monkeypatch.setattr(evaluate, "_NOISE_S", 1.0)
    monkeypatch.setattr(evaluate, "_ROUND_TRIP", 1)
    file = work.folder / "results.json"
    arguments = ["--lookahead-ms", "80", "1120", "--device", "cpu", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["evaluate", str(work.folder), *arguments])
    evaluate.main()
    results = json.loads(file.read_text())
    assert set(results) == {"80 ms", "1120 ms", "noise"}
    words = sum(len(one.text.split()) for one in recordings[:2])
    assert results["80 ms"]["synthetic"]["words"] == words


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_recognises_the_same_tokens(tmp_path: Path) -> None:
    """With weights that emit many tokens; the checkpoint is loaded by the class of its type."""
    pytest.importorskip("transformers", "5.23")
    work = Work(tmp_path)
    write_texts(work, TEXTS)
    torch.manual_seed(0)
    network = net.Net(work.config(), CPU)
    with torch.no_grad():
        network.parameters["joint.head.weight"].mul_(8)
    training.save_state(work.state, {"parameters": network.parameters})
    export.export(work)
    for lookahead_ms in (80, 1120):
        found = compare(str(work.ears), (tones(0, 10), SAMPLE_RATE), lookahead_ms=lookahead_ms)
        assert len(found.ours) > 10 and found.first_difference is None


def test_the_corpus_has_suitable_distinct_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without held-out, long and repeated ones; each with its target and an accent."""

    class Kinds:
        def __init__(self, *_: object) -> None:
            self._texts = itertools.cycle(
                [held_out()[0][1], "long " * 60, *(f"It is {i} now." for i in range(90))]
            )

        def text(self, kind: str) -> str:
            return f"{kind.title()}. {next(self._texts)}"

    monkeypatch.setattr(text, "Sources", Kinds)
    corpus = text.make_corpus(100, seed=0)
    texts = [one for _, one, _ in corpus]
    assert len(set(texts)) == 100
    assert not any(contains_held_out(one) or "long" in one for one in texts)
    assert all(written == target(one) for _, one, written in corpus)
    assert {VOICES[voice].accent for voice, _, _ in corpus} == {"us", "gb"}
    assert corpus == text.make_corpus(100, seed=0)


@pytest.mark.parametrize("accent", ["us", "gb"])
def test_held_out_speakers_are_in_no_average(accent: str) -> None:
    rng = random.Random(0)
    drawn = [draw_style(accent, rng) for _ in range(2000)]
    names = {name for style in drawn for name in style.split("+")}
    held = {held_out_style(accent, i) for i in range(10)}
    assert len(held) > 1 and not held & names
    assert len(set(drawn)) > 300 and 0.2 < sum("+" not in one for one in drawn) / 2000 < 0.4


def test_groups_have_recordings_of_their_durations(tmp_path: Path) -> None:
    """Every batch has a group's shape; held-out and unsuitable recordings are in none."""
    work = Work(tmp_path)
    write_texts(work, ["Some words."] * 40)
    work.recordings.mkdir()
    waves = [np.zeros(1000 * (i + 1), np.float32) for i in range(40)]
    write_shard(work.recordings / "a.npz", waves[:25], range(25))
    write_shard(work.recordings / "b.npz", waves[25:], range(25, 40))
    recordings = Recordings(work, CPU, batch_s=12)
    assert recordings.held_out.tolist() == []  # the first text, which is too short here
    rng, seen = np.random.default_rng(0), set[int]()
    for _ in range(8):
        for group, chosen in recordings.batches(rng):
            assert len(chosen) == group.batch
            assert (recordings.samples[chosen] <= group.samples).all()
            assert (recordings.labels[chosen] <= group.labels).all()
            seen |= set(chosen.tolist())
    assert seen == set(range(3, 40))
    third = int(recordings.starts[2])
    assert third == 1000 + 2000 and recordings.samples[2] == 3000


def draw_batch(conditions: Conditions, unchanged: int = 0) -> tuple[torch.Tensor, ...]:
    """Noise of 64 recordings, the first ones unchanged, and what the conditions make of it."""
    torch.manual_seed(0)
    samples = torch.randint(4000, 8001, (64,))
    wave = (3000 * torch.randn(int(samples.sum()))).to(torch.int16)
    starts = samples.cumsum(0) - samples
    augmentation = Augmentation(conditions, CPU)
    changed = torch.arange(64) >= unchanged
    return wave, starts, samples, *augmentation(wave, starts, samples, 8000, changed)


def test_speech_in_clean_conditions_is_unchanged() -> None:
    wave, starts, samples, found, lengths, has_speech = draw_batch(CLEAN)
    assert torch.equal(lengths, samples) and has_speech.all()
    for i in range(64):
        expected = wave[starts[i] :][: samples[i]].float() / 32768
        torch.testing.assert_close(found[i, : samples[i]], expected, rtol=0, atol=1e-5)
        assert (found[i, samples[i] :] == 0).all()


def test_recordings_that_are_not_changed_are_clean() -> None:
    """In a batch with changed ones, of which some have no speech."""
    conditions = replace(TRAINING, speed=(1.0, 1.0), silence_s=0.0, empty=0.5)
    *_, clean, lengths, _ = draw_batch(CLEAN)
    *_, found, after, has_speech = draw_batch(conditions, unchanged=32)
    assert torch.equal(after, lengths)
    torch.testing.assert_close(found[:32], clean[:32], rtol=0, atol=1e-6)
    assert ((found - clean)[32:].norm(dim=1) > 0.01 * clean[32:].norm(dim=1)).all()
    assert has_speech[:32].all() and not has_speech[32:].all()


@pytest.mark.parametrize("name", ["room", "response", "noise", "hum", "babble", "telephone"])
def test_each_condition_changes_speech_but_not_its_length(name: str) -> None:
    *_, clean, lengths, _ = draw_batch(CLEAN)
    *_, found, after, has_speech = draw_batch(replace(CLEAN, **{name: 1.0}))
    assert torch.equal(after, lengths) and has_speech.all()
    ratio = (found - clean).norm(dim=1) / clean.norm(dim=1)
    assert (ratio > 0.01).all() and (ratio < 10).all()


def test_conditions_of_training_give_finite_speech_within_full_scale() -> None:
    *_, samples, found, lengths, has_speech = draw_batch(TRAINING)
    assert found.isfinite().all() and found.abs().max() <= 1
    assert ((lengths >= samples / 1.15 - 1) & (lengths <= found.shape[1])).all()
    assert ((lengths / samples).unique().numel()) > 60
    outside = torch.arange(found.shape[1]) >= lengths[:, None]
    assert (found[outside] == 0).all()
    assert has_speech.float().mean() > 0.8


def test_a_faster_recording_is_shorter_and_higher() -> None:
    wave = (10_000 * torch.sin(torch.arange(16_000) * 2 * torch.pi * 500 / 16_000)).to(torch.int16)
    augmentation = Augmentation(Conditions(speed=(1.1, 1.1)), CPU)
    start, samples = torch.tensor([0]), torch.tensor([16_000])
    found, lengths, _ = augmentation(wave, start, samples, 16_000, torch.ones(1, dtype=torch.bool))
    assert lengths.item() == int(16_000 / 1.1)
    spectrum = torch.fft.rfft(found[0, : lengths[0]]).abs()
    hertz = spectrum.argmax().item() * SAMPLE_RATE / lengths.item()
    assert hertz == pytest.approx(550, abs=2)


def test_without_speech_there_is_silence_or_noise() -> None:
    *_, quiet, _, has_speech = draw_batch(Conditions(empty=1.0))
    assert not has_speech.any() and (quiet == 0).all()
    *_, noisy, lengths, _ = draw_batch(Conditions(empty=1.0, noise=1.0))
    level = (noisy.square().sum(1) / lengths).sqrt()
    assert ((level > 5e-4) & (level < 0.1)).all()


def test_masks_cover_bands_of_time_and_frequency() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([200, 100])
    mels = torch.randn(2, 200, 80)
    found = masked(mels, lengths)
    changed = found != mels
    share = changed[0].float().mean()
    assert 0.05 < share < 0.75
    rows, columns = changed[0].all(1), changed[0].all(0)
    assert rows.any() and columns.any()
    assert torch.equal(changed[0], rows[:, None] | columns)
    assert not changed[1, 100:].all(1).any()


def test_words_to_correct_are_counted() -> None:
    cases = [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a b", "b a c", 2), ("", "a", 1)]
    for expected, transcript, count in cases:
        assert evaluate.errors(expected.split(), transcript.split()) == count
        assert evaluate.errors(transcript.split(), expected.split()) == count


def test_a_rate_counts_the_wrong_words_of_all_recordings() -> None:
    transcripts = iter(["One two!", "four"])
    texts = ["one two three", "four"]
    recordings = [Recording("clip", np.ones(10, np.int16), text) for text in texts]
    found = evaluate.error_rate("clips", recordings, lambda _: next(transcripts))
    assert found == {"rate": 0.25, "words": 4, "wrong": ["1 | clip | one two three | one two"]}


def test_words_in_noise_are_counted() -> None:
    waves: list[NDArray[np.int16]] = []

    def transcribe(wave: NDArray[np.int16]) -> str:
        waves.append(wave)
        return "a word" if wave.any() else ""

    assert evaluate.words_of_noise(transcribe) == {"silence": 0, "white": 2, "brown": 2}
    assert all(len(wave) == 60 * SAMPLE_RATE for wave in waves)
    assert np.abs(waves[2]).max() < 32_767


def test_real_recordings_are_read_from_the_packages_files(tmp_path: Path) -> None:
    sounds = tmp_path / "usr/share/asterisk/sounds/en_US_f_Allison"
    sounds.mkdir(parents=True)
    names = ["good", "short", "sound"]
    for name in names:
        (sounds / f"{name}.g722").write_bytes(bytes(4000))
    prompts = tmp_path / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    prompts.parent.mkdir(parents=True)
    lines = ["; comment: a b c d e", "good: Please leave a message, Sam.", "short: Goodbye."]
    lines += ["sound: [a long tone that is heard]", "missing: One two three four five"]
    with gzip.open(prompts, "wt") as file:
        file.write("\n".join(lines))
    (found,) = real_speech.asterisk(tmp_path)
    assert (found.name, found.text) == ("good", "please leave a message sam")
    assert len(found.wave) == 8000  # half a second
    with pytest.raises(FileNotFoundError, match="no prompts"):
        real_speech.asterisk(tmp_path / "usr")
    clips = tmp_path / "usr/share/pocketsphinx/test/data/librivox"
    clips.mkdir(parents=True)
    (clips / "transcription").write_text("<s> it was <sil> late </s> (clip-1)\n")
    soundfile.write(clips / "clip-1.wav", np.zeros(800, np.int16), SAMPLE_RATE)
    (clip,) = real_speech.librivox(tmp_path)
    assert (clip.name, clip.text, len(clip.wave)) == ("clip-1", "it was late", 800)


def test_programs_speak_random_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that writes a WAV file as long as the text."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        flags = dict(itertools.pairwise(command))
        text = flags.get("-t", command[-1])
        file = flags["-o"] if command[0] == "flite" else flags["-w"]
        soundfile.write(file, np.zeros(220 * len(text), np.int16), 22_050)

    monkeypatch.setattr(programs.subprocess, "run", run)
    work = Work(tmp_path)
    write_texts(work, [f"{'word ' * i}end." for i in range(1, 60)])
    (duration_s,) = programs.synthesise(work, ["flite", "espeak-ng"], 50, seed=0)
    assert {command[0] for command in commands} == {"flite", "espeak-ng"}
    with np.load(work.recordings / "programs-00000.npz") as shard:
        targets = work.targets.read_text().splitlines()
        assert len(set(shard["text"])) == 50
        expected = [len(targets[text]) * 220 / 22_050 for text in shard["text"]]
        assert shard["samples"] / SAMPLE_RATE == pytest.approx(expected, abs=1e-3)
    assert duration_s == pytest.approx(sum(expected), abs=0.1)
    assert not list(programs.synthesise(work, ["flite"], 50, seed=0))


def test_a_stage_follows_those_that_it_depends_on(tmp_path: Path) -> None:
    found = stages(Work(tmp_path), tmp_path / "teacher", 1.0, 2.0, num_gpus=2)
    known: set[str] = set()
    for stage in found:
        assert set(stage.after) <= known
        known.add(stage.name)
    assert found[-1].name == "export"


def test_a_step_can_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shape and no branch of a step depends on the data of a tensor."""
    work = Work(tmp_path)
    recordings, config = write_tones(work), work.config()
    (group,) = recordings.groups
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = net.Net(config, CPU)
        trainer = train.Trainer(network, recordings, TRAINING, mask=True)
        monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
        inputs = [torch.tensor(x) for x in ([1, 2], 3, 0.5, [True, False])]
        metrics = trainer._step(group.samples, group.labels, *inputs)
        with pytest.raises(DataDependentOutputException):
            metrics["transducer"].item()
    assert set(metrics) == {"transducer", "ctc", "gradient"}
