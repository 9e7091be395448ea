"""Shapes of known models, to build and check their kernels without a checkpoint."""

from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.decode import StackShape, program_of_shapes
from megakernel_tts.kernels.program import Program

_RELEASED_PREDICTOR = StackShape(1024, 16, 8, 3072)
_RELEASED = (  # the 0.6B and the 1.7B
    (StackShape(1024, 16, 8, 3072), _RELEASED_PREDICTOR, 2048),
    (StackShape(2048, 16, 8, 6144), _RELEASED_PREDICTOR, 2048),
)
_SMALL = (  # the demo voice, and the random checkpoints of the tests
    (StackShape(256, 4, 2, 576), StackShape(256, 2, 1, 512), 256),
    (StackShape(128, 4, 2, 384), StackShape(128, 4, 2, 384), 256),
    (StackShape(192, 4, 2, 576), StackShape(128, 4, 2, 384), 256),
)


def released_programs() -> list[Program]:
    """The decode kernels of the released sizes."""
    return [program_of_shapes(*shapes) for shapes in _RELEASED]


def all_programs() -> list[Program]:
    """All kernels, of every known model."""
    decode = [program_of_shapes(*shapes) for shapes in (*_RELEASED, *_SMALL)]
    return [*decode, codec_program(), align_program()]
