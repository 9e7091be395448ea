"""The plain-torch networks and the codec on a GPU give the CPU's results."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megakernel_common.checkpoint import TensorSpec, map_leaves
from megakernel_common.layers import linear
from megakernel_tts import TTS, Sampling, Voice
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.backends.sampling import gumbel_noise
from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.random_checkpoint import Size
from megakernel_tts.model.random_released import write_released_config
from megakernel_tts.model.weights import model_specs
from tests.goldens.cases import CHECKPOINTS, FRAMES, Case, cases, codec_codes, reference_audio
from tests.rig import one_frame
from tests.test_parity import build, expected, golden

pytestmark = pytest.mark.gpu

TEXT = "Hello to the world, this is speech."


@pytest.fixture(scope="module")
def on_gpu(checkpoint: Callable[..., Path]):
    made: dict[tuple[object, ...], LoadedModel] = {}

    def make(
        kind: str, size: Size, codes: int = 256, dtype: torch.dtype = torch.float32
    ) -> LoadedModel:
        key = (kind, size, codes, dtype)
        if key not in made:
            made[key] = load_checkpoint(
                checkpoint(kind, size, codes), torch.device("cuda"), dtype, 4
            )
        return made[key]

    yield make
    for one in made.values():
        one.engine.close()


@pytest.mark.parametrize(
    ("size", "case"),
    [pytest.param(s, c, id=f"{s}-{c.name}") for s in CHECKPOINTS for c in cases(s)],
)
def test_greedy_codes_equal_the_official_ones(
    size: Size, case: Case, on_gpu: Callable[..., LoadedModel]
) -> None:
    loaded = on_gpu(case.kind, size, CHECKPOINTS[size][1])
    prompt, trailing = build(loaded, size, case)
    np.testing.assert_allclose(prompt.prefill, expected(size, case, "prefill"), rtol=0, atol=1e-5)
    backend = loaded.engine.backend
    backend.prefill(
        [PrefillRequest(0, prompt.prefill, Sampling.greedy(seed=0), 0, prompt.num_common)]
    )
    backend.feed(0, trailing, True)
    made = [one_frame(backend, [0])[0] for _ in range(FRAMES)]
    backend.release(0)
    codes = torch.stack([frame for frame in made if frame is not None]).numpy()
    np.testing.assert_array_equal(codes, expected(size, case, "codes"))


@pytest.mark.parametrize("size", CHECKPOINTS)
def test_codec_and_encoders_equal_the_official_ones(
    size: Size, on_gpu: Callable[..., LoadedModel]
) -> None:
    """In full float32: with cuDNN's TF32 the waveform would be off by 1e-3 of its peak."""
    loaded = on_gpu("base", size, CHECKPOINTS[size][1])
    decoder, cloner = loaded.engine.decoder, loaded.cloner
    assert cloner is not None
    custom = on_gpu("custom_voice", size, CHECKPOINTS[size][1]).engine.decoder
    codes = torch.from_numpy(codec_codes(CHECKPOINTS[size][1]))[None].cuda()
    wave = custom.decode(codes, custom.start())[0][0, :: 3 * 61].cpu().numpy()
    full = golden(size)["codec/full"]
    np.testing.assert_allclose(wave, full, rtol=0, atol=1e-4 * np.abs(full).max())
    assert decoder.sample_rate == 24_000
    audio = torch.from_numpy(reference_audio())
    encoded = cloner.encoder.encode(audio).cpu().numpy()
    assert (encoded == golden(size)["reference/codes"]).mean() >= 0.99
    x_vector = cloner.speaker.embed(audio).cpu()
    theirs = torch.from_numpy(golden(size)["reference/x_vector"])
    assert torch.cosine_similarity(x_vector, theirs, dim=0) >= 0.9999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("into", "out"),
    [
        (1024, 1024), (1024, 2048), (1024, 3072), (2048, 1024), (2048, 2048), (2048, 3072),
        (2048, 6144), (3072, 1024), (6144, 2048),
    ],
)  # fmt: skip
def test_other_rows_do_not_change_a_row(into: int, out: int, dtype: torch.dtype) -> None:
    """At every released width, for any number of other rows before and behind it."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(out, into, device="cuda", generator=generator).to(dtype) * 0.03
    x = torch.randn(19, 1, into, device="cuda", generator=generator).to(dtype)
    solo = torch.cat([linear(row[None], weight) for row in x])
    for count in range(1, 20):
        assert torch.equal(linear(x[:count], weight), solo[:count]), count
        assert torch.equal(linear(x[-count:].transpose(0, 1), weight)[0], solo[-count:, 0]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "hidden", "intermediate"), [("0b6", 1024, 3072), ("1b7", 2048, 6144)]
)
def test_batching_and_swapping_do_not_change_codes_of_a_released_size(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    size: str,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
) -> None:
    """Whole frames with random weights: solo, in a batch, and swapped out in between."""
    source = checkpoint("custom_voice", size) / "config.json"
    config = read_model_config(
        write_released_config(source, tmp_path / "config.json", hidden, intermediate)
    )
    generator = torch.Generator("cuda").manual_seed(0)

    def weight(spec: TensorSpec) -> torch.Tensor:
        noise = torch.randn(spec.shape, device="cuda", generator=generator)
        return (1.0 + 0.1 * noise if len(spec.shape) == 1 else 0.03 * noise).to(dtype)

    model = map_leaves(model_specs(config), weight)
    pad = torch.randn(hidden, device="cuda", generator=generator).to(dtype)
    reference = Reference(model, config, pad, num_slots=4, max_positions=64)
    prompts = [
        torch.randn(9 + i, hidden, device="cuda", generator=generator).to(dtype).cpu()
        for i in range(4)
    ]
    samplings = [
        Sampling(seed=1),
        Sampling.greedy(seed=2),
        Sampling(seed=3, top_p=0.9),
        Sampling(seed=4),
    ]

    def begin(slot: int, stream: int) -> None:
        reference.prefill([PrefillRequest(slot, prompts[stream], samplings[stream])])
        reference.feed(slot, prompts[stream][:0], True)

    def codes(rows: list[torch.Tensor | None]) -> list[list[int] | None]:
        return [None if row is None else row.tolist() for row in rows]

    solo: list[list[list[int] | None]] = []
    for stream in range(4):
        begin(stream, stream)
        solo.append([codes(one_frame(reference, [stream]))[0] for _ in range(6)])
        reference.release(stream)
    for stream in range(4):
        begin(stream, stream)
    together = [codes(one_frame(reference, [0, 1, 2, 3])) for _ in range(3)]
    away = [reference.swap_out(slot) for slot in range(4)]
    for slot, suspended in enumerate(reversed(away)):
        reference.swap_in(slot, suspended)
    together += [codes(one_frame(reference, [3, 2, 1, 0])) for _ in range(3)]
    assert [list(stream) for stream in zip(*together, strict=True)] == solo


def test_random_numbers_equal_the_cpus() -> None:
    arguments = ([1, 2**40 + 3], [0, 99], 16, 300)
    cpu = gumbel_noise(*arguments, torch.device("cpu"))
    gpu = gumbel_noise(*arguments, torch.device("cuda")).cpu()
    torch.testing.assert_close(gpu, cpu, rtol=1e-6, atol=1e-6)  # the bits agree; logarithms round


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_concurrent_streams_do_not_change_codes(
    checkpoint: Callable[..., Path], dtype: str
) -> None:
    with TTS.load(checkpoint("custom_voice", "1b7"), device="cuda", dtype=dtype, slots=4) as tts:
        tts.warmup()
        samplings = [Sampling(seed=i, max_frames=20) for i in range(4)]
        solo = [tts.say(TEXT, sampling=s).codes for s in samplings]
        sessions = [tts.open("serena", sampling=s, layout="full") for s in samplings]
        for session in sessions:
            session.push_text(TEXT)
        for session in sessions:
            session.end()
        for session, codes in zip(sessions, solo, strict=True):
            *chunks, _ = list(session)
            together = np.concatenate([c.codes for c in chunks])  # type: ignore[union-attr]
            np.testing.assert_array_equal(together, codes)


def test_float32_speech_equals_the_cpus(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("base", "0b6")
    voice = Voice(torch.randn(128, generator=torch.Generator().manual_seed(0)))
    said = []
    for device in ("cpu", "cuda"):
        with TTS.load(folder, device=device, dtype="float32", slots=1) as tts:
            said.append(tts.say(TEXT, voice, sampling=Sampling(seed=3, max_frames=24)))
    np.testing.assert_array_equal(said[0].codes, said[1].codes)
    assert np.abs(said[0].pcm.astype(int) - said[1].pcm).max() <= 4


def test_the_kernel_is_the_default_on_a_gpu(checkpoint: Callable[..., Path]) -> None:
    with TTS.load(checkpoint(), slots=1) as tts:
        backend = tts._loaded.engine.backend
        assert isinstance(backend, Megakernel)
        assert len(tts.say(TEXT, sampling=Sampling(seed=0, max_frames=8)).codes) == 8
