import os
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel_tts import AudioChunk, Word
from megakernel_tts.server.cluster.audio_ring import (
    RING_BYTES,
    RingReader,
    RingWriter,
    create_memory,
    map_rings,
)

WORDS = (Word("hello", 0.5, None, False),)


@pytest.fixture
def mappings() -> Iterator[tuple[list[memoryview], list[memoryview]]]:
    """Two rings, as the two processes map them."""
    memory = create_memory(2)
    try:
        yield map_rings(memory), map_rings(memory)
    finally:
        os.close(memory)


def make_chunk(num_frames: int, num_samples: int, frame: int = 0) -> AudioChunk:
    rng = np.random.default_rng([num_frames, num_samples, frame])
    codes = rng.integers(-(1 << 62), 1 << 62, (num_frames, 16))
    pcm = rng.integers(-32768, 32767, num_samples, np.int16)
    return AudioChunk(pcm, 24_000, codes, frame, segment=frame % 7)


def assert_equal(read: AudioChunk, written: AudioChunk) -> None:
    assert (read.frame, read.segment, read.words) == (written.frame, written.segment, WORDS)
    assert read.sample_rate == written.sample_rate
    for ours, theirs in ((read.pcm, written.pcm), (read.codes, written.codes)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


# Chunks with frames, pauses without frames, and chunks of a speed other than 1.
SHAPES = st.one_of(
    st.integers(0, 12).map(lambda frames: (frames, 1920 * frames)),
    st.tuples(st.integers(0, 12), st.integers(0, 25_000)),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(st.one_of(SHAPES, st.just("read")), max_size=60))
def test_chunks_are_read_as_they_were_written_wherever_the_ring_wraps(
    mappings: tuple[list[memoryview], list[memoryview]], steps: list[tuple[int, int] | str]
) -> None:
    writer, reader = RingWriter(mappings[0][1]), RingReader(mappings[1][1])
    unread: deque[AudioChunk] = deque()

    def read() -> None:
        assert_equal(reader.read(WORDS), unread.popleft())
        writer.release(reader.position)

    for i, step in enumerate(steps):
        if isinstance(step, tuple):
            chunk = make_chunk(*step, frame=i)
            try:
                writer.write(chunk)
            except ValueError:
                assert unread, "an empty ring has space for every chunk"
                while unread:
                    read()
                writer.write(chunk)
            unread.append(chunk)
        elif unread:
            read()
    while unread:
        read()
    assert writer.num_unread == 0


def test_a_full_ring_refuses_a_chunk_and_keeps_what_it_holds(
    mappings: tuple[list[memoryview], list[memoryview]],
) -> None:
    writer, reader = RingWriter(mappings[0][0]), RingReader(mappings[1][0])
    chunks = [make_chunk(8, 8 * 1920, i) for i in range(4)]
    for chunk in chunks:
        writer.write(chunk)
    with pytest.raises(ValueError, match=r"8 frames takes 31,\d+ bytes, and .* has 3,952 left"):
        writer.write(make_chunk(8, 8 * 1920))
    for chunk in chunks:
        assert_equal(reader.read(WORDS), chunk)


def test_rings_are_apart(mappings: tuple[list[memoryview], list[memoryview]]) -> None:
    ours, theirs = mappings
    writers = [RingWriter(ring) for ring in ours]
    readers = [RingReader(ring) for ring in theirs]
    for turn in range(20):
        chunks = [make_chunk(7, 7 * 1920, frame) for frame in (turn, 1000 + turn)]
        for writer, chunk in zip(writers, chunks, strict=True):
            writer.write(chunk)
        for writer, reader, chunk in zip(writers, readers, chunks, strict=True):
            assert_equal(reader.read(WORDS), chunk)
            writer.release(reader.position)


def test_memory_without_a_record_is_refused(
    mappings: tuple[list[memoryview], list[memoryview]],
) -> None:
    writer, reader = RingWriter(mappings[0][0]), RingReader(mappings[1][0])
    writer.write(make_chunk(1, 1920))
    reader.read(WORDS)
    with pytest.raises(ValueError, match="holds no record"):
        reader.read(WORDS)
    mappings[0][0][:] = b"\xff" * RING_BYTES
    with pytest.raises(ValueError, match="holds no record"):
        RingReader(mappings[1][0]).read(WORDS)


def test_what_was_read_is_a_copy(mappings: tuple[list[memoryview], list[memoryview]]) -> None:
    writer, reader = RingWriter(mappings[0][0]), RingReader(mappings[1][0])
    first = make_chunk(12, 12 * 1920)
    writer.write(first)
    read = reader.read(WORDS)
    mappings[0][0][:] = bytes(RING_BYTES)
    assert_equal(read, first)
    read.pcm[:] = 0  # a program may process the samples in place
