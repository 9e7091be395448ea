"""Loads a checkpoint into an engine; all files are checked before a weight reaches the device."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.device_arbiter import device_arbiter
from megakernel_common.errors import CheckpointError
from megakernel_common.fields import read_json
from megakernel_common.threads import compute_threads
from megakernel_tts.align.alignment import ALIGNMENT_FILE, read_alignment
from megakernel_tts.backends.select import choose_backend, uses_kernels
from megakernel_tts.checks import MAX_POSITIONS
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.codec.speaker_encoder import SpeakerEncoder
from megakernel_tts.codec.vocoder import choose_vocoder
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.errors import SamplingError
from megakernel_tts.machine import system_memory
from megakernel_tts.model.config import (
    CodecConfig,
    ModelConfig,
    read_codec_config,
    read_model_config,
)
from megakernel_tts.model.weights import model_specs, speaker_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Cloner:
    """Networks that make a voice from a recording (Base checkpoints).

    Attributes:
        encoder: The codec's encoder.
        speaker: Computes the x-vector.
        sample_rate: Sampling rate of the recordings that both take, in Hz.
    """

    encoder: Encoder
    speaker: SpeakerEncoder
    sample_rate: int


@dataclass(frozen=True)
class LoadedModel:
    """A loaded checkpoint.

    Attributes:
        config: Contents of `config.json`.
        sampling: Default sampling parameters.
        tokenizer: The model's tokenizer.
        engine: The running engine.
        cloner: None if the model does not clone voices.
    """

    config: ModelConfig
    sampling: Sampling
    tokenizer: TextTokenizer
    engine: Engine
    cloner: Cloner | None


def load_checkpoint(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    cache_positions: int | None = None,
    prefill_positions: int | None = None,
) -> LoadedModel:
    """Loads a checkpoint and starts its engine.

    Args:
        folder: Folder in the released layout, with the codec in `speech_tokenizer/`.
        device: Device of all networks.
        dtype: Dtype of talker, predictor and speaker encoder; the codec is float32.
        num_slots: Number of streams that can speak at once.
        cache_positions: Positions of all streams together that the KV cache holds, as in
            `TTS.load`.
        prefill_positions: Positions of prompts between two frames, as in `TTS.load`.

    Raises:
        CheckpointError: A file is missing or does not fit the others.
        ValueError: Memory cannot hold the slots or the KV cache, or `prefill_positions` is less
            than 1.
    """
    policy = SchedulingPolicy()
    if prefill_positions is not None:
        policy = replace(policy, prefill_budget_positions=prefill_positions)
    codec_folder = folder / "speech_tokenizer"
    config = read_model_config(folder / "config.json")
    _check_slots(config, device, dtype, num_slots)
    codec_config = read_codec_config(codec_folder / "config.json")
    _check_match(folder, config, codec_config)
    sampling = _read_sampling(folder / "generation_config.json")
    tokenizer = TextTokenizer(folder, config.talker.text_vocab_size)
    checkpoint, codec = Checkpoint(folder), Checkpoint(codec_folder)
    specs, decoder = model_specs(config), decoder_specs(codec_config.decoder)
    encoder = encoder_specs(codec_config.encoder, config.talker.num_groups)
    speaker = speaker_specs(config.speaker) if config.speaker is not None else None
    checkpoint.verify((specs, speaker))
    codec.verify((decoder, encoder) if speaker is not None else decoder)

    # On the host: the backend moves the weights to the device in its own layout, one by one.
    model = checkpoint.load(specs, torch.device("cpu"), dtype)
    model = replace(model, embeddings=model.embeddings.on_device(device))
    prompt_builder = PromptBuilder(model.embeddings, config, tokenizer)
    cloner = None
    if speaker is not None and config.speaker is not None:
        cloner = Cloner(
            Encoder(codec.load(encoder, device, torch.float32), codec_config),
            SpeakerEncoder(checkpoint.load(speaker, device, dtype), config.speaker),
            codec_config.sample_rate,
        )
    stack = config.talker.stack
    alignment = read_alignment(folder / ALIGNMENT_FILE, stack.num_layers, stack.num_heads)
    weights = codec.load(decoder, device, torch.float32)
    plain = Decoder(weights, codec_config)
    kernels = uses_kernels(device, dtype)
    vocoder = choose_vocoder(plain, weights, codec_config, slots=num_slots, kernels=kernels)
    backend = choose_backend(  # the last to take memory: its KV cache may take all that is left
        model,
        config,
        prompt_builder.pad[0].to(device),
        num_slots=num_slots,
        max_positions=MAX_POSITIONS,
        cache_positions=cache_positions,
        captured_heads=() if alignment is None else alignment.heads,
    )
    engine = Engine(
        backend,
        prompt_builder,
        plain,
        vocoder,
        alignment,
        policy=policy,
        arbiter=device_arbiter(device),
        num_compute_threads=compute_threads((model.talker, model.predictor, weights), device),
    )
    return LoadedModel(config, sampling, tokenizer, engine, cloner)


def _check_slots(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, num_slots: int
) -> None:
    """Checks that the device can hold the slots, as far as the backend does not check it itself."""
    if num_slots < 1:
        raise ValueError(f"slots is {num_slots}; at least one stream must be able to speak.")
    if uses_kernels(device, dtype):
        return
    stack = config.talker.stack
    slot_bytes = (
        2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * MAX_POSITIONS * dtype.itemsize
    )
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = system_memory()
    if memory is not None and num_slots * slot_bytes > memory:
        raise ValueError(
            f"slots is {num_slots}; each takes {slot_bytes / (1 << 20):.0f} MiB, and {device} has "
            f"{memory / (1 << 30):.0f} GiB in all: {memory // slot_bytes} at most."
        )


def _check_match(folder: Path, config: ModelConfig, codec: CodecConfig) -> None:
    talker, predictor, decoder = config.talker, config.predictor, codec.decoder
    if decoder.num_groups != talker.num_groups:
        raise CheckpointError(
            f"{folder}: the codec has {decoder.num_groups} codes a frame, the talker "
            f"{talker.num_groups}."
        )
    if not decoder.codebook_size == predictor.vocab_size == talker.num_codes:
        raise CheckpointError(
            f"{folder}: the codec has {decoder.codebook_size} entries a codebook, the predictor "
            f"{predictor.vocab_size}, the talker {talker.num_codes} below its control ids; "
            "they must agree."
        )
    if config.speaker is not None and config.speaker.dim != talker.stack.hidden_size:
        raise CheckpointError(
            f"{folder}: x-vectors have {config.speaker.dim} values (enc_dim) and the talker takes "
            f"{talker.stack.hidden_size} (hidden_size)."
        )


def _read_sampling(file: Path) -> Sampling:
    """Reads the default sampling parameters; missing keys have the release's values."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: must be a JSON object.")
    names = {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "repetition_penalty": "repetition_penalty",
        "subtalker_temperature": "predictor_temperature",
        "subtalker_top_k": "predictor_top_k",
        "subtalker_top_p": "predictor_top_p",
        "max_new_tokens": "max_frames",
    }
    parameters = {
        ours: values[name] for name, ours in names.items() if values.get(name) is not None
    }
    for switch, ours in (
        ("do_sample", "temperature"),
        ("subtalker_dosample", "predictor_temperature"),
    ):
        if not isinstance(values.get(switch), bool | None):
            raise CheckpointError(f"{file}: {switch} is {values[switch]!r}; expected a boolean.")
        if values.get(switch) is False:
            parameters[ours] = 0.0
    try:
        return Sampling(**parameters)
    except SamplingError as error:
        raise CheckpointError(f"{file}: {error}") from error
