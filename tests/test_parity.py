"""Compares every stage with recordings of the official package (`goldens/make.py`)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.random_checkpoint import Size
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import Prompt
from megakernel_tts.voice import Voice
from tests.goldens.cases import (
    CHECKPOINTS,
    FRAMES,
    LONG_REFERENCE,
    REFERENCE_TEXT,
    Case,
    Model,
    cases,
    codec_codes,
    reference_audio,
    tokenizer_texts,
)
from tests.rig import one_frame

WAVE_STEP, LOGIT_STEP = 61, 17
MODELS: tuple[Model, ...] = (*CHECKPOINTS, "demo")
CODES = {size: codes for size, (_, codes) in CHECKPOINTS.items()} | {"demo": 256}

pairs = pytest.mark.parametrize(
    ("size", "case"),
    [pytest.param(size, case, id=f"{size}-{case.name}") for size in MODELS for case in cases(size)],
)
sizes = pytest.mark.parametrize("size", CHECKPOINTS)


@cache
def golden(size: Model) -> dict[str, NDArray[Any]]:
    with np.load(Path(__file__).parent / "goldens" / f"official-{size}.npz") as file:
        return dict(file)


def expected(size: Model, case: Case, key: str) -> NDArray[Any]:
    return golden(size)[f"{case.name}/{key}"]


def voice_of(size: Model, case: Case) -> str | Voice | None:
    if case.reference is None:
        return case.speaker
    x_vector = torch.from_numpy(golden(size)["reference/x_vector"])
    if case.reference == "x-vector":
        return Voice(x_vector)
    codes = torch.from_numpy(golden(size)["reference/codes"].astype(np.int64))
    return Voice(x_vector, codes, REFERENCE_TEXT)


def build(loaded: LoadedModel, size: Model, case: Case) -> tuple[Prompt, torch.Tensor]:
    """The prompt, and the text vectors that follow it."""
    prompt_builder = loaded.engine.prompt_builder
    prefix = prompt_builder.prefix(voice_of(size, case), case.language, case.instruct)
    ids = loaded.tokenizer.encode(case.text)
    prompt = prompt_builder.build(prefix, ids, case.layout, text_ended=True)
    assert prompt is not None
    if prompt.text_complete:
        return prompt, prompt_builder.pad
    with torch.inference_mode():
        rest = [
            prompt.leading_text,
            prompt_builder.embed_text(ids[prompt.num_tokens :]),
            prompt_builder.eos,
        ]
        return prompt, torch.cat(rest)


@pairs
def test_prompts_equal_the_official_ones(
    size: Model, case: Case, load: Callable[..., LoadedModel]
) -> None:
    loaded = load(case.kind, size, CODES[size])
    prompt, trailing = build(loaded, size, case)
    np.testing.assert_allclose(prompt.prefill, expected(size, case, "prefill"), rtol=0, atol=1e-5)
    np.testing.assert_allclose(trailing, expected(size, case, "trailing"), rtol=0, atol=1e-5)


@pairs
def test_greedy_codes_hidden_states_and_logits_equal_the_official_ones(
    size: Model, case: Case, load: Callable[..., LoadedModel]
) -> None:
    """The codes are identical, so that every later stage is compared on the same history."""
    loaded = load(case.kind, size, CODES[size])
    seen: dict[str, list[torch.Tensor]] = {"hidden": [], "logits": [], "predictor": []}
    prompt_builder = loaded.engine.prompt_builder
    backend = loaded.engine.backend
    assert isinstance(backend, Reference)
    prompt, trailing = build(loaded, size, case)
    reference = Reference(
        backend.model,
        loaded.config,
        prompt_builder.pad[0],
        num_slots=3,
        max_positions=256,
        trace=lambda phase, tensor: seen[phase].append(tensor[0]),
    )
    reference.prefill(
        [PrefillRequest(1, prompt.prefill, Sampling.greedy(seed=0), 0, prompt.num_common)]
    )
    reference.feed(1, trailing, True)
    frames = [one_frame(reference, [1])[0] for _ in range(FRAMES)]
    codes = torch.stack([frame for frame in frames if frame is not None]).numpy()
    np.testing.assert_array_equal(codes, expected(size, case, "codes"))
    hidden = torch.stack(seen["hidden"])[::5, 0]
    np.testing.assert_allclose(hidden, expected(size, case, "hidden"), rtol=0, atol=1e-4)
    logits = torch.stack(seen["logits"])[::5, ::LOGIT_STEP]
    np.testing.assert_allclose(logits, expected(size, case, "logits"), rtol=0, atol=1e-4)
    predictor = torch.stack(seen["predictor"]).unflatten(0, (FRAMES, 15))
    thinned = predictor[::7, :, :: 3 * LOGIT_STEP]
    np.testing.assert_allclose(thinned, expected(size, case, "predictor"), rtol=0, atol=1e-4)


@pairs
def test_waveforms_equal_the_official_ones(
    size: Model, case: Case, load: Callable[..., LoadedModel]
) -> None:
    loaded = load(case.kind, size, CODES[size])
    decoder = loaded.engine.decoder
    codes = torch.from_numpy(expected(size, case, "codes").astype(np.int64))
    state = decoder.start()
    voice = voice_of(size, case)
    if isinstance(voice, Voice) and voice.codes is not None:
        _, state = decoder.decode(torch.from_numpy(voice.codes)[None], state)
    wave, _ = decoder.decode(codes[None], state)
    assert wave.shape[1] == expected(size, case, "samples")
    reference = expected(size, case, "wave")
    np.testing.assert_allclose(
        wave[0, ::WAVE_STEP], reference, rtol=0, atol=1e-4 * np.abs(reference).max()
    )


@sizes
def test_codec_equals_the_official_one(size: Size, load: Callable[..., LoadedModel]) -> None:
    """The official chunked decode is exact for its first 300 frames only."""
    decoder = load("custom_voice", size, CHECKPOINTS[size][1]).engine.decoder
    codes = torch.from_numpy(codec_codes(CHECKPOINTS[size][1]))
    wave = decoder.decode(codes[None], decoder.start())[0][0, :: 3 * WAVE_STEP].numpy()
    full, chunked = golden(size)["codec/full"], golden(size)["codec/chunked"]
    tolerance = 1e-4 * np.abs(full).max()
    np.testing.assert_allclose(wave, full, rtol=0, atol=tolerance)
    exact = 300 * decoder.samples_per_frame // (3 * WAVE_STEP)
    np.testing.assert_allclose(wave[:exact], chunked[:exact], rtol=0, atol=tolerance)


@sizes
def test_token_ids_equal_the_official_ones(size: Size, load: Callable[..., LoadedModel]) -> None:
    tokenizer = load("custom_voice", size, CHECKPOINTS[size][1]).tokenizer
    for i, text in enumerate(tokenizer_texts()):
        assert tokenizer.encode(text.strip()) == golden(size)[f"ids/{i}"].tolist(), text


@sizes
def test_encoders_match_the_official_ones(size: Size, load: Callable[..., LoadedModel]) -> None:
    cloner = load("base", size, CHECKPOINTS[size][1]).cloner
    assert cloner is not None
    audio = torch.from_numpy(reference_audio())
    codes = cloner.encoder.encode(audio).numpy()
    assert codes.shape == golden(size)["reference/codes"].shape
    assert (codes == golden(size)["reference/codes"]).mean() >= 0.99
    long = cloner.encoder.encode(torch.from_numpy(reference_audio(LONG_REFERENCE))).numpy()
    assert (long == golden(size)["reference/long"]).mean() >= 0.99
    ours = cloner.speaker.embed(audio).numpy()
    theirs = golden(size)["reference/x_vector"]
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert cosine >= 0.9999
