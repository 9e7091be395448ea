"""README.md and docs/ stay true: code blocks run, links resolve, figures equal the results files.

The info string of a code block is a language and at most one mark, which says why the block is not
run here. Marked Python is compiled, marked commands are checked against their `--help`.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bench.running_server import free_port
from megakernel_tts.cli.main import main
from megakernel_tts.server.voices import OPENAI_VOICES

ROOT = Path(__file__).parent.parent
RESULTS = "bench/results/"
PORT = "8123"  # of servers in shell blocks
MARKS = {"gpu", "network", "install", "minutes"}
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
PAGES += sorted(
    file
    for folder in ("csrc", "examples", "megakernel_stt", "megakernel_tts")
    for file in (ROOT / folder).rglob("README.md")
)
# Programs, so that blocks run this checkout and not an installed one.
PRELUDE = f"""set -euo pipefail
mkdir .programs
echo 'exec {shlex.quote(sys.executable)} -m megakernel_tts "$@"' > .programs/megakernel-tts
echo 'exec {shlex.quote(sys.executable)} "$@"' > .programs/python
sed -i '1i #!/bin/sh' .programs/*
chmod +x .programs/*
PATH=$PWD/.programs:$PATH
"""


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block."""

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def id(self) -> str:
        """For test names."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[CodeBlock]:
    """The fenced code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE):
        language, *marks = match[1].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        yield CodeBlock(page, line, language, tuple(marks), match[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def select(language: str, *, marked: bool) -> list[CodeBlock]:
    """Blocks of a language, with or without a mark."""
    return [b for b in BLOCKS if b.language == language and bool(b.marks) == marked]


def by_id(blocks: list[CodeBlock]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=[block.id for block in blocks])


def test_every_block_has_a_known_language_and_mark() -> None:
    assert len(BLOCKS) > 20
    for block in BLOCKS:
        assert block.language in ("", "python", "sh"), block.id
        assert set(block.marks) <= MARKS and len(block.marks) <= 1, block.id
        assert block.language or not block.marks, block.id


@by_id(select("python", marked=False))
def test_python_blocks_run(
    block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "block.py"
    file.write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")
    for name in re.findall(r"save\(\"(.*?)\"", block.text):
        assert (tmp_path / name).stat().st_size > 1000


@by_id(select("python", marked=True))
def test_marked_python_blocks_compile(block: CodeBlock) -> None:
    compile(block.text, block.id, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_voices_in_examples_of_clients_are_those_of_any_model() -> None:
    """A reader starts with the demo voice, which lacks the names of the released models."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = set(re.findall(r"voice(?:_id)?\"?[=:] ?\"?(\w+)\"", text))
    assert len(names) >= 2
    assert names <= {*OPENAI_VOICES, "me"}  # "me" is uploaded in the example


@by_id(select("sh", marked=False))
def test_shell_blocks_run(block: CodeBlock, tmp_path: Path) -> None:
    text = block.text.replace(PORT, str(free_port()))  # another checkout's tests may use it
    run_in(tmp_path, "bash", "-c", PRELUDE + text)
    for name in re.findall(r"(?:-o|--output|--json|>) +(\w\S*)", block.text):
        assert (tmp_path / name).stat().st_size > 0, f"{name} is empty"


def run_in(folder: Path, *command: str) -> None:
    """Runs a command; the package comes from this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr


def commands_of(block: CodeBlock) -> Iterator[list[str]]:
    """The simple commands of a shell block, as lists of words."""
    return commands_in(block.text)


def commands_in(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, as lists of words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in words:
            if word in ("&&", "|", "&", ";"):
                yield command
                command = []
            elif not re.fullmatch(r"[A-Z_]+=.*", word) or command:
                command.append(word)
        if command:
            yield command


@by_id(select("sh", marked=True))
def test_commands_of_marked_shell_blocks_exist(block: CodeBlock) -> None:
    for command in commands_of(block):
        check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_text_exist(page: Path) -> None:
    """Commands in backticks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for code in re.findall(r"`((?:megakernel-tts|python|pytest|pip) [^`]+)`", text):
        for command in commands_in(code):
            check_command(command)


def check_command(command: list[str]) -> None:
    """Checks a command's program, its files and the names of its options."""
    options = [word.split("=")[0] for word in command if re.match(r"--?[a-zA-Z]", word)]
    match command:
        case ["megakernel-tts", name, *_]:
            assert set(options) <= options_in(cli_help(name)), command
        case ["pytest", *words] | ["python", "-m", "pytest", *words]:
            for word in words:
                assert "/" not in word or (ROOT / word.split("::")[0]).exists(), command
        case ["python", "-m", module, *_]:
            options.remove("-m")
            if options:
                assert set(options) <= options_in(module_help(module)), command
            else:
                assert importlib.util.find_spec(module), command
        case ["python", "build_ext.py", *_]:
            assert set(options) <= options_in(script_help("build_ext.py")), command
        case ["python" | "bash", script, *_]:
            assert (ROOT / script).is_file(), command
        case ["pip", "install", *words]:
            for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
                assert set(extra.split(",")) <= extras(), command
        case ["docker" | "kubectl" | "ray" | "serve", *words]:
            files = [word for word in words if word.startswith("deploy/")]
            assert all((ROOT / file).is_file() for file in files), command
        case ["apt-get" | "cat" | "curl" | "echo" | "export" | "wait", *_]:
            pass
        case ["pip", "download", *_]:
            pass
        case _:
            pytest.fail(f"unsupported command: {command}")


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)) | {"-h", "--help"}


@cache
def cli_help(command: str) -> str:
    return captured(lambda: main([command, "--help"]))


@cache
def module_help(module: str) -> str:
    """The help of `python -m module`, in this process: imports are shared."""
    return captured(lambda: runpy.run_module(module, run_name="__main__"), module, "--help")


@cache
def script_help(script: str) -> str:
    path = str(ROOT / script)
    return captured(lambda: runpy.run_path(path, run_name="__main__"), path, "--help")


def captured(act: object, *arguments: str) -> str:
    """The standard output of a call that ends the process."""
    assert callable(act)
    before, sys.argv = sys.argv, list(arguments) or sys.argv
    output = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.suppress(SystemExit),
            warnings.catch_warnings(action="ignore", category=RuntimeWarning),  # runs twice
        ):
            act()
    finally:
        sys.argv = before
    assert "usage:" in output.getvalue(), output.getvalue()
    return output.getvalue()


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def links_of(page: Path) -> list[str]:
    """Targets of the links outside code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in links_of(page):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name}: {link}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts name them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in backticks, of files or folders of the repository."""
    tops = "|".join(p.name for p in ROOT.iterdir() if p.is_dir() and p.name[0] != ".")
    for name in re.findall(rf"`((?:{tops})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_results_file_is_cited() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file in (ROOT / RESULTS).glob("*.*"):
        assert file.name in text, f"no page says what {file.name} holds"


def test_parts_of_results_files_by_other_versions_say_what_they_are() -> None:
    """The pages name the command of a file; a part with its own commit or date is of another."""
    checked = 0
    for file in (ROOT / RESULTS).glob("*.json"):
        for key, part in json.loads(file.read_text(encoding="utf-8")).items():
            if isinstance(part, dict) and part.keys() & {"commit", "date"}:
                checked += 1
                assert part.keys() & {"what", "command"}, f"{file.name}: {key} does not say it"
    assert checked > 50


def rows_with_data() -> Iterator[tuple[Path, str, Path]]:
    """Table rows that cite a results file: page, row, file."""
    for page in PAGES:
        for row in re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.MULTILINE):
            for link in re.findall(r"\(([^()\s]*results/[^()\s]+\.json)\)", row):
                yield page, row, (page.parent / link).resolve()


def test_figures_in_tables_are_those_of_the_file_that_the_row_cites() -> None:
    checked = 0
    for page, row, file in rows_with_data():
        values = sorted(numbers_in(json.loads(file.read_text(encoding="utf-8"))))
        cells = re.sub(r"`.*?`", "", "|".join(row.strip("|").split("|")[1:]))
        for figure in re.findall(r"(?<![\w.])(?:(?<= )-)?\d[\d,]*(?:\.\d+)?(?![\w.])", cells):
            checked += 1
            number = figure.replace(",", "")
            step = 10.0 ** -len(number.partition(".")[2])
            near = any(abs(float(number) - value) <= 0.5001 * step for value in values)
            assert near, f"{page.name}: {figure} is not in {file.name}: {row}"
    assert checked > 50


def numbers_in(value: object) -> Iterator[float]:
    """All numbers in a results file, and the audio seconds per second of each benchmark cell."""
    if isinstance(value, dict):
        if {"streams", "real_time_factor"} <= value.keys():
            yield value["streams"] * 80 / value["ms_per_frame"]
        for part in value.values():
            yield from numbers_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def test_ci_finds_its_commands_in_the_readme() -> None:
    """CI takes the first command and the test command from the README by `grep -m1`."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    patterns = re.findall(r'grep -m1 "(.*?)" README.md', ci)
    assert len(patterns) == 2
    for pattern in patterns:
        assert re.search(pattern, README, re.MULTILINE), pattern


def test_readme_map_lists_every_top_level_folder() -> None:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    folders = {file.split("/")[0] for file in run.stdout.split() if "/" in file}
    for folder in folders:
        assert folder.startswith(".") or f"\n{folder}/" in README, folder


def test_readme_stays_short() -> None:
    assert README.count("\n") <= 130


def test_the_glossary_has_at_most_40_terms() -> None:
    rows = re.findall(r"^\| (?!---|term ).*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(rows) <= 40
