"""Refusals; what prompts hold is compared with the official package in `test_parity`."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from megakernel_tts.backends.reference import Reference
from megakernel_tts.errors import VoiceError
from megakernel_tts.loader import Loaded
from megakernel_tts.text.prompt import Layout, PromptBuilder, spoken_languages
from megakernel_tts.voice import Voice


@pytest.mark.parametrize(
    ("kind", "size", "voice", "language", "instruct", "message"),
    [
        ("custom_voice", "0b6", "nobody", "auto", None,
         r"no voice 'nobody'; choose one of: serena, ryan, eric, dylan\."),
        ("custom_voice", "0b6", "ryan", "klingon", None,
         r"no language 'klingon'; choose auto or one of: chinese, english, german"),
        ("custom_voice", "0b6", "ryan", "sichuan_dialect", None, "no language 'sichuan_dialect'"),
        ("custom_voice", "0b6", "ryan", "auto", "Speak slowly", "follows no instruction"),
        ("base", "1b7", None, "auto", None, "speaks with a cloned voice"),
        ("voice_design", "1b7", "ryan", "auto", "a voice", r"no named voices \(found 'ryan'\)"),
        ("voice_design", "1b7", None, "auto", " ", "needs instruct="),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused_with_the_choices(
    load: Callable[..., Loaded],
    kind: str,
    size: str,
    voice: str | None,
    language: str,
    instruct: str | None,
    message: str,
) -> None:
    prompt_builder = load(kind, size).engine.prompt_builder
    with pytest.raises(VoiceError, match=message):
        prompt_builder.prefix(voice, language, instruct)


def test_names_and_languages_in_any_case(load: Callable[..., Loaded]) -> None:
    prompt_builder = load().engine.prompt_builder
    one = prompt_builder.prefix("RYAN", " English ", None).vectors
    assert torch.equal(one, prompt_builder.prefix("ryan", "english", "  ").vectors)


def test_dialects_are_spoken_by_their_speakers_alone(load: Callable[..., Loaded]) -> None:
    loaded = load()
    assert "beijing_dialect" not in spoken_languages(loaded.config)
    prefix = loaded.engine.prompt_builder.prefix
    assert torch.equal(
        prefix("eric", "auto", None).vectors, prefix("eric", "chinese", None).vectors
    )
    own = prefix("eric", "sichuan_dialect", None).vectors
    assert torch.equal(prefix("eric", "auto", None).vectors, own)
    assert not torch.equal(
        prefix("eric", "english", None).vectors, prefix("eric", "auto", None).vectors
    )


def test_a_token_has_one_vector_whatever_stands_beside_it(load: Callable[..., Loaded]) -> None:
    prompt_builder = load("custom_voice", "1b7").engine.prompt_builder
    with torch.inference_mode():
        together = prompt_builder.embed_text([5, 9, 200, 9])
        assert torch.equal(
            together, torch.cat([prompt_builder.embed_text([i]) for i in (5, 9, 200, 9)])
        )


@pytest.mark.parametrize("layout", ["full", "streaming"])
@pytest.mark.parametrize("reference", [None, 2, 40], ids=["no reference", "short", "long"])
def test_the_text_is_where_the_prompt_says_and_goes_on_frame_by_frame(
    load: Callable[..., Loaded], layout: Layout, reference: int | None
) -> None:
    """Other tokens change the positions from `text_start` on, and the vectors fed after them."""
    loaded = load("base")
    prompt_builder, hidden = loaded.engine.prompt_builder, loaded.config.talker.stack.hidden_size
    codes = None if reference is None else torch.zeros(reference, 16, dtype=torch.long)
    text = None if reference is None else "a few words of a transcript"
    prefix = prompt_builder.prefix(Voice(torch.zeros(hidden), codes, text), "english", None)
    ids = [5, 6, 7, 8]

    def positions(ids: list[int]) -> torch.Tensor:
        """All text that the talker sees: the prompt, then what is fed."""
        prompt = prompt_builder.build(prefix, ids, layout, ended=True)
        assert prompt is not None
        rest = (
            []
            if prompt.text_complete
            else [prompt_builder.embed_text(ids[prompt.num_tokens :]), prompt_builder.eos]
        )
        return torch.cat([prompt.prefill, prompt.leading_text, *rest])

    prompt = prompt_builder.build(prefix, ids, layout, ended=True)
    assert prompt is not None
    for i in range(len(ids)):
        others = [*ids[:i], 100, *ids[i + 1 :]]
        changed = (positions(ids) != positions(others)).any(1).nonzero()[:, 0].tolist()
        assert changed == [prompt.text_start + i]


def test_a_prompter_goes_with_its_last_user(load: Callable[..., Loaded]) -> None:
    """It holds hundreds of MB, and servers freeze the collector that would break a cycle."""
    loaded = load()
    backend = loaded.engine.backend
    assert isinstance(backend, Reference)
    gc.disable()
    try:
        prompt_builder = PromptBuilder(backend.model.embeddings, loaded.config, loaded.tokenizer)
        prompt_builder.prefix("ryan", "auto", None)
        gone = weakref.ref(prompt_builder)
        del prompt_builder
        assert gone() is None
    finally:
        gc.enable()
