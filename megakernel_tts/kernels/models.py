"""Shapes of known models, to build and check their kernels without a checkpoint."""

from dataclasses import replace

from megakernel_common.kernels.program import ARCHITECTURES, Program
from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.decode import StackShape, program_of_shapes
from megakernel_tts.kernels.wide import compiled_widths

_RELEASED_PREDICTOR = StackShape(1024, 16, 8, 3072)
_RELEASED = (  # the 0.6B and the 1.7B
    (StackShape(1024, 16, 8, 3072), _RELEASED_PREDICTOR, 2048),
    (StackShape(2048, 16, 8, 6144), _RELEASED_PREDICTOR, 2048),
)
_DEMO = StackShape(256, 4, 2, 512), StackShape(256, 2, 1, 512), 256


def released_programs() -> list[Program]:
    """The decode kernels of the released sizes."""
    return [program_of_shapes(*shapes) for shapes in _RELEASED]


def all_programs() -> list[Program]:
    """All kernels: decode kernels of the released sizes and of the demo voice, codec, alignment.

    Of the wide kernels, each architecture has the widest one, which needs the most registers and
    shared memory.
    """
    narrow = [*released_programs(), program_of_shapes(*_DEMO)]
    widest: dict[int, tuple[str, ...]] = {}  # width -> architectures
    for architecture in ARCHITECTURES:
        width = compiled_widths(architecture)[-1]
        widest[width] = (*widest.get(width, ()), architecture)
    wide = [
        replace(program_of_shapes(*shapes, num_streams=width), architectures=architectures)
        for shapes in (*_RELEASED, _DEMO)
        for width, architectures in widest.items()
    ]
    return [*narrow, *wide, codec_program(), align_program()]
