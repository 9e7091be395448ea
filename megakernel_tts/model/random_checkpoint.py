"""Small checkpoints with random weights, in the released architecture and file layout.

The tests and the recorded goldens use them. Their speech is noise, but every tensor affects it. The
same seed gives the same bytes on every machine.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.model.config import Kind, read_codec_config, read_model_config
from megakernel_tts.model.weights import model_specs, speaker_specs

Size = Literal["0b6", "1b7"]

_RELEASED_CODES = 2048
_LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071,
    "spanish": 2054, "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069,
    "beijing_dialect": 2074, "sichuan_dialect": 2062,
}  # fmt: skip
_SPEAKERS = {"serena": 3066, "ryan": 3061, "eric": 2875, "dylan": 2878}
_DIALECTS = {"serena": False, "ryan": False, "eric": "sichuan_dialect", "dylan": "beijing_dialect"}
_CONTROL = {
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154,
    "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip
_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
)  # fmt: skip
_MERGED_WORDS = (
    # The last two rows cross boundaries of the pre-tokenizer's split and so test where it splits.
    "assistant", "user", "the", " the", " and", " you", " to", " is", "hello", " hello", " world",
    "ing", " quick", " brown", " speech", " voice", "你好", "世界", "。", "ght", "tion",
    "  ", "\n\n", "\t\t", " \n", "!!", "\r\n", "oW", "nA", "iP", "'s", "'ll", "24", "1,", "a,",
    "e\u0301", " 4", " !", ".\n", "!\n", "，世", "d ",
)  # fmt: skip


def write_checkpoint(
    folder: Path,
    kind: Kind = "custom_voice",
    size: Size = "0b6",
    *,
    codes: int = 256,
    seed: int = 0,
    words: Sequence[str] = (),
) -> None:
    """Writes a checkpoint with a few million random weights.

    Args:
        folder: Created if missing; an existing checkpoint in it is overwritten.
        kind: Of the model.
        size: `1b7` has a talker that is wider than the code predictor, as the released 1.7B.
        codes: Entries of each codebook. The released 2,048 make the file large.
        seed: Of the weights.
        words: Words that get a token of their own, in addition to a few others.
    """
    codec = folder / "speech_tokenizer"
    codec.mkdir(parents=True, exist_ok=True)
    vocab, merges = _small_vocabulary(words)
    specials = write_tokenizer(folder, vocab, merges)
    write_configs(
        folder, small_model_config(kind, size, codes, vocab, specials), small_codec_config(codes)
    )
    model = read_model_config(folder / "config.json")
    specs = list(leaves(model_specs(model)))
    if model.speaker is not None:
        specs += leaves(speaker_specs(model.speaker))
    save_file(
        {s.name: random_tensor(s, seed).to(torch.bfloat16) for s in specs},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    config = read_codec_config(codec / "config.json")
    specs = [*leaves(decoder_specs(config.decoder))]
    specs += leaves(encoder_specs(config.encoder, config.decoder.num_groups))
    save_file(
        {s.name: random_tensor(s, seed) for s in specs},
        str(codec / "model.safetensors"),
        metadata={"format": "pt"},
    )


def random_tensor(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    """A float32 tensor whose scale is chosen so that every layer affects the network's output."""
    # RandomState's stream is guaranteed not to change; those of newer generators may.
    digest = sum((i + 1) * byte for i, byte in enumerate(spec.name.encode())) + 7919 * seed
    state = np.random.RandomState(digest % (1 << 32))
    if spec.name.endswith("cluster_usage"):
        values = state.random_sample(spec.shape) * 3 + 0.5
    else:
        mean, deviation = mean_and_deviation(spec)
        values = state.standard_normal(spec.shape) * deviation + mean
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def mean_and_deviation(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's random values."""
    name, shape = spec.name, spec.shape
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("embedding_sum", "embed_sum"):
        return 0.0, 1.5
    if leaf == "alpha":
        return -1.0, 0.3  # of the snake activation: e^alpha is about 0.37
    if leaf == "beta":
        return 0.0, 0.3
    if leaf == "scale":
        return 0.2, 0.05
    if leaf == "gamma":
        return 0.3, 0.1
    if "embedding" in name:
        return 0.0, 0.6
    if len(shape) == 1:
        return (1.0 if leaf == "weight" else 0.0), 0.1
    num_inputs = shape[1] * (shape[2] if len(shape) == 3 else 1)
    gain = 1.0
    if "codec_head" in name or "lm_head" in name:
        gain = 3.0
    elif name == "decoder.decoder.6.conv.weight":
        gain = 0.05  # keeps the waveform within the clamp
    elif name.startswith("decoder.decoder.") and ".conv2." in name:
        gain = 0.3
    return 0.0, gain / num_inputs**0.5


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def write_configs(folder: Path, model: dict[str, Any], codec: dict[str, Any]) -> None:
    """Writes the configs of a checkpoint and its codec, with the released sampling defaults."""
    _write_json(folder / "config.json", model)
    _write_json(folder / "generation_config.json", _GENERATION)
    _write_json(folder / "speech_tokenizer" / "config.json", codec)
    _write_json(folder / "speech_tokenizer" / "configuration.json", {"framework": "pytorch"})
    _write_json(folder / "speech_tokenizer" / "preprocessor_config.json", _FEATURES)


def _small_vocabulary(words: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Tokens of the 256 bytes, of the given words and of a few others; the merges that form them.

    The merges of the given words come first, so that no other merge divides them.
    """
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[str] = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in (*words, *_MERGED_WORDS):
        chars = byte_level.pre_tokenize_str(word)[0][0]
        for end in range(2, len(chars) + 1):
            if chars[:end] not in vocab:
                vocab[chars[:end]] = len(vocab)
                merges.append(f"{chars[: end - 1]} {chars[end - 1]}")
    return vocab, merges


def write_tokenizer(folder: Path, vocab: dict[str, int], merges: list[str]) -> dict[str, int]:
    """Writes the tokenizer's files. The special tokens' ids follow those of the vocabulary.

    Args:
        folder: Of the checkpoint.
        vocab: Token -> id.
        merges: Pairs of tokens, in order of priority.

    Returns:
        Special token -> id.
    """
    specials = {token: len(vocab) + i for i, token in enumerate(_SPECIALS)}
    _write_json(folder / "vocab.json", vocab)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    added = {
        str(i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True,
        }
        for token, i in specials.items()
    }  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
            "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
            "model_max_length": 131072, "pad_token": "<|endoftext|>", "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
            "processor_class": "Qwen3TTSProcessor",
        },
    )  # fmt: skip
    _write_json(
        folder / "preprocessor_config.json",
        {
            "padding_side": "left", "padding_value": 0.0, "processor_class": "Qwen3TTSProcessor",
            "return_attention_mask": True,
        },
    )  # fmt: skip
    return specials


def _stack(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "attention_bias": False, "attention_dropout": 0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": layers, "num_code_groups": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "sliding_window": None, "use_cache": True,
        "use_sliding_window": False,
    }  # fmt: skip


def small_model_config(
    kind: Kind, size: Size, codes: int, vocab: dict[str, int], specials: dict[str, int]
) -> dict[str, Any]:
    """The contents of a `config.json`; control ids have the released distance to the codes."""
    hidden = 192 if size == "1b7" else 128

    def shifted(ids: dict[str, int]) -> dict[str, int]:
        return {name: i - _RELEASED_CODES + codes for name, i in ids.items()}

    has_speakers = kind == "custom_voice"
    predictor = _stack(128, 2) | {
        "model_type": "qwen3_tts_talker_code_predictor", "vocab_size": codes, "rope_scaling": None,
        "max_position_embeddings": 65536, "max_window_layers": 28,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    talker = _stack(hidden, 3) | {
        "model_type": "qwen3_tts_talker", "vocab_size": codes + 1024, "text_hidden_size": 96,
        "text_vocab_size": len(vocab) + len(specials), "max_position_embeddings": 32768,
        "position_id_per_seconds": 13, "codec_language_id": shifted(_LANGUAGES),
        "spk_id": shifted(_SPEAKERS) if has_speakers else {},
        "spk_is_dialect": _DIALECTS if has_speakers else {},
        "rope_scaling": {
            "interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
            "type": "default",
        },
        "code_predictor_config": predictor,
    } | shifted(_CONTROL)  # fmt: skip
    speaker = {
        "enc_dim": hidden, "sample_rate": 24000, "mel_dim": 128,
        "enc_channels": [32, 32, 32, 32, 96], "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 16, "enc_res2net_scale": 8,
        "enc_se_channels": 16,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_size": size,
        "tts_model_type": kind, "assistant_token_id": vocab["assistant"],
        "im_start_token_id": specials["<|im_start|>"], "im_end_token_id": specials["<|im_end|>"],
        "tts_pad_token_id": specials["<tts_pad>"], "tts_bos_token_id": specials["<tts_text_bos>"],
        "tts_eos_token_id": specials["<tts_text_eod>"], "transformers_version": "4.57.3",
        "talker_config": talker,
        **({"speaker_encoder_config": speaker} if kind == "base" else {}),
    }  # fmt: skip


def small_codec_config(codes: int) -> dict[str, Any]:
    """The contents of a `speech_tokenizer/config.json`."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000, "output_sample_rate": 24000, "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920, "transformers_version": "4.57.3",
        "decoder_config": {
            "attention_bias": False, "attention_dropout": 0.0, "latent_dim": 64, "codebook_dim": 32,
            "codebook_size": codes, "decoder_dim": 96, "hidden_act": "silu", "hidden_size": 32,
            "intermediate_size": 64, "layer_scale_initial_scale": 0.01, "head_dim": 16,
            "max_position_embeddings": 8000, "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_key_value_heads": 4, "num_quantizers": 16, "num_semantic_quantizers": 1,
            "rms_norm_eps": 1e-5, "rope_theta": 10000, "semantic_codebook_size": 4096,
            "sliding_window": 72, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
            "vector_quantization_hidden_dimension": 32,
        },
        "encoder_config": {
            "_frame_rate": 12.5, "attention_bias": False, "attention_dropout": 0.0,
            "audio_channels": 1, "codebook_dim": 16, "codebook_size": codes, "compress": 2,
            "dilation_growth_rate": 2, "dtype": "float32", "head_dim": 8, "hidden_act": "gelu",
            "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "kernel_size": 7,
            "last_kernel_size": 3, "layer_scale_initial_scale": 0.01, "norm_eps": 1e-5,
            "max_position_embeddings": 8000, "num_attention_heads": 4, "num_filters": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 4, "num_quantizers": 16,
            "num_residual_layers": 1, "num_semantic_quantizers": 1, "pad_mode": "constant",
            "residual_kernel_size": 3, "rope_theta": 10000.0, "sampling_rate": 24000,
            "sliding_window": 250, "trim_right_ratio": 1.0, "upsample_groups": 32,
            "upsampling_ratios": [8, 6, 5, 4], "use_cache": False, "use_causal_conv": True,
            "use_conv_shortcut": False, "use_streaming": False,
            "vector_quantization_hidden_dimension": 16,
        },
    }  # fmt: skip


_GENERATION = {
    "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.9, "top_p": 1.0, "top_k": 50,
    "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_p": 1.0,
    "subtalker_top_k": 50, "max_new_tokens": 8192,
}  # fmt: skip

_FEATURES = {
    "chunk_length_s": None, "feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1,
    "overlap": None, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True,
    "sampling_rate": 24000,
}  # fmt: skip
