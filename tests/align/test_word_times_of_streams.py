"""Words on their way through the engine, from attention that a test plants."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel_tts import AudioChunk, Finish, Session, Word
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.align.words import Transcript
from megakernel_tts.loader import Loaded
from megakernel_tts.text.splitter import SplitLimits
from tests.align.planted import FRAME, PACE, RATE, LoudDecoder, PlantedBackend
from tests.align.texts import words_of
from tests.fakes import ScriptedBackend
from tests.rig import TEXT, Rig, codes, drain

Make = Callable[..., Rig]
SECONDS = FRAME / RATE


@pytest.fixture
def make(load: Callable[..., Loaded]) -> Iterator[Make]:
    rigs: list[Rig] = []

    def one(lookahead: int | None = 0, backend: ScriptedBackend | None = None) -> Rig:
        """A rig whose words are aligned, or estimated without a look-ahead."""
        alignment = None if lookahead is None else Alignment(((0, 0),), 1e-4, lookahead, {})
        backend = backend or PlantedBackend()
        rigs.append(Rig(load(), backend, decoder=LoudDecoder(), alignment=alignment))
        return rigs[-1]

    yield one
    for rig in rigs:
        rig.backend.gate.set()
        rig.engine.close()


def told(chunks: list[AudioChunk]) -> list[Word]:
    return [word for chunk in chunks for word in chunk.words]


def planted(rig: Rig, text: str, before: float = 0.0) -> list[tuple[str, float]]:
    """The words of a piece, and when its frames look at their first tokens."""
    tokenizer = rig.loaded.tokenizer
    script = Transcript(tokenizer.token_bytes)
    ids = tokenizer.encode(text)
    script.update(ids, len(ids))
    sounding = [u for u, silent in enumerate(script.unit_silent) if not silent]
    first = [next(u for u in sounding if script.unit_words[u] == w) for w in range(len(script))]
    starts = [round(before + PACE * script.unit_starts[unit] * SECONDS, 3) for unit in first]
    return list(zip(words_of(script), starts, strict=True))


def timed(words: list[Word]) -> list[tuple[str, float]]:
    return [(word.text, round(word.start, 3)) for word in words]


@pytest.mark.parametrize("lookahead", [0, 2, 4])
@pytest.mark.parametrize("policy", [(1, 8), (1, 1), (4, 4), (8, 8)])
def test_words_come_with_the_audio_in_which_they_begin(
    make: Make, lookahead: int, policy: tuple[int, int]
) -> None:
    rig = make(lookahead)
    chunks, finish = drain(rig.open(first=policy[0], largest=policy[1]))
    assert finish.reason == "eos"
    assert planted(rig, TEXT) == timed(told(chunks))
    for chunk in chunks:
        begin, end = chunk.frame * SECONDS, (chunk.frame + len(chunk.codes)) * SECONDS
        assert all(begin <= word.start + 1e-3 < end + 1e-3 for word in chunk.words)
    plain, _ = drain(make(None, ScriptedBackend(tail=3)).open())
    assert np.array_equal(codes(chunks)[: len(codes(plain))], codes(plain))


def test_the_first_chunk_waits_for_nothing(make: Make) -> None:
    rig = make(4)
    session = rig.open(first=1, largest=4, ahead=9)
    chunks, _ = drain(session)
    assert rig.backend.step_lengths[:2] == [1, 2 + 4], (
        "the second one waits for what comes after it"
    )
    assert [len(chunk.codes) for chunk in chunks[:4]] == [1, 2, 4, 4]
    assert chunks[-1].frame + len(chunks[-1].codes) == sum(len(c.codes) for c in chunks)


class Glancing(PlantedBackend):
    """For one frame it looks at the next word, long before it says it."""

    def _scores(self, slot: int, first: int, count: int) -> Tensor:
        scores = super()._scores(slot, first, count)
        if first <= 1 < first + count:
            start = self._starts[slot]
            scores[1 - first, :, start : start + 2] = torch.tensor([-1.0, 1.0])
        return scores


@pytest.mark.parametrize(("lookahead", "right"), [(0, False), (2, True)])
def test_frames_that_come_after_a_word_tell_whether_it_has_begun(
    make: Make, lookahead: int, right: bool
) -> None:
    rig = make(lookahead, Glancing())
    chunks, _ = drain(rig.open("a b c", first=1, largest=1))
    assert (planted(rig, "a b c") == timed(told(chunks))) == right


def test_a_stream_that_may_run_no_further_ahead_goes_on(make: Make) -> None:
    """Look-ahead and chunk together are more than may be made before it is read."""
    chunks, finish = drain(make(4).open(first=1, largest=8, ahead=8))
    assert finish.reason == "eos" and told(chunks)


def test_live_text_is_aligned_as_text_that_is_known(make: Make) -> None:
    rig = make(2)
    session = rig.open(None)
    for char in TEXT:
        session.push_text(char)
    session.end()
    assert planted(rig, TEXT) == timed(told(drain(session)[0]))


def test_pieces_follow_each_other_on_one_clock(make: Make) -> None:
    rig = make(2)
    first, second = "This is the first sentence. ", "And this is the other one."
    chunks, _ = drain(rig.open(first + second, limits=SplitLimits(sentence=1)))
    length = PACE * len(rig.loaded.tokenizer.encode(first.strip())) * SECONDS
    expected = planted(rig, first.strip()) + planted(rig, second, before=length)
    assert expected == timed(told(chunks))


def test_words_of_a_try_that_ran_away_are_not_told(make: Make) -> None:
    rig = make(2)
    rig.backend.runaway = {1}
    chunks, finish = drain(rig.open("hello", seed=1, max_retries=1))
    assert finish.reason == "eos"
    assert planted(rig, "hello") == timed(told(chunks))


def test_words_that_were_not_reached_are_not_told(make: Make) -> None:
    chunks, finish = drain(make(2).open(max_frames=12))
    assert finish.reason == "length" and finish.frames == 12
    words = told(chunks)
    assert 0 < len(words) < len(TEXT.split())
    assert all(word.start < 12 * SECONDS for word in words)


def _read_until_starved(session: Session, frames: int) -> list[AudioChunk]:
    chunks: list[AudioChunk] = []
    for event in session:
        assert isinstance(event, AudioChunk)
        chunks.append(event)
        if event.frame + len(event.codes) == frames:
            return chunks
    raise AssertionError


class EndsAtOnce(PlantedBackend):
    """Its speech is over when its text is."""

    def _ends(self, stream: dict[str, int]) -> bool:
        return True


def test_words_that_are_left_when_no_frame_follows_still_come(make: Make) -> None:
    rig = make(2, EndsAtOnce())
    session = rig.open(None)
    session.push_text("hello to the world ")
    tokens = len(rig.loaded.tokenizer.encode("hello to the world"))
    chunks = _read_until_starved(session, tokens)
    session.end()
    *rest, finish = list(session)
    assert isinstance(finish, Finish) and finish.reason == "eos"
    chunks += [event for event in rest if isinstance(event, AudioChunk)]
    assert [word.text for word in told(chunks)] == ["hello", "to", "the", "world"]
    assert codes(chunks).shape == (tokens, 16)


def test_without_a_calibration_words_are_estimates(make: Make) -> None:
    chunks, _ = drain(make(None, ScriptedBackend(tail=60)).open())
    words = told(chunks)
    assert [word.text for word in words] == TEXT.split()
    assert all(word.estimated and word.end is None for word in words)


def test_aligned_words_are_no_estimates(make: Make) -> None:
    words = told(drain(make().open())[0])
    assert words and not any(word.estimated for word in words)
