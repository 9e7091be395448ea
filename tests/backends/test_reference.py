import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megakernel_common.layers import linear
from megakernel_tts import Sampling
from megakernel_tts.backends.decoder_stack import fuse_stack
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import LoadedModel, load_checkpoint
from tests.rig import one_frame

TEXTS = [
    "hello to the world",
    "你好，世界。",
    "a",
    "one two three four five six seven",
    "this is it",
]


def make(
    loaded: LoadedModel, *, num_slots: int = 4, dtype: torch.dtype = torch.float32
) -> Reference:
    backend = loaded.engine.backend
    assert isinstance(backend, Reference)
    return Reference(
        backend.model,
        loaded.config,
        loaded.engine.prompt_builder.pad[0],
        num_slots=num_slots,
        max_positions=128,
    )


def start(
    reference: Reference, loaded: LoadedModel, slot: int, text: str, sampling: Sampling
) -> None:
    prompt_builder = loaded.engine.prompt_builder
    prefix = prompt_builder.prefix("ryan", "english", None)
    ids = loaded.tokenizer.encode(text)
    prompt = prompt_builder.build(prefix, ids, "streaming", text_ended=True)
    assert prompt is not None
    reference.prefill([PrefillRequest(slot, prompt.prefill, sampling)])
    with torch.inference_mode():
        reference.feed(
            slot, torch.cat([prompt_builder.embed_text(ids[1:]), prompt_builder.eos]), True
        )


def frames(reference: Reference, slot: int, count: int) -> list[list[int]]:
    made = (one_frame(reference, [slot])[0] for _ in range(count))
    return [codes.tolist() for codes in made if codes is not None]


SAMPLINGS = [
    Sampling(seed=1),
    Sampling.greedy(seed=2),
    Sampling(seed=3, temperature=1.3, top_k=0, top_p=0.8, repetition_penalty=1.5),
    Sampling(seed=4, predictor_temperature=0.0),
    Sampling(seed=5, temperature=0.0, predictor_top_k=5, repetition_penalty=0.9),
]


@pytest.mark.parametrize("num_positions", [1, 2, 6])
@pytest.mark.parametrize(("size", "num_outputs"), [(64, 192), (1024, 96), (2048, 64)])
def test_a_row_of_a_product_has_the_bits_of_the_row_alone(
    size: int, num_outputs: int, num_positions: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, num_positions, size, generator=generator)
    weight = torch.randn(num_outputs, size, generator=generator)
    product = linear(x, weight)
    for i in range(8):
        torch.testing.assert_close(product[i : i + 1], linear(x[i : i + 1], weight), rtol=0, atol=0)


def test_fused_projections_exist_once_in_memory(load: Callable[..., LoadedModel]) -> None:
    """The model that the backend keeps consists of views of them."""
    loaded = load()
    config, model = loaded.config, make(loaded).model
    for stack, stack_config in (
        (model.talker.stack, config.talker.stack),
        (model.predictor.stack, config.predictor.stack),
    ):
        fused, equal = fuse_stack(stack, stack_config)
        assert torch.equal(fused.eps, torch.tensor(stack_config.norm_eps))
        for layer, given, projections in zip(equal.layers, stack.layers, fused.layers, strict=True):
            for name, value in vars(layer).items():
                assert torch.equal(value, getattr(given, name)), name
            for whole, parts in (
                (projections.qkv, (layer.q, layer.k, layer.v)),
                (projections.gate_up, (layer.gate, layer.up)),
            ):
                assert torch.equal(whole, torch.cat(parts))
                assert {part.untyped_storage().data_ptr() for part in parts} == {whole.data_ptr()}
            shared = {p.untyped_storage().data_ptr() for p in (given.q, given.k, given.v)}
            assert len(shared) == 1, "the backend keeps the projections that it was given"


def test_batching_does_not_change_codes(load: Callable[..., LoadedModel]) -> None:
    """Streams join and leave at any time, in any slot."""
    loaded = load(size="1b7", shallow=True)
    count = 8
    solo: list[list[list[int]]] = []
    for text, sampling in zip(TEXTS, SAMPLINGS, strict=True):
        reference = make(loaded, num_slots=1)
        start(reference, loaded, 0, text, sampling)
        solo.append(frames(reference, 0, count))
    rng = random.Random(0)
    for _ in range(2):
        reference = make(loaded)
        waiting, free = rng.sample(range(5), 5), rng.sample(range(4), 4)
        running: dict[int, int] = {}  # slot -> stream
        made: dict[int, list[list[int]]] = {i: [] for i in range(5)}
        while waiting or running:
            while waiting and free and (not running or rng.random() < 0.5):
                slot, stream = free.pop(), waiting.pop()
                running[slot] = stream
                start(reference, loaded, slot, TEXTS[stream], SAMPLINGS[stream])
            slots = rng.sample(sorted(running), rng.randint(1, len(running)))
            for slot, codes in zip(slots, one_frame(reference, slots), strict=True):
                stream = running[slot]
                if codes is not None:
                    made[stream].append(codes.tolist())
                if codes is None or len(made[stream]) == len(solo[stream]) == count:
                    reference.release(slot)
                    free.append(slot)
                    del running[slot]
        assert made == dict(enumerate(solo))


def test_swapping_does_not_change_codes(
    load: Callable[..., LoadedModel],
) -> None:
    """At random times, into random slots, while other streams use the former slot."""
    loaded = load(size="1b7")
    count = 10
    solo: list[list[list[int]]] = []
    for text, sampling in zip(TEXTS[:3], SAMPLINGS[:3], strict=True):
        reference = make(loaded, num_slots=1)
        start(reference, loaded, 0, text, sampling)
        solo.append(frames(reference, 0, count))
    rng = random.Random(0)
    for _ in range(4):
        reference = make(loaded, num_slots=2)
        made: list[list[list[int]]] = [[], [], []]
        away: dict[int, object] = {}
        for stream in range(3):
            slot = rng.randrange(2)
            start(reference, loaded, slot, TEXTS[stream], SAMPLINGS[stream])
            away[stream] = reference.swap_out(slot)
        while any(len(codes) < len(solo[stream]) for stream, codes in enumerate(made)):
            pair = rng.sample(range(3), 2)
            for slot, stream in enumerate(pair):
                reference.swap_in(slot, away.pop(stream))  # type: ignore[arg-type]
            for _ in range(rng.randint(1, 3)):
                for stream, codes in zip(pair, one_frame(reference, [0, 1]), strict=True):
                    if codes is not None and len(made[stream]) < count:
                        made[stream].append(codes.tolist())
            for slot, stream in enumerate(pair):
                away[stream] = reference.swap_out(slot)
        assert made == solo


def test_the_slot_does_not_change_codes(load: Callable[..., LoadedModel]) -> None:
    loaded = load(shallow=True)
    runs = []
    for slot, seed in ((0, 9), (3, 9), (1, 10)):
        reference = make(loaded)
        start(reference, loaded, slot, TEXTS[0], Sampling(seed=seed))
        runs.append(frames(reference, slot, 10))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_feeding_text_late_does_not_change_codes(load: Callable[..., LoadedModel]) -> None:
    loaded = load(shallow=True)
    prompt_builder = loaded.engine.prompt_builder
    reference = make(loaded)
    start(reference, loaded, 0, TEXTS[0], Sampling(seed=1))
    expected = frames(reference, 0, 12)
    ids = loaded.tokenizer.encode(TEXTS[0])
    prompt = prompt_builder.build(
        prompt_builder.prefix("ryan", "english", None), ids[:1], "streaming", text_ended=False
    )
    assert prompt is not None
    reference.prefill([PrefillRequest(1, prompt.prefill, Sampling(seed=1))])
    made = frames(reference, 1, 1)  # the first frame needs no text
    with pytest.raises(RuntimeError, match="before the text of frame 0"):
        one_frame(reference, [1])
    for i in ids[1:]:
        with torch.inference_mode():
            reference.feed(1, prompt_builder.embed_text([i]), False)
        made += frames(reference, 1, 1)
    reference.feed(1, prompt_builder.eos, True)
    made += frames(reference, 1, 12 - len(made))
    assert made == expected


def test_control_ids_and_an_early_end_of_speech_are_not_sampled(
    load: Callable[..., LoadedModel],
) -> None:
    loaded = load(shallow=True)
    eos = loaded.config.talker.control.eos
    reference = make(loaded)
    head = reference.model.talker.head
    pushed = head.clone()
    pushed[loaded.config.talker.num_codes :] = 50 * head.abs().max()  # the largest logits
    backend = reference.model
    reference.model = type(backend)(
        backend.embeddings, type(backend.talker)(backend.talker.stack, pushed), backend.predictor
    )
    for seed in range(20):
        start(reference, loaded, 0, TEXTS[0], Sampling(seed=seed))
        made = [one_frame(reference, [0])[0] for _ in range(2)]
        assert all(
            codes is not None and int(codes[0]) < loaded.config.talker.num_codes for codes in made
        )
        third = one_frame(reference, [0])[0]
        assert third is None or int(third[0]) < loaded.config.talker.num_codes
    assert eos >= loaded.config.talker.num_codes


def test_a_failed_step_does_not_change_later_codes(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(shallow=True)
    reference = make(loaded)
    start(reference, loaded, 0, TEXTS[0], Sampling(seed=1))
    expected = frames(reference, 0, 6)
    start(reference, loaded, 0, TEXTS[0], Sampling(seed=1))
    made = frames(reference, 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "predict", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            one_frame(reference, [0])
    assert made + frames(reference, 0, 3) == expected


def test_a_prompt_that_does_not_fit_is_refused(load: Callable[..., LoadedModel]) -> None:
    loaded = load(shallow=True)
    reference = make(loaded)
    prompt = torch.zeros(128, loaded.config.talker.stack.hidden_size)
    with pytest.raises(ValueError, match="128 does not fit 128"):
        reference.prefill([PrefillRequest(0, prompt, Sampling(seed=0))])


def test_logits_that_are_not_finite_are_an_error(load: Callable[..., LoadedModel]) -> None:
    loaded = load(shallow=True)
    reference = make(loaded)
    prompt = torch.full((3, loaded.config.talker.stack.hidden_size), torch.nan)
    reference.prefill([PrefillRequest(0, prompt, Sampling(seed=0))])
    with pytest.raises(FloatingPointError):
        one_frame(reference, [0])


def test_bfloat16_stays_close_to_float32(
    load: Callable[..., LoadedModel], checkpoint: Callable[..., Path]
) -> None:
    """Logits of the first frame: plain rounding noise, and the same best ids."""
    single = load()
    half = load_checkpoint(checkpoint(), torch.device("cpu"), torch.bfloat16, 1)
    logits: list[torch.Tensor] = []
    for loaded in (single, half):
        backend = loaded.engine.backend
        assert isinstance(backend, Reference)
        seen: list[torch.Tensor] = []
        reference = Reference(
            backend.model,
            loaded.config,
            loaded.engine.prompt_builder.pad[0],
            num_slots=1,
            max_positions=128,
            trace=lambda phase, x, seen=seen: seen.append(x) if phase == "logits" else None,
        )
        start(reference, loaded, 0, TEXTS[0], Sampling.greedy(seed=0))
        one_frame(reference, [0])
        logits.append(seen[0][0].float())
    half.engine.close()
    exact, rounded = logits
    # Three layers of bfloat16 (8 bits) leave about 1 % of the logits' spread.
    assert (rounded - exact).std() < 0.03 * exact.std()
    assert len(set(exact.topk(50).indices.tolist()) & set(rounded.topk(50).indices.tolist())) >= 45
