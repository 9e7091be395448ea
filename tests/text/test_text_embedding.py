"""Token vectors equal the projection of the table, and each is computed once."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.weights import Embeddings
from megakernel_tts.text.text_embedding import TextEmbedding


@pytest.fixture
def embeddings(load: Callable[..., LoadedModel]) -> Embeddings:
    backend = load("custom_voice", "1b7").engine.backend
    assert isinstance(backend, Reference)
    return backend.model.embeddings


def test_vectors_equal_the_projection_and_do_not_depend_on_the_batch(
    embeddings: Embeddings,
) -> None:
    text_embedding, table = TextEmbedding(embeddings), embeddings.text
    up, down = embeddings.text_up, embeddings.text_down
    rng = random.Random(0)
    for _ in range(20):
        ids = rng.choices(range(len(table)), k=rng.randint(1, 30))
        x = F.silu(F.linear(table[ids], up.weight, up.bias))
        expected = F.linear(x, down.weight, down.bias)
        vectors = text_embedding(ids)
        torch.testing.assert_close(vectors, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(vectors, torch.cat([TextEmbedding(embeddings)([i]) for i in ids]))


def test_each_token_is_projected_once(
    embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_embedding, projected = TextEmbedding(embeddings), list[int]()
    project = text_embedding._project

    def counted(ids: torch.Tensor) -> torch.Tensor:
        projected.extend(ids.tolist())
        return project(ids)

    monkeypatch.setattr(text_embedding, "_project", counted)
    for ids in ([5, 9, 5, 200], [9, 7], [200, 5]):
        text_embedding(ids)
    assert sorted(projected) == [5, 7, 9, 200]
    assert text_embedding([]).shape == (0, len(embeddings.text_down.weight))


@pytest.mark.gpu
def test_gpu_projects_all_tokens_at_construction(
    embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results have the bits of single projections and are in host memory."""
    text_embedding = TextEmbedding(embeddings.on_device(torch.device("cuda")))
    ids = [3, 77, 300]
    single = torch.cat([text_embedding._project(torch.tensor([i])).cpu() for i in ids])
    monkeypatch.setattr(text_embedding, "_project", None)
    assert torch.equal(text_embedding(ids), single)
    assert text_embedding([*range(len(embeddings.text))]).isfinite().all()
