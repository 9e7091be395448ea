"""Digests of codes are equal between runs, and differ where codes do."""

from bench.digest import digest_sessions
from megakernel_tts import TTS


def test_digests_are_equal_between_runs_and_differ_between_sessions(tts: TTS) -> None:
    found = digest_sessions(tts, max_frames=4)
    assert found == digest_sessions(tts, max_frames=4)
    assert len(found) == len(set(found.values())) == 12
