"""A checkpoint's folder -> an engine: everything is checked before a weight reaches a device."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megakernel_tts.align.alignment import ALIGNMENT_FILE, read_alignment
from megakernel_tts.backends.select import choose_backend
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.codec.speaker_encoder import SpeakerEncoder
from megakernel_tts.codec.vocoder import choose_vocoder
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.errors import CheckpointError, SamplingError
from megakernel_tts.machine import system_memory
from megakernel_tts.model.checkpoint import Checkpoint
from megakernel_tts.model.config import (
    CodecConfig,
    ModelConfig,
    read_codec_config,
    read_model_config,
)
from megakernel_tts.model.fields import read_json
from megakernel_tts.model.weights import model_specs, speaker_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer

MAX_POSITIONS = 2048  # of a slot: prompt and frames, about 160 s of speech


@dataclass(frozen=True)
class Cloner:
    """What makes a voice from a recording (Base checkpoints)."""

    encoder: Encoder
    speaker: SpeakerEncoder
    sample_rate: int


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to speak."""

    config: ModelConfig
    sampling: Sampling
    tokenizer: TextTokenizer
    engine: Engine
    cloner: Cloner | None


def load_checkpoint(folder: Path, device: torch.device, dtype: torch.dtype, slots: int) -> Loaded:
    """Loads a checkpoint and starts its engine.

    Args:
        folder: In the released layout, the codec in `speech_tokenizer/`.
        device: Where everything runs.
        dtype: Of talker, predictor and speaker encoder; the codec's weights are float32.
        slots: Streams at a time.

    Raises:
        CheckpointError: Anything is missing or does not fit.
        ValueError: More slots than memory can hold.
    """
    codec_folder = folder / "speech_tokenizer"
    config = read_model_config(folder / "config.json")
    _check_slots(config, device, dtype, slots)
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

    # On the host: the backend takes weights to the device in its own layout, piece by piece.
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
    backend = choose_backend(
        model,
        config,
        prompt_builder.pad[0].to(device),
        num_slots=slots,
        max_positions=MAX_POSITIONS,
        captured_heads=() if alignment is None else alignment.heads,
    )
    weights = codec.load(decoder, device, torch.float32)
    plain = Decoder(weights, codec_config)
    kernels = backend.name == "megakernel"
    vocoder = choose_vocoder(plain, weights, codec_config, slots=slots, kernels=kernels)
    engine = Engine(backend, prompt_builder, plain, vocoder, alignment)
    return Loaded(config, sampling, tokenizer, engine, cloner)


def _check_slots(config: ModelConfig, device: torch.device, dtype: torch.dtype, slots: int) -> None:
    """Refuses slots whose keys and values alone are more than the device can hold."""
    if slots < 1:
        raise ValueError(f"slots is {slots}; at least one stream must be able to speak.")
    stack = config.talker.stack
    one = (
        2 * stack.num_layers * stack.num_kv_heads * stack.head_dim * MAX_POSITIONS * dtype.itemsize
    )
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = system_memory()
    if memory is not None and slots * one > memory:
        raise ValueError(
            f"slots is {slots}; each takes {one / (1 << 20):.0f} MiB, and {device} has "
            f"{memory / (1 << 30):.0f} GiB in all: {memory // one} at most."
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
    """The checkpoint's own defaults; the release's where a key is missing."""
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
    chosen = {ours: values[name] for name, ours in names.items() if values.get(name) is not None}
    for switch, ours in (
        ("do_sample", "temperature"),
        ("subtalker_dosample", "predictor_temperature"),
    ):
        if values.get(switch) not in (None, True, False):
            raise CheckpointError(f"{file}: {switch} is {values[switch]!r}; expected a boolean.")
        if values.get(switch) is False:
            chosen[ours] = 0.0
    try:
        return Sampling(**chosen)
    except SamplingError as error:
        raise CheckpointError(f"{file}: {error}") from error
