"""The recipe from end to end at a tiny size: it ends in a checkpoint that loads and speaks."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.train_voice.grammar import Grammar, plural, spell
from examples.train_voice.judge import errors, words_of
from examples.train_voice.operations import conv, snake, transposed
from examples.train_voice.text import held_out, make_corpus
from megakernel_tts import TTS, Sampling
from megakernel_tts.codec import weights as w

ROOT = Path(__file__).parent.parent
WORDS = ["apple", "river", "letter", "window", "Alice", "Boston"]


def _flite_is_missing() -> bool:
    try:
        ctypes.CDLL("libflite.so.1")
    except OSError:
        return True
    return False


def run(stage: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"examples.train_voice.{stage}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(_flite_is_missing(), reason="flite is not installed (Debian: libflite1)")
def test_every_stage_runs_and_the_checkpoint_speaks(tmp_path: Path) -> None:
    words, work = tmp_path / "words", tmp_path / "work"
    words.write_text("\n".join(WORDS))
    run("text", str(work), "--texts", "40", "--words", str(words), "--tiny")
    run("synthesis", str(work), "--processes", "1")
    small = ("--crops", "4", "--frames", "2")
    run("codec", str(work), "--minutes", "0.04", *small)
    first = (work / "codec.jsonl").read_text()
    used = torch.load(work / "codec.pt")["used"]  # seconds; on a busy machine far beyond the budget
    run("codec", str(work), "--minutes", str(used / 60 + 0.05), *small)  # goes on
    lines = [json.loads(line) for line in (work / "codec.jsonl").read_text().splitlines()]
    assert len(lines) > len(first.splitlines()) and lines[-1]["seconds"] > used
    run("codes", str(work))
    run("vocoder", str(work), "--minutes", "0.02", *small, "--channels", "2")
    run("talker", str(work), "--minutes", "0.03", "--positions", "600")
    run("export", str(work))
    with TTS.load(work / "voice", device="cpu", slots=1) as tts:
        assert list(tts.voices) == ["clara", "henry"]
        speech = tts.say("Hello.", "henry", "english", sampling=Sampling(seed=0, max_frames=4))
    assert len(speech.pcm) == 1920 * len(speech.codes)


def test_no_held_out_sentence_is_in_a_corpus() -> None:
    held = [text for text, _ in held_out()]
    assert len(held) >= 60 and len(set(held)) == len(held)
    joined = "\n".join(make_corpus(3000, WORDS, seed=1)).lower()
    assert not any(text.lower() in joined for text in held)


def test_the_grammar_is_seeded_and_writes_numbers_and_forms() -> None:
    one, two = (Grammar(WORDS, 5) for _ in range(2))
    assert [one.utterance() for _ in range(50)] == [two.utterance() for _ in range(50)]
    assert spell(17_342) == "seventeen thousand three hundred and forty two"
    assert [plural(n) for n in ("city", "box", "day", "child")] == [
        "cities",
        "boxes",
        "days",
        "children",
    ]


def test_word_errors_are_counted() -> None:
    assert words_of("It's 'Anna', isn't it?") == ["it's", "anna", "isn't", "it"]
    assert errors("a b c d".split(), "a x c".split()) == 2
    assert errors([], ["a"]) == 1


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
def test_convolutions_and_their_gradients_are_torchs(
    out: int, kernel: int, dilation: int, stride: int, groups: int, replicate: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x, weight, bias = draw(2, 24, 5), draw(out, 5 // groups, kernel), draw(out)
    y = conv(x, w.Conv(weight, bias, stride, dilation, groups), replicate=replicate)
    left = (kernel - 1) * dilation - (stride - 1)
    padded = F.pad(x.mT, (left, 0), mode="replicate" if replicate else "constant")
    wanted = F.conv1d(padded, weight, bias, stride, dilation=dilation, groups=groups).mT
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-4)
    grad = draw(*y.shape)
    ours = torch.autograd.grad(y, (x, weight, bias), grad)
    theirs = torch.autograd.grad(wanted, (x, weight, bias), grad)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_transposed_convolutions_and_snakes_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 5, generator=generator).requires_grad_()
    for kernel, stride in ((2, 2), (8, 4)):
        weight, bias = torch.randn(5, 3, kernel, generator=generator), torch.randn(3)
        y = transposed(x, w.Conv(weight, bias, stride))
        wanted = F.conv_transpose1d(x.mT, weight, bias, stride)[..., : 24 * stride].mT
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-4)
    alpha, beta = (torch.randn(5, generator=generator).requires_grad_() for _ in range(2))
    y = snake(x, w.Snake(alpha, beta))
    wanted = x + torch.sin(x * alpha.exp()).square() / (beta.exp() + 1e-9)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-4)
    grad = torch.randn(y.shape, generator=generator)
    ours = torch.autograd.grad(y, (x, alpha, beta), grad)
    theirs = torch.autograd.grad(wanted, (x, alpha, beta), grad)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
