"""Shapes of known models, to build and check their kernels without a checkpoint."""

from megakernel_common.kernels.program import Program
from megakernel_tts.kernels.align import align_program
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.decode import StackShape, program_of_shapes
from megakernel_tts.kernels.wide import all_widths

_RELEASED_PREDICTOR = StackShape(1024, 16, 8, 3072)
_RELEASED = {
    "0.6B": (StackShape(1024, 16, 8, 3072), _RELEASED_PREDICTOR, 2048),
    "1.7B": (StackShape(2048, 16, 8, 6144), _RELEASED_PREDICTOR, 2048),
}
_DEFAULT_WIDTH = 8  # of the wide kernel that the default number of slots needs
_SIZES = {**_RELEASED, "demo": (StackShape(256, 4, 2, 512), StackShape(256, 2, 1, 512), 256)}


def released_programs() -> list[Program]:
    """The decode kernels of the released sizes for up to eight streams, the default."""
    return [
        program_of_shapes(*shapes, num_streams=width)
        for shapes in _RELEASED.values()
        for width in (0, _DEFAULT_WIDTH)
    ]


def all_programs() -> list[Program]:
    """All kernels: decode kernels of the released sizes and of the demo voice, codec, alignment."""
    decode = [program for size in _SIZES for program in _decode_programs(size)]
    return [*decode, codec_program(), align_program()]


def _decode_programs(size: str) -> list[Program]:
    """The decode kernels of a size: those for few streams, and the wide ones of every width."""
    shapes = _SIZES[size]
    return [program_of_shapes(*shapes, num_streams=width) for width in (0, *all_widths())]
