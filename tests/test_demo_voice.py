"""The demo voice: a recogniser transcribes its speech, and times its words."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Literal, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.word_times import aligned
from examples.train_voice.judge import Judge, write_language_model
from examples.train_voice.text import held_out
from megakernel_tts import TTS, AudioChunk, Speech, audible
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.speech import collect
from megakernel_tts.speed import TimeScaler

# None of them is in the training corpus (see `held_out.txt`).
SENTENCES = (
    "Your package will arrive on Thursday afternoon.",
    "The library closes early on Sunday.",
    "Can you tell me more about the problem?",
    "My brother works for a large company in Berlin.",
    "There is no sugar left in the kitchen.",
)
# Sentences of the recogniser's language model: the same words in other sentences.
LANGUAGE_MODEL_SENTENCES = (
    "The company will close on Sunday afternoon.",
    "There is more sugar in the living room.",
    "My package is in the large kitchen.",
    "Can I tell you about my brother?",
    "The lights in the library work.",
    "I have a problem on Thursday.",
    "Your brother will arrive early in Berlin.",
    "You have no room left for the lights.",
)

PromptLayout = Literal["full", "streaming"]
LAYOUTS: tuple[PromptLayout, ...] = ("full", "streaming")
S = TypeVar("S")
T = TypeVar("T")
MAX_ERROR_RATE = 0.25  # share of the words


@pytest.fixture(scope="module")
def demo() -> Iterator[TTS]:
    with TTS.load("demo", device="cpu", slots=2 * len(SENTENCES)) as tts:
        yield tts


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    file = tmp_path_factory.mktemp("judge") / "model.lm"
    write_language_model(file, LANGUAGE_MODEL_SENTENCES, SENTENCES)
    return Judge(file)


def together(act: Callable[[S], T], inputs: Sequence[S]) -> list[T]:
    """Results for all inputs. One batch takes half of the time of as many streams."""
    with ThreadPoolExecutor(len(inputs)) as pool:
        return [*pool.map(act, inputs)]


def say(tts: TTS, i: int, layout: PromptLayout) -> Speech:
    """A sentence, by both voices in turns; in the streaming layout as live text, word by word."""
    style = ("clara", "henry")[i % 2], "english", None, layout, replace(tts.sampling, seed=i)
    if layout == "full":
        return tts.say(SENTENCES[i], *style)
    session = tts.open(*style)
    for word in SENTENCES[i].split(" "):
        session.push_text(f"{word} ")
    session.end()
    return collect(session, 16, 24_000)


def speak(tts: TTS) -> dict[PromptLayout, list[Speech]]:
    """The sentences in each layout."""
    numbers = range(len(SENTENCES))
    speeches = together(lambda job: say(tts, *job), [*product(numbers, LAYOUTS)])
    return {layout: speeches[i :: len(LAYOUTS)] for i, layout in enumerate(LAYOUTS)}


@pytest.fixture(scope="module")
def speeches(demo: TTS) -> dict[PromptLayout, list[Speech]]:
    """The sentences in each layout, spoken in one batch."""
    return speak(demo)


def error_rate(judge: Judge, recordings: list[NDArray[np.int16]]) -> float:
    rate, transcripts = judge.error_rate(recordings, 24_000, SENTENCES)
    print(transcripts)  # shown if the test fails
    return rate


@pytest.mark.parametrize("layout", LAYOUTS)
def test_speech_is_recognised(
    speeches: dict[PromptLayout, list[Speech]], judge: Judge, layout: PromptLayout
) -> None:
    assert all(speech.finish == "eos" for speech in speeches[layout])
    assert error_rate(judge, [speech.pcm for speech in speeches[layout]]) <= MAX_ERROR_RATE


def test_every_speaker_ends_its_speech(demo: TTS) -> None:
    texts = {
        "english": "Your package will arrive on Thursday afternoon.",
        "spanish": "Su paquete llegará el jueves por la tarde.",
    }
    languages = {"clara": "english", "henry": "english", "olivia": "english", "lucia": "spanish"}
    assert set(demo.voices) == languages.keys()

    def speak(voice: str) -> Speech:
        sampling = replace(demo.sampling, seed=1)
        return demo.say(texts[languages[voice]], voice, languages[voice], sampling=sampling)

    for voice, speech in zip(languages, together(speak, [*languages]), strict=True):
        assert speech.finish == "eos" and 1.5 < speech.seconds < 4, voice


def test_speech_at_another_speed_is_recognised(
    speeches: dict[PromptLayout, list[Speech]], judge: Judge
) -> None:
    recordings: list[NDArray[np.int16]] = []
    for i, speech in enumerate(speeches["full"]):
        scaler = TimeScaler((0.75, 1.5)[i // 2 % 2], speech.sample_rate)
        recordings.append(np.concatenate([scaler.push(speech.pcm), scaler.end()]))
    assert error_rate(judge, recordings) <= MAX_ERROR_RATE


def test_words_that_are_spoken_in_another_way_have_the_times_of_what_is_spoken(demo: TTS) -> None:
    """They are timed as the same text without markup, and have their written form."""
    sampling = replace(demo.sampling, seed=2)
    plain = demo.say("A gee pee you, and room A 4.", sampling=sampling)
    marked = demo.say(
        'A GPU, <emotion value="calm"/>and room <spell>a4</spell>.',
        sampling=sampling,
        pronunciations={"gpu": "gee pee you"},
    )
    np.testing.assert_array_equal(marked.pcm, plain.pcm)
    texts = ["A", "GPU,", "and", "room", "a4."]
    assert [word.text for word in marked.words] == texts
    starts = [word.start for word in plain.words]
    assert [word.start for word in marked.words] == starts[:2] + starts[4:7]
    assert demo.aligned and not any(word.estimated for word in marked.words)


def live(tts: TTS, *phrases: str) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Codes [frames, groups] and samples of text that is flushed after each phrase."""
    with tts.open("clara", sampling=replace(tts.sampling, seed=3)) as session:
        for phrase in phrases:
            session.push_text(phrase)
            session.flush()
        session.end()
        chunks = [event for event in session if isinstance(event, AudioChunk)]
    codes, pcm = [chunk.codes for chunk in chunks], [chunk.pcm for chunk in chunks]
    return np.concatenate(codes), np.concatenate(pcm)


def test_flushed_text_ends_in_silence_and_is_not_cut(demo: TTS) -> None:
    first, second = "Let me check that for you.", " The library closes early on Sunday."
    both = together(lambda phrases: live(demo, *phrases), [(first, second), (first,)])
    (whole_codes, whole), (solo_codes, solo) = both
    seam = len(solo)
    assert np.array_equal(whole_codes[: len(solo_codes)], solo_codes)
    # Sizes of chunks follow the speed; in plain torch they may change a sample by one step.
    np.testing.assert_allclose(whole[:seam], solo, atol=1, rtol=0)
    assert 1.2 < seam / 24_000 < 2.4 and len(whole) - seam > seam
    assert not audible(whole[seam - 480 : seam + 48]).any(), "a click"


def test_noise_is_not_recognised(judge: Judge) -> None:
    noise = np.random.default_rng(0).normal(0, 3000, (len(SENTENCES), 48_000)).astype(np.int16)
    assert error_rate(judge, list(noise)) > 0.8


def test_checkpoint_is_small_and_has_a_model_card() -> None:
    folder = find_checkpoint("demo")
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 32_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("Kokoro-82M", "NOTICE", "word error rate", "Limits"):
        assert word in card


def test_sentences_are_held_out_from_training() -> None:
    assert set(SENTENCES) <= {text for _, text in held_out()}


def word_errors(speeches: list[Speech]) -> list[float]:
    """Distances in seconds between word starts and those of a forced alignment."""
    errors: list[float] = []
    for sentence, speech in zip(SENTENCES, speeches, strict=True):
        words = sentence.lower().rstrip(".?").split()
        truth = aligned(words, speech.pcm, speech.sample_rate)
        assert [word.text for word in speech.words] == sentence.split()
        assert not any(word.estimated for word in speech.words)
        if truth is not None:
            errors += np.abs(np.subtract([w.start for w in speech.words], truth)).tolist()
    print(errors)  # shown if the test fails
    return errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_word_times_agree_with_forced_alignment(
    speeches: dict[PromptLayout, list[Speech]], layout: PromptLayout
) -> None:
    errors = word_errors(speeches[layout])
    assert len(errors) >= 30
    assert np.mean(errors) <= 0.08 and np.percentile(errors, 95) <= 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_word_times_of_the_kernel_agree_with_forced_alignment(layout: PromptLayout) -> None:
    with TTS.load("demo", device="cuda", slots=2) as tts:
        errors = word_errors(speak(tts)[layout])
    assert len(errors) >= 30
    assert np.mean(errors) <= 0.08 and np.percentile(errors, 95) <= 0.2


@pytest.mark.gpu
def test_loading_on_a_gpu_does_not_import_the_compiler_of_torch() -> None:
    """Its import takes as long as the rest of the load; operators on meta tensors cause it."""
    program = """
import sys
from megakernel_tts import TTS
with TTS.load("demo", device="cuda") as tts:
    tts.say("hi")
print("torch._dynamo" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout == "False\n", process.stderr
