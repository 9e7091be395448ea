"""Audio of sessions, and their results."""

import numpy as np
from numpy.typing import NDArray

from megakernel_stt import Final, Session, Transcript

RATE = 16_000


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> NDArray[np.int16]:
    generator = np.random.default_rng(seed)
    level = np.repeat(generator.uniform(100, 8000, int(seconds * 20) + 1), rate // 20)
    count = int(seconds * rate)
    return (generator.standard_normal(count) * level[:count]).clip(-32768, 32767).astype(np.int16)


def ids(transcript: Transcript) -> list[int]:
    return [token.id for token in transcript.tokens]


def push_in_packets(session: Session, pcm: NDArray[np.int16], seed: int, rate: int = RATE) -> None:
    generator = np.random.default_rng(seed)
    while len(pcm):
        size = int(generator.integers(1, 4001))
        session.push(pcm[:size].tobytes() if seed % 2 else pcm[:size], rate)
        pcm = pcm[size:]


def last_final(session: Session) -> Transcript:
    session.end()
    *_, last = session
    assert isinstance(last, Final) and last.is_last
    return last.transcript
