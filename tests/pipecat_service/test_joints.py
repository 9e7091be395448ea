"""Where a phrase is divided between two segments, speech has no click, cut or long silence."""

import asyncio

import numpy as np

from megakernel_tts import TTS, AudioChunk, Sampling
from megakernel_tts.audio import AUDIBLE
from pipecat_service.speech import OutputChunk, Speech

RATE = 24_000
CASES = (1, RATE), (2, RATE), (3, RATE), (3, 8_000)  # seeds and rates
FIRST, SECOND = "I have turned off the lights in the living", "room and locked the front door."


async def speak(demo: TTS, seed: int, rate: int) -> tuple[list[OutputChunk], int]:
    """The speech of both parts, and the samples of the first one."""
    session = demo.open(sampling=Sampling(seed=seed))
    speech = Speech(session, rate)
    speech.push_text(FIRST)
    speech.flush(within_phrase=True)
    speech.push_text(SECOND)
    speech.end_text()
    outputs, num_first = list[OutputChunk](), 0
    async for event in session:
        if isinstance(event, AudioChunk):
            outputs.append(speech.process(event))
            num_first += len(outputs[-1].pcm) * (event.segment == 0)
    assert session.finish is not None and session.finish.reason == "eos"
    return [*outputs, speech.end()], num_first


def test_a_phrase_of_the_demo_voice_continues_after_a_flush(demo: TTS) -> None:
    """All cases in one batch, which parallel workers would each speak."""

    async def speak_all() -> list[tuple[list[OutputChunk], int]]:
        return await asyncio.gather(*(speak(demo, *case) for case in CASES))

    speeches = dict(zip(CASES, asyncio.run(speak_all()), strict=True))
    for seed, rate in CASES:
        outputs, joint = speeches[seed, RATE]
        if rate != RATE:  # the resampler delays its output: the joint is not where a chunk ends
            outputs, joint = speeches[seed, rate][0], joint * rate // RATE
        assert_continues(outputs, joint, rate)


def assert_continues(outputs: list[OutputChunk], joint: int, rate: int) -> None:
    """Checks speech whose second segment begins at the sample `joint`."""
    pcm = np.concatenate([output.pcm for output in outputs]).astype(int)
    words = [word for output in outputs for word in output.words]
    assert [word.text for word in words] == f"{FIRST} {SECOND}".split()

    steps = np.abs(np.diff(pcm))
    assert steps[joint - 2 : joint + 2].max() < np.quantile(steps, 0.5), "a click"
    loud = np.flatnonzero(np.abs(pcm) >= AUDIBLE)
    before, after = loud[loud < joint].max(), loud[loud >= joint].min()
    assert (after - before) / rate < 0.1, "a silence"
    assert before + 1 < after, "speech was cut"
    last = words[len(FIRST.split()) - 1]
    assert before / rate - last.start > 0.15, "the last word is short"
    assert -0.1 < after / rate - words[len(FIRST.split())].start < 0.25
