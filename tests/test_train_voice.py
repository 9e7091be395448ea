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
import torch.nn.functional as F

from examples.train_voice import (
    codec,
    codec_model,
    codes,
    evaluate,
    export,
    predictions,
    speak,
    talker,
    text,
    training,
    vocoder,
)
from examples.train_voice.dialogue import Dataset
from examples.train_voice.discriminators import (
    Discriminators,
    adversarial_loss,
    discriminator_loss,
    feature_loss,
)
from examples.train_voice.layout import CODES, TINY, Work, write_folder
from examples.train_voice.operations import conv, snake, transposed
from examples.train_voice.own_codes import OwnCodes
from examples.train_voice.phonemes import LANGUAGES, PHONES, VOICES
from examples.train_voice.recordings import HELD_OUT_INTERVAL, Recordings
from examples.train_voice.replies import Replies
from examples.train_voice.spectral import Spectra
from examples.train_voice.speech import FRAME, SAMPLE_RATE, TeacherSpeech
from examples.train_voice.synthesis import SHARD, shard_files, shorten_corpus, synthesise
from examples.train_voice.talker_net import TalkerNet
from examples.train_voice.tokenizer import train_tokenizer
from examples.train_voice.truth import timed_speeches
from megakernel_tts import TTS, Sampling
from megakernel_tts.codec import weights as w
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
    """Speech and recordings are compared; transcripts with one error in three have that rate."""
    with TTS.load(work.voice, device="cpu", slots=2) as tts:
        speak.speak_held_out(tts, work, streams=2, max_frames=12)
    speech = evaluate.recordings(work)
    assert all(len(recorded) == 3 for recorded in speech.values())
    heard = iter(4 * ["Maybe.", "Not to-day.", "Hasta pronto."])
    with ThreadPoolExecutor(1) as pool:
        rates = evaluate.understanding(speech, lambda *_: next(heard), LANGUAGES, pool)
    assert all(found["rate"] == 0.2 and found["relative"] == 1 for found in rates.values())
    assert rates["live"]["groups"]["lucia"] == 0.5
    assert set(evaluate.durations(speech)) == set(speak.MANNERS)


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
    assert sum(synthesise(work, hum)) > 20
    codec.train(work, minutes=0.02, crops=4, frames=2, seed=0)
    codes.encode(work)
    assert_recordings_are_encoded_twice(work)
    vocoder.train(work, minutes=0.01, crops=4, frames=2, channels=2, seed=0)
    talker.train(work, minutes=0.02, positions=600, seed=0)
    predictions.predict(work, hours=0.004, positions=600, temperature=0.3, seed=0)
    recorded, predicted = np.load(work.codes)["codes"], np.load(work.predictions)
    recorded = recorded[: len(predicted)]
    assert (recorded[:, 0] == predicted[:, 0]).all() and (recorded != predicted).any()
    used_minutes = torch.load(work.state("vocoder"))["used"] / 60
    vocoder.train(work, used_minutes + 0.01, crops=4, frames=2, channels=2, seed=0)
    assert_inputs_are_predicted(work)
    assert "held_predicted_mel" in work.log("vocoder").read_text()
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
    monkeypatch.setattr(talker, "_PEAK_RATE", 8e-3)
    work, frames = Work(tmp_path), [2, 3, 4]
    corpus = [("clara", "Held out."), ("henry", "One."), ("lucia", "Two or three?")]
    write_random_codes(work, corpus, frames)
    talker.train(work, minutes=0.6, positions=64, seed=0)
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
    assert sum(synthesise(Work(work), hum)) > 20
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


@pytest.mark.parametrize(
    ("out", "kernel", "dilation", "stride", "groups", "replicate"),
    [
        (7, 7, 3, 1, 1, False),
        (4, 1, 1, 1, 1, False),
        (6, 8, 1, 4, 1, False),
        (5, 7, 1, 1, 5, False),
        (6, 4, 1, 2, 1, True),
    ],
)
def test_convolutions_and_their_gradients_match_torch(
    out: int, kernel: int, dilation: int, stride: int, groups: int, replicate: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x, weight, bias = draw(2, 24, 5), draw(out, 5 // groups, kernel), draw(out)
    y = conv(x, w.Conv(weight, bias, stride, dilation, groups), replicate=replicate)
    left = (kernel - 1) * dilation - (stride - 1)
    padded = F.pad(x.mT, (left, 0), mode="replicate" if replicate else "constant")
    expected = F.conv1d(padded, weight, bias, stride, dilation=dilation, groups=groups).mT
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    grad = draw(*y.shape)
    actual_grads = torch.autograd.grad(y, (x, weight, bias), grad)
    expected_grads = torch.autograd.grad(expected, (x, weight, bias), grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-4)


def test_transposed_convolutions_and_snakes_match_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 5, generator=generator).requires_grad_()
    for kernel, stride in ((2, 2), (8, 4)):
        weight, bias = torch.randn(5, 3, kernel, generator=generator), torch.randn(3)
        y = transposed(x, w.Conv(weight, bias, stride))
        expected = F.conv_transpose1d(x.mT, weight, bias, stride)[..., : 24 * stride].mT
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    alpha, beta = (torch.randn(5, generator=generator).requires_grad_() for _ in range(2))
    y = snake(x, w.Snake(alpha, beta))
    expected = x + torch.sin(x * alpha.exp()).square() / (beta.exp() + 1e-9)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    grad = torch.randn(y.shape, generator=generator)
    actual_grads = torch.autograd.grad(y, (x, alpha, beta), grad)
    expected_grads = torch.autograd.grad(expected, (x, alpha, beta), grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-3)


def test_a_shortened_decoder_gives_the_end_of_the_whole_waveform(tmp_path: Path) -> None:
    torch.manual_seed(0)
    work = Work(tmp_path)
    write_folder(work.voice, *train_tokenizer(["a b c."] * 40), TINY)
    model = codec_model.CodecModel(work.codec_config(), torch.device("cpu"))
    model.calibrate(0.1 * torch.randn(2, 8 * FRAME))
    q, wave = torch.randn(2, 8, TINY.codebook), torch.randn(2, 8 * FRAME)
    whole = model.decoder(q)
    decoded, target = model.decode_part(q, wave, at_start=False)
    torch.testing.assert_close(decoded, whole[:, -2 * FRAME :], rtol=1e-4, atol=1e-5)
    assert torch.equal(target, wave[:, -2 * FRAME :])
    decoded, target = model.decode_part(q, wave, at_start=True)
    torch.testing.assert_close(decoded, whole[:, : 2 * FRAME], rtol=1e-4, atol=1e-5)
    assert torch.equal(target, wave[:, : 2 * FRAME])


def test_discriminators_learn_to_tell_waveforms_apart() -> None:
    torch.manual_seed(0)
    time = torch.arange(7680) / 24_000
    real = torch.sin(2 * torch.pi * 220 * time).repeat(2, 1)
    fake = (real + 0.05 * torch.randn_like(real)).requires_grad_()
    discriminators = Discriminators(Spectra(torch.device("cpu")), channels=4)
    optimizer = torch.optim.Adam(discriminators.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(12):
        loss = discriminator_loss(discriminators(real), discriminators(fake.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    output_real, output_fake = discriminators(real), discriminators(fake)
    assert feature_loss(output_real, output_real).item() == 0
    assert feature_loss(output_real, output_fake).item() > 0.01
    (grad,) = torch.autograd.grad(adversarial_loss(output_fake), fake)
    assert grad.isfinite().all() and (grad != 0).any(1).all()


def tone(hertz: float, shift: float = 0.0) -> torch.Tensor:
    """Half a second of a sine [1, samples] with a level of -23 dBFS; shift in periods."""
    seconds = torch.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    return 0.1 * torch.sin(2 * torch.pi * (hertz * seconds + shift))[None]


def test_the_distance_of_spectra_depends_on_the_phases_of_low_frequencies_only() -> None:
    low, high, spectra = tone(300), tone(3000), Spectra(torch.device("cpu"))
    assert spectra.distance(high - low, low + high) > 3
    assert spectra.phase_distance(low - high, low + high) < 0.1


def test_the_distance_of_phases_does_not_depend_on_the_decoded_level() -> None:
    spectra, wave = Spectra(torch.device("cpu")), tone(120) + tone(360)
    for decibels in (-14, 0, 14):
        gain = 10 ** (decibels / 20)
        assert spectra.phase_distance(gain * wave, wave).abs() < 1e-3
        quarter = spectra.phase_distance(gain * (tone(120, 0.25) + tone(360, 0.25)), wave)
        assert quarter == pytest.approx(2, abs=0.1)  # of two resolutions
    decoded = (0.5 * tone(120, 0.2) + 0.5 * tone(360, 0.1)).requires_grad_()
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, wave), decoded)
    along = (grad * decoded).sum().detach()  # the change with the level
    assert along.abs() < 0.02 * grad.norm() * decoded.norm()


def test_the_gradient_of_phases_is_finite_at_silence_and_makes_it_like_the_recording() -> None:
    spectra, wave = Spectra(torch.device("cpu")), tone(120)
    decoded = torch.zeros_like(wave).requires_grad_()
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, wave), decoded)
    assert F.cosine_similarity(-grad, wave) > 0.8
    assert grad.abs().max() < 1  # without a floor 280
    silence = torch.zeros_like(wave)
    (grad,) = torch.autograd.grad(spectra.phase_distance(decoded, silence), decoded)
    assert not grad.any()


def test_crops_contain_no_held_out_recording(tmp_path: Path) -> None:
    work, num_texts = Work(tmp_path), 2 * HELD_OUT_INTERVAL + 10
    work.write_corpus([("clara", "a")] * num_texts)
    work.recordings.mkdir()
    texts = np.arange(num_texts)
    frames = np.full(num_texts, 3)
    marks = np.repeat(np.where(texts % HELD_OUT_INTERVAL == 0, 1000, 0), 3 * FRAME)
    for i, shard in enumerate(shard_files(work)):
        chosen = texts // SHARD == i
        np.savez(
            shard,
            wave=marks[np.repeat(chosen, 3 * FRAME)].astype(np.int16),
            phones=np.zeros((3 * chosen.sum(), 2), np.uint8),
            words=np.zeros((3 * chosen.sum(), 2), np.int16),
            frames=frames[chosen],
            text=texts[chosen],
            speaker=np.zeros(chosen.sum(), np.int64),
        )
    recordings = Recordings(work, torch.device("cpu"))
    recordings.wait()
    assert recordings.complete
    wave, _ = recordings.crops(400, 4, np.random.default_rng(0))
    assert not wave.any()
    whole, _ = recordings.whole(recordings.held_out)
    assert whole.shape[0] == 3 and (whole > 0).all()


def test_the_corpus_ends_before_the_first_missing_shard(tmp_path: Path) -> None:
    work = Work(tmp_path)
    work.recordings.mkdir()
    corpus = [("clara", str(i)) for i in range(2 * SHARD + 1)]
    work.write_corpus(corpus)
    work.phonemes.write_text("".join(f"{text}\n" for _, text in corpus))
    files = shard_files(work)
    for file in (files[0], files[2]):
        file.touch()
    assert shorten_corpus(work) == SHARD
    assert work.read_corpus() == corpus[:SHARD]
    assert work.phonemes.read_text().splitlines()[-1] == str(SHARD - 1)
    assert shorten_corpus(work) == SHARD
