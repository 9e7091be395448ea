"""The README's snippets are run, its links are followed, its commands are those of CI."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHOWN = re.findall(r"^```python no-run\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    if "save(" in snippet:
        assert (tmp_path / "hello.wav").stat().st_size > 1000


def test_snippets_that_need_a_download_compile() -> None:
    assert len(SNIPPETS) == 2 and len(SHOWN) == 2
    for snippet in SHOWN:
        compile(snippet, "README.md", "exec")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_ci_runs_the_command_that_the_readme_names() -> None:
    assert "pip install '.[test]' && pytest\n" in README
    assert "grep" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
