from pathlib import Path

from megakernel_tts.model.random_checkpoint import write_checkpoint


def test_same_seed_gives_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, seed=seed)
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) == 11
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    model = "model.safetensors"
    assert (tmp_path / "a" / model).read_bytes() != (tmp_path / "c" / model).read_bytes()
