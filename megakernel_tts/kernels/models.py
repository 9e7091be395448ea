"""Shapes of known models, to build and check their kernels without a checkpoint."""

from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.decode import StackShape, program_of_shapes
from megakernel_tts.kernels.program import Program
from megakernel_tts.kernels.wide import WIDTHS

_RELEASED_PREDICTOR = StackShape(1024, 16, 8, 3072)
_RELEASED = (  # the 0.6B and the 1.7B
    (StackShape(1024, 16, 8, 3072), _RELEASED_PREDICTOR, 2048),
    (StackShape(2048, 16, 8, 6144), _RELEASED_PREDICTOR, 2048),
)
_DEMO = StackShape(256, 4, 2, 576), StackShape(256, 2, 1, 512), 256


def released_programs() -> list[Program]:
    """The decode kernels of the released sizes."""
    return [program_of_shapes(*shapes) for shapes in _RELEASED]


def all_programs() -> list[Program]:
    """All kernels: decode kernels of the released sizes and of the demo voice, codec, alignment."""
    wide = [
        program_of_shapes(*shapes, num_streams=width)
        for shapes in (*_RELEASED, _DEMO)
        for width in WIDTHS
    ]
    narrow = [*released_programs(), program_of_shapes(*_DEMO)]
    return [*narrow, *wide, codec_program(), align_program()]
