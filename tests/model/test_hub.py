from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from megakernel_common.errors import CheckpointError
from megakernel_tts.model import hub


def test_existing_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    assert hub.find_checkpoint(tmp_path) == tmp_path
    assert hub.find_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("Qwen/Qwen3-TTS-12Hz-0.6B-Base", "Qwen/Qwen3-TTS-12Hz-0.6B-Base", None),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
    ],
)
def test_hub_id_is_downloaded_at_its_revision(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    repository: str,
    revision: str | None,
) -> None:
    calls: list[tuple[str, Any]] = []

    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns and "speech_tokenizer/*" in allow_patterns
        calls.append((repo_id, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find_checkpoint(name) == tmp_path
    assert calls == [(repository, revision)]


def test_failed_download_names_the_repository_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand more words")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"'a/b@c' .* not be downloaded .*: no network$"):
        hub.find_checkpoint("a/b@c")


@pytest.mark.parametrize("name", ["", "demon", "./none", "/none/such", "a/b/c", "a b/c", "~/x"])
def test_unknown_model_name_is_refused_with_the_valid_forms(name: str) -> None:
    with pytest.raises(CheckpointError, match="name a folder that exists, a hub id such as Qwen/"):
        hub.find_checkpoint(name)


def test_demo_is_part_of_the_package() -> None:
    folder = hub.find_checkpoint("demo")
    assert folder.is_relative_to(Path(hub.__file__).parents[1])
    assert (folder / "speech_tokenizer" / "model.safetensors").is_file()
