import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakernel_common.errors import CheckpointError
from megakernel_tts.model.config import read_codec_config, read_model_config

Checkpoint = Callable[..., Path]


def edited(source: Path, target: Path, path: str, value: Any) -> Path:
    """A copy of a config with one field set, or dropped if the value is `...`."""
    content = json.loads(source.read_text(encoding="utf-8"))
    *parents, name = path.split(".")
    section = content
    for parent in parents:
        section = section[parent]
    if value is ...:
        del section[name]
    else:
        section[name] = value
    target.write_text(json.dumps(content))
    return target


def test_every_kind_and_size_is_read(checkpoint: Checkpoint) -> None:
    small = read_model_config(checkpoint("custom_voice", "0b6") / "config.json")
    assert small.kind == "custom_voice" and not small.takes_instruct
    assert small.talker.num_codes == 256 and small.talker.control.eos == 2150 - 1792
    assert small.talker.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
    large = read_model_config(checkpoint("base", "1b7") / "config.json")
    assert large.kind == "base" and large.speaker is not None and large.speaker.dim == 192
    assert large.talker.stack.hidden_size == 192 != large.predictor.stack.hidden_size
    design = read_model_config(checkpoint("voice_design", "1b7") / "config.json")
    assert design.takes_instruct and design.speaker is None


def test_fields_without_effect_are_ignored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint() / "config.json"
    file = edited(source, tmp_path / "config.json", "talker_config._name_or_path", "x")
    assert read_model_config(file) == read_model_config(source)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "llama", r"model_type is \"llama\"; expected one of qwen3_tts"),
        ("model_type", ..., r"model_type is missing"),
        ("tts_model_type", "chat", r"expected one of base, custom_voice, voice_design"),
        ("tts_model_size", "7b", r"tts_model_size"),
        ("talker_config", [], r"talker_config\. must be a JSON object, found \[\]"),
        ("talker_config.hidden_size", ..., r"talker_config\.hidden_size is missing"),
        ("talker_config.hidden_size", "128", r"hidden_size is \"128\"; expected a whole number"),
        ("talker_config.hidden_size", 1e300, r"hidden_size"),
        ("talker_config.hidden_size", 10**18, r"hidden_size is 1000000000000000000; expected"),
        ("talker_config.num_hidden_layers", -3, r"num_hidden_layers is -3"),
        ("talker_config.num_hidden_layers", True, r"num_hidden_layers is true"),
        ("talker_config.rms_norm_eps", float("nan"), r"rms_norm_eps is NaN"),
        ("talker_config.rope_theta", float("inf"), r"rope_theta is Infinity"),
        ("talker_config.num_key_value_heads", 3, r"a divisor of 4 attention heads"),
        ("talker_config.hidden_act", "gelu", r"hidden_act is \"gelu\"; expected 'silu'"),
        ("talker_config.codec_eos_token_id", 5, r"codec_eos_token_id is 5"),
        ("talker_config.codec_language_id", {"english": 10**6}, r"codec_language_id"),
        ("talker_config.spk_is_dialect", {"ryan": "klingon"}, r"spk_is_dialect"),
        ("talker_config.code_predictor_config.num_code_groups", 8, r"16, as in talker_config"),
        ("tts_eos_token_id", 10**5, r"text_vocab_size"),
        ("talker_config.num_hidden_layers", 1 << 20, r"from 1 to 256"),
        ("talker_config.spk_is_dialect", {"ryan": ["x"]}, r"spk_is_dialect"),
        ("talker_config.rope_scaling", {"rope_type": "yarn"}, r"rope_type is \"yarn\""),
        ("talker_config.rope_scaling", {"type": "yarn"}, r"rope_scaling\.type is \"yarn\"; exp"),
        ("talker_config.rope_scaling", 5, r"rope_scaling\. must be a JSON object, found 5"),
        ("talker_config.layer_types", 5, r"layer_types is 5; expected full_attention everywhere"),
        ("talker_config.layer_types", ["sliding_attention"], r"expected full_attention everywhere"),
        ("talker_config.spk_id", {"Ryan": 1, "ryan": 2}, r"spk_id .* distinct in lower case"),
    ],
)
def test_invalid_field_is_refused_with_file_field_and_value(
    checkpoint: Checkpoint, tmp_path: Path, path: str, value: Any, message: str
) -> None:
    file = edited(checkpoint() / "config.json", tmp_path / "config.json", path, value)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "encodec", r"qwen3_tts_tokenizer_12hz"),
        ("output_sample_rate", 16000, r"24000, the only one implemented"),
        ("decoder_config.upsample_rates", [8, 5, 4], r"the product of all of the decoder's rates"),
        ("decoder_config.upsample_rates", "8543", r"short list of positive whole numbers"),
        ("decoder_config.sliding_window", 0, r"sliding_window is 0"),
        ("decoder_config.sliding_window", 1 << 20, r"from 2 to 4096"),
        ("decoder_config.num_quantizers", 1 << 20, r"from 2 to 128"),
        ("encoder_config.num_quantizers", 4, r"at least 16 quantizers"),
        ("encoder_config.upsampling_ratios", [8, 6], r"twice the product"),
        ("encoder_config.pad_mode", "reflect", r"pad_mode"),
    ],
)
def test_invalid_codec_field_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, path: str, value: Any, message: str
) -> None:
    source = checkpoint() / "speech_tokenizer" / "config.json"
    with pytest.raises(CheckpointError, match=message):
        read_codec_config(edited(source, tmp_path / "config.json", path, value))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model_type": 1e999}']
)
def test_file_without_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(file)


def test_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_model_config(tmp_path / "config.json")
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="larger than"):
        read_model_config(file)
