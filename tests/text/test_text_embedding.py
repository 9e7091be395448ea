"""Tokens' vectors are the projection's, each computed once, whoever asks in whatever order."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import Loaded
from megakernel_tts.model.weights import Embeddings
from megakernel_tts.text.text_embedding import TextEmbedding


@pytest.fixture
def embeddings(load: Callable[..., Loaded]) -> Embeddings:
    backend = load("custom_voice", "1b7").engine.backend
    assert isinstance(backend, Reference)
    return backend.model.embeddings


def test_a_vector_is_its_tokens_projection(embeddings: Embeddings) -> None:
    rows, e = TextEmbedding(embeddings), embeddings
    rng = random.Random(0)
    for _ in range(20):
        ids = rng.choices(range(len(e.text)), k=rng.randint(1, 30))
        x = F.silu(F.linear(e.text[ids], e.text_up.weight, e.text_up.bias))
        expected = F.linear(x, e.text_down.weight, e.text_down.bias)
        torch.testing.assert_close(rows(ids), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(rows(ids), torch.cat([TextEmbedding(e)([i]) for i in ids]))


def test_a_token_is_projected_once(embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, projected = TextEmbedding(embeddings), list[int]()
    project = rows._project

    def counted(ids: torch.Tensor) -> torch.Tensor:
        projected.extend(ids.tolist())
        return project(ids)

    monkeypatch.setattr(rows, "_project", counted)
    asked = [5, 9, 5, 200], [9, 7], [200, 5]
    for ids in asked:
        rows(ids)
    assert sorted(projected) == [5, 7, 9, 200]
    assert rows([]).shape == (0, len(embeddings.text_down.weight))


@pytest.mark.gpu
def test_a_gpu_projects_all_of_them_at_once(
    embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits as one by one, and what is looked up is on the host."""
    rows = TextEmbedding(embeddings.on_device(torch.device("cuda")))
    some = [3, 77, 300]
    alone = torch.cat([rows._project(torch.tensor([i])).cpu() for i in some])
    monkeypatch.setattr(rows, "_project", None)
    assert torch.equal(rows(some), alone)
    assert rows([*range(len(embeddings.text))]).isfinite().all()
