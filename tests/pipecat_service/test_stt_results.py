"""Which tokens are new: each is in one result, whatever the stream decodes again."""

import pytest

from megakernel_stt import Token, Transcript
from pipecat_service.stt_results import UnreportedTokens


def transcript(seconds: float, *tokens: tuple[int, float]) -> Transcript:
    """Tokens (id, frame); a frame is 80 ms."""
    made = (Token(i, f" {i}", 0.08 * frame, 0.08 * frame + 0.08, 1.0) for i, frame in tokens)
    return Transcript(tuple(made), seconds)


def new(unreported: UnreportedTokens, latest: Transcript) -> list[int]:
    return [token.id for token in unreported.new(latest).tokens]


def test_tokens_of_a_final_are_not_new() -> None:
    unreported = UnreportedTokens(0.0, gated=False)
    first = transcript(0.8, (1, 2), (2, 5))
    assert new(unreported, first) == [1, 2]
    unreported.report(first)
    assert new(unreported, first) == []
    assert new(unreported, transcript(1.6, (1, 2), (2, 5), (3, 12))) == [3]


def test_a_token_that_the_stream_decodes_again_is_not_new() -> None:
    """In or shortly after the audio of the final, by frame or because it repeats the final's."""
    unreported = UnreportedTokens(0.0, gated=False)
    unreported.settle(transcript(0.4, (1, 2)))
    unreported.report(transcript(0.8, (1, 2), (2, 9), (3, 9)))
    assert new(unreported, transcript(1.2, (1, 2), (7, 10))) == []  # frame 10 begins at 0.8 s
    assert new(unreported, transcript(1.2, (1, 2), (2, 11), (3, 12), (4, 13))) == [4]
    assert new(unreported, transcript(1.2, (1, 2), (2, 11), (4, 12))) == [4]
    assert new(unreported, transcript(2.4, (1, 2), (2, 20))) == [2], "spoken again"


def test_what_has_settled_is_not_compared_again() -> None:
    unreported = UnreportedTokens(0.0, gated=False)
    unreported.report(transcript(0.8, (1, 2), (2, 9)))
    latest = transcript(2.0, (1, 2), (2, 11), (2, 20))
    unreported.settle(latest)
    assert new(unreported, latest) == [2]
    unreported.report(latest)
    assert new(unreported, transcript(3.0, *((t.id, t.start / 0.08) for t in latest.tokens))) == []


def test_only_speech_that_a_detector_reports_is_new() -> None:
    unreported = UnreportedTokens(0.0, gated=True)
    noise = ((1, 10), (2, 40))
    assert new(unreported, transcript(4.0, *noise)) == []
    unreported.begin_speech(4.0)
    assert new(unreported, transcript(4.5, *noise, (3, 39), (4, 55))) == [2, 3, 4], (
        "a second before"
    )
    unreported.end_speech(5.0)
    late = transcript(7.0, *noise, (4, 55), (5, 70), (6, 80))
    assert new(unreported, late) == [2, 4, 5], "a second after"
    unreported.report(late)
    assert new(unreported, transcript(9.0, *noise, (4, 55), (5, 70), (6, 80), (7, 105))) == []


def test_speech_without_a_result_continues_if_it_has_just_ended() -> None:
    for resumed_s, expected in ((3.2, [1, 2]), (9.0, [2])):
        unreported = UnreportedTokens(0.0, gated=True)
        unreported.begin_speech(1.0)
        unreported.end_speech(3.0)
        unreported.begin_speech(resumed_s)
        frame = resumed_s / 0.08 + 1
        assert new(unreported, transcript(resumed_s + 1, (1, 20), (2, frame))) == expected


def test_times_are_those_of_the_audio_of_the_service() -> None:
    result = UnreportedTokens(10.0, gated=False).new(transcript(0.8, (1, 2)))
    assert result.tokens[0].start == pytest.approx(10.16)
    assert (result.words[0].end, result.seconds) == (pytest.approx(10.24), pytest.approx(10.8))
