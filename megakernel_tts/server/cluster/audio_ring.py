"""Audio from an engine process to the front: one ring of shared memory per stream.

The memory is an anonymous file that both processes inherit or hold open. It has no name, so nothing
is left when they end in any way. Neither end keeps state in it: the writer announces each record
with a message, and the reader replies with its position. A message orders the accesses.
"""

import mmap
import os
import struct

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import AudioChunk, Word

RING_BYTES = 128 << 10  # 32 frames at 24 kHz

# Position of the record, index of its first frame, its segment, frames, codes of a frame, samples,
# their rate.
_HEADER = struct.Struct("<QQIIIII")
_CODE, _SAMPLE = np.dtype("<i8"), np.dtype("<i2")


def create_memory(num_rings: int) -> int:
    """Creates the memory of some rings.

    Returns:
        A file descriptor, which the caller closes.
    """
    memory = os.memfd_create("megakernel-tts-audio")
    os.ftruncate(memory, num_rings * RING_BYTES)
    return memory


def map_rings(memory: int) -> list[memoryview]:
    """Maps memory of `create_memory`, as long as one of the views exists."""
    view = memoryview(mmap.mmap(memory, 0))
    return [view[start : start + RING_BYTES] for start in range(0, len(view), RING_BYTES)]


class RingWriter:
    """The writer's end of one stream's ring.

    Attributes:
        position: Bytes written so far.
    """

    def __init__(self, ring: memoryview) -> None:
        """Starts empty.

        Args:
            ring: Bytes, which no other writer uses.
        """
        self.position = 0
        self._released = 0
        self._ring = ring

    @property
    def num_unread(self) -> int:
        """Bytes that the reader has not released."""
        return self.position - self._released

    def write(self, chunk: AudioChunk) -> None:
        """Appends a chunk, except for its words.

        Raises:
            ValueError: It does not fit.
        """
        num_frames, num_groups = chunk.codes.shape
        sizes = num_frames, num_groups, len(chunk.pcm), chunk.sample_rate
        header = _HEADER.pack(self.position, chunk.frame, chunk.segment, *sizes)
        codes, pcm = chunk.codes.astype(_CODE, copy=False), chunk.pcm.astype(_SAMPLE, copy=False)
        parts = header, codes.tobytes(), pcm.tobytes()
        size = sum(map(len, parts))
        if size > len(self._ring) - self.num_unread:
            raise ValueError(
                f"A chunk of {num_frames} frames takes {size:,} bytes, and the ring of its "
                f"stream has {len(self._ring) - self.num_unread:,} left; use smaller chunks."
            )
        for part in parts:
            start = self.position % len(self._ring)
            head = min(len(part), len(self._ring) - start)
            self._ring[start : start + head] = part[:head]
            self._ring[: len(part) - head] = part[head:]
            self.position += len(part)

    def release(self, position: int) -> None:
        """Frees what lies before the reader's position."""
        self._released = position


class RingReader:
    """The reader's end of one stream's ring.

    Attributes:
        position: Bytes read so far, for `RingWriter.release`.
    """

    def __init__(self, ring: memoryview) -> None:
        """Starts at the writer's start.

        Args:
            ring: The writer's bytes.
        """
        self.position = 0
        self._ring = ring

    def read(self, words: tuple[Word, ...]) -> AudioChunk:
        """Takes the next chunk; the writer must have announced it.

        Args:
            words: Of the chunk.

        Raises:
            ValueError: The memory does not hold a record of the writer.
        """
        header = _HEADER.unpack(self._copy(_HEADER.size))
        position, frame, segment, num_frames, num_groups, num_samples, sample_rate = header
        num_codes = num_frames * num_groups
        num_bytes = 8 * num_codes + 2 * num_samples
        if position != self.position or _HEADER.size + num_bytes > len(self._ring):
            raise ValueError(f"The ring holds no record at {self.position}, but {header}.")
        self.position += _HEADER.size
        content = self._copy(num_bytes)
        self.position += num_bytes
        codes: NDArray[np.int64] = np.frombuffer(content, _CODE, num_codes)
        pcm: NDArray[np.int16] = np.frombuffer(content, _SAMPLE, num_samples, 8 * num_codes)
        codes = codes.reshape(num_frames, num_groups)
        return AudioChunk(pcm, sample_rate, codes, frame, words, segment)

    def _copy(self, size: int) -> bytearray:
        """Copies the next bytes, which the ring may divide into two parts."""
        start = self.position % len(self._ring)
        content = bytearray(self._ring[start : start + size])
        if len(content) < size:
            content += self._ring[: size - len(content)]
        return content
