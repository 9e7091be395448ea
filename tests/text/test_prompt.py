"""Refusals and positions. `test_parity` compares prompts with those of the official package."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megakernel_tts.backends.reference import Reference
from megakernel_tts.errors import InstructionError, VoiceError
from megakernel_tts.loader import LoadedModel
from megakernel_tts.text.prompt import PromptBuilder, PromptLayout
from megakernel_tts.voice import Voice


@pytest.mark.parametrize(
    ("kind", "size", "voice", "language", "instruct", "message"),
    [
        ("custom_voice", "0b6", "nobody", "auto", None,
         r"no voice 'nobody'; choose one of: serena, ryan, eric, dylan\."),
        ("custom_voice", "0b6", "ryan", "klingon", None,
         r"no language 'klingon'; choose auto or one of: chinese, english, german"),
        ("custom_voice", "0b6", "ryan", "sichuan_dialect", None, "no language 'sichuan_dialect'"),
        ("custom_voice", "0b6", "ryan", "auto", "Speak slowly", "supports no instruction"),
        ("base", "1b7", None, "auto", None, "needs a cloned voice"),
        ("voice_design", "1b7", "ryan", "auto", "a voice", r"no named voices \(found 'ryan'\)"),
        ("voice_design", "1b7", None, "auto", " ", "needs instruct="),
    ],
)  # fmt: skip
def test_unsupported_voice_language_or_instruction_is_refused_with_the_choices(
    load: Callable[..., LoadedModel],
    kind: str,
    size: str,
    voice: str | None,
    language: str,
    instruct: str | None,
    message: str,
) -> None:
    prompt_builder = load(kind, size).engine.prompt_builder
    with pytest.raises(VoiceError, match=message) as refusal:
        prompt_builder.prefix(voice, language, instruct)
    assert isinstance(refusal.value, InstructionError) == ("instruct" in message)


@pytest.mark.parametrize("instruct", [5, "\ud800"])
def test_an_instruction_that_is_no_text_is_an_error_of_the_instruction(
    load: Callable[..., LoadedModel], instruct: Any
) -> None:
    prompt_builder = load("voice_design", "1b7").engine.prompt_builder
    for call in (prompt_builder.check, prompt_builder.prefix):
        with pytest.raises(InstructionError, match=r"^instruct "):
            call(None, "auto", instruct)


def test_case_and_spaces_of_names_do_not_matter(load: Callable[..., LoadedModel]) -> None:
    prompt_builder = load().engine.prompt_builder
    vectors = prompt_builder.prefix("RYAN", " English ", None).vectors
    assert torch.equal(vectors, prompt_builder.prefix("ryan", "english", "  ").vectors)


def test_dialect_is_selected_by_its_speaker_only(load: Callable[..., LoadedModel]) -> None:
    loaded = load()
    assert "beijing_dialect" not in loaded.config.talker.spoken_languages
    prefix = loaded.engine.prompt_builder.prefix
    assert torch.equal(
        prefix("eric", "auto", None).vectors, prefix("eric", "chinese", None).vectors
    )
    dialect = prefix("eric", "sichuan_dialect", None).vectors
    assert torch.equal(prefix("eric", "auto", None).vectors, dialect)
    assert not torch.equal(
        prefix("eric", "english", None).vectors, prefix("eric", "auto", None).vectors
    )


def test_batching_does_not_change_text_vectors(load: Callable[..., LoadedModel]) -> None:
    embed_text = load("custom_voice", "1b7").engine.prompt_builder.embed_text
    ids = [5, 9, 200, 9]
    with torch.inference_mode():
        assert torch.equal(embed_text(ids), torch.cat([embed_text([i]) for i in ids]))


@pytest.mark.parametrize("layout", ["full", "streaming"])
@pytest.mark.parametrize("reference", [None, 2, 40], ids=["no reference", "short", "long"])
def test_text_token_i_is_at_position_text_start_plus_i(
    load: Callable[..., LoadedModel], layout: PromptLayout, reference: int | None
) -> None:
    """Replacing a token changes exactly the vector of its position, in the prompt or fed later."""
    loaded = load("base")
    prompt_builder, hidden = loaded.engine.prompt_builder, loaded.config.talker.stack.hidden_size
    codes = None if reference is None else torch.zeros(reference, 16, dtype=torch.long)
    text = None if reference is None else "a few words of a transcript"
    prefix = prompt_builder.prefix(Voice(torch.zeros(hidden), codes, text), "english", None)
    ids = [5, 6, 7, 8]

    def positions(ids: list[int]) -> torch.Tensor:
        """All input vectors with text: those of the prompt, then those fed frame by frame."""
        prompt = prompt_builder.build(prefix, ids, layout, text_ended=True)
        assert prompt is not None
        fed = [prompt.leading_text]
        if not prompt.text_complete:
            fed += [prompt_builder.embed_text(ids[prompt.num_tokens :]), prompt_builder.eos]
        return torch.cat([prompt.prefill, *fed])

    prompt = prompt_builder.build(prefix, ids, layout, text_ended=True)
    assert prompt is not None
    for i in range(len(ids)):
        other_ids = [*ids[:i], 100, *ids[i + 1 :]]
        changed = (positions(ids) != positions(other_ids)).any(1).nonzero()[:, 0].tolist()
        assert changed == [prompt.text_start + i]


def test_prompt_builder_is_freed_without_garbage_collection(
    load: Callable[..., LoadedModel],
) -> None:
    """It holds hundreds of MB, and servers freeze the collector that would break a cycle."""
    loaded = load()
    backend = loaded.engine.backend
    assert isinstance(backend, Reference)
    gc.disable()
    try:
        prompt_builder = PromptBuilder(backend.model.embeddings, loaded.config, loaded.tokenizer)
        prompt_builder.prefix("ryan", "auto", None)
        reference = weakref.ref(prompt_builder)
        del prompt_builder
        assert reference() is None
    finally:
        gc.enable()
