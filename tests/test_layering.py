"""Import rules by folder; a new folder needs a rule here.

A test reads all files, since a test for each file takes more time than what it checks.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

import megakernel_stt
import megakernel_tts

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megakernel_tts"
NAME = PACKAGE.name

# What both packages share, and imports neither: folder or module -> what it may import of the
# others.
COMMON = ROOT / "megakernel_common"
COMMON_RULES: dict[str, set[str]] = {
    "errors": set(),
    "checks": set(),
    "devices": set(),
    "device_arbiter": set(),
    "events": set(),
    "exports": set(),
    "files": set(),
    "inference": set(),
    "kernels": {"files"},
    "layers": set(),
    "wakeup": set(),
    "fields": {"errors"},
    "hub": {"errors"},
    "process": {"errors"},
    "checkpoint": {"errors", "fields"},
    "threads": {"checkpoint"},
}
# Folder or top-level module of megakernel_tts -> what it may import of the others.
# "backends.protocol" is that module alone; "" is the package itself, whose names are public.
RULES: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),
    "sampling": {"errors"},
    "checks": {"errors"},
    "audio": {"errors"},
    "voice": {"checks", "errors"},
    "model": {"errors"},
    "kernels": {"errors", "model"},
    "text": {"checks", "errors", "model", "voice"},
    "codec": {"audio", "errors", "kernels", "model"},
    "align": {"audio", "errors", "kernels", "model", "text.markup", "text.scripts", "text.tags"},
    "backends": {"errors", "kernels", "model", "sampling"},
    "session": {"align", "checks", "errors", "text"},
    "live": {"session"},
    "speed": {"errors"},
    "speech": {"align", "audio", "errors", "session"},
    "engine": {"align", "backends.protocol", "backends.slot_snapshot", "codec", "errors"}
    | {"sampling", "session", "speed", "text", "voice"},
    "info": {"model"},
    "description": {"info", "model"},
    "loader": {"align", "backends", "checks", "codec", "engine", "errors", "machine", "model"}
    | {"sampling", "text"},
    "open_queue": {"session"},
    "request": {"checks", "sampling", "session", "speed", "text", "voice"},
    "tts": {"audio", "backends", "checks", "description", "errors", "info", "loader", "model"}
    | {"open_queue", "request", "sampling", "session", "speech", "speed", "text", "voice"}
    | {"warmup"},
    "warmup": {"info", "loader", "model", "sampling", "speed", "tts", "voice"},
    "calibration": {"", "align", "audio", "backends", "checks", "errors", "info", "loader", "model"}
    | {"text", "tts", "voice"},
    "bench": {"", "backends", "model", "warmup"},
    "server": {""},
    "cli": {"", "audio", "bench", "calibration", "description", "kernels", "machine", "server"},
    "__main__": {"cli"},
}
# Recognition: the same, for megakernel_stt.
STT = ROOT / "megakernel_stt"
STT_RULES: dict[str, set[str]] = {
    "errors": set(),
    "audio": {"errors", "model.config"},
    "text": {"model.config"},
    "transcript": {"text.words"},
    "model": {"errors", "text.tokenizer"},
    "network": {"model.config", "model.weights"},
    "kernels": {"model.config", "model.weights", "network"},
    "session": {"audio", "errors", "transcript"},
    "engine": {"audio", "errors", "kernels", "model", "network", "session", "text.words"}
    | {"transcript"},
    "stt": {"audio", "engine", "errors", "kernels", "model", "network", "session", "transcript"},
    "comparison": {"audio", "errors", "model", "stt", "text"},
}

# Checkpoints with random weights hold the codec's tensors as well.
EXCEPTIONS = {
    "model.random_checkpoint": {"codec.weights"},
    "model.random_released": {"codec.weights"},
}


def module_of(file: Path) -> str:
    """The dotted name of a file of the repository."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imported(file: Path, *, lazy: bool = True, typing: bool = True) -> frozenset[str]:
    """The modules and names that a file imports, dotted.

    Args:
        file: A Python file.
        lazy: Also what functions import.
        typing: Also what is imported for type checkers alone.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree_of(file)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: use absolute imports"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


COMMON_FILES = sorted(COMMON.rglob("*.py"))
FILES = sorted(PACKAGE.rglob("*.py"))
STT_FILES = sorted(STT.rglob("*.py"))
SERVICE = sorted((ROOT / "pipecat_service").rglob("*.py"))
assert COMMON_FILES and FILES and STT_FILES and SERVICE, "a package was renamed"
MODULES = {module_of(file) for file in FILES}
# The only public names that import torch are modules to the rule of lazy imports.
FILE_OF = {module_of(file): file for file in COMMON_FILES + FILES + STT_FILES + SERVICE} | {
    f"{NAME}.TTS": PACKAGE / "tts.py",
    f"{STT.name}.STT": STT / "stt.py",
}


def test_imports_follow_the_folder_rules() -> None:
    # `from package import module` names the package as well.
    packages = {rule for rule in RULES if any(m.startswith(f"{NAME}.{rule}.") for m in MODULES)}
    for file in FILES:
        folder = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if folder == "__init__":
            continue  # lazy exports; pinned by test_api.py
        assert folder in RULES, f"{folder} has no rule in RULES"
        module = module_of(file).removeprefix(f"{NAME}.")
        allowed = RULES[folder] | {folder} | EXCEPTIONS.get(module, set())
        for name in imported(file) & MODULES:
            target = name.removeprefix(NAME).removeprefix(".")
            if target == "" and folder not in ("calibration", "bench", "cli", "server"):
                continue  # the parent package, which every absolute import names
            is_allowed = target in allowed | packages or target.split(".")[0] in allowed
            assert is_allowed, f"{module} may not import {name}"


def test_recognition_follows_its_folder_rules() -> None:
    modules = {module_of(file) for file in STT_FILES}
    for file in STT_FILES:
        folder = file.relative_to(STT).parts[0].removesuffix(".py")
        if folder == "__init__":
            continue  # lazy exports; pinned by tests/stt/test_api.py
        assert folder in STT_RULES, f"{folder} has no rule in STT_RULES"
        parents = {"", *(rule.split(".")[0] for rule in STT_RULES[folder]), folder}
        names = imported(file, typing=False)
        for name in names & modules:
            target = name.removeprefix(STT.name).removeprefix(".")
            top = target.split(".")[0]
            is_allowed = target in STT_RULES[folder] | parents
            is_allowed |= top == folder or top in STT_RULES[folder]
            assert is_allowed, f"{file}: {folder} may not import {name}"
        assert NAME not in {name.split(".")[0] for name in names}, f"{file}: see megakernel_common"


def test_what_is_shared_imports_neither_package() -> None:
    for file in COMMON_FILES:
        module = file.relative_to(COMMON).parts[0].removesuffix(".py")
        if module != "__init__":
            names = {name for name in imported(file) if name.split(".")[0].startswith("megakernel")}
            allowed = tuple(f"{COMMON.name}.{other}" for other in (module, *COMMON_RULES[module]))
            assert all(name.startswith(allowed) for name in names - {COMMON.name}), (file, names)


def test_synthesis_does_not_import_recognition() -> None:
    """But for the command line, which has the commands of both."""
    for file in FILES:
        if file.relative_to(PACKAGE).parts[0] != "cli":
            assert STT.name not in {name.split(".")[0] for name in imported(file)}, file


def test_modules_form_no_import_cycle() -> None:
    files = COMMON_FILES + FILES + STT_FILES
    modules = {module_of(file) for file in files}
    graph = {
        module_of(file): (imported(file, typing=False) & modules) - {NAME, module_of(file)}
        for file in files
    }
    packages = {module_of(file) for file in files if file.stem == "__init__"}
    TopologicalSorter({m: needs - packages for m, needs in graph.items()}).prepare()


# Packages that only some installations have: those of extras, and `cuda` of torch's GPU wheels.
OPTIONAL = {"av", "cuda", "matplotlib", "opentelemetry", "sounddevice", "starlette", "uvicorn"} | {
    "wyoming"
}  # fmt: skip
# Module -> what its functions import although it needs neither torch nor an optional package.
LAZY = {
    "__main__": {f"{NAME}.cli.main"},  # once the handler of interrupts is set
    "audio": {"soundfile", "soxr"},  # native libraries, for recordings only
    "cli.doctor": {"soundfile"},  # reports whether it can be imported
    "megakernel_common.kernels.build": {"ninja"},  # where no ninja is on the PATH
    "megakernel_stt.audio": {"soundfile", "soxr"},  # as above
}


def lazy_imports(file: Path) -> set[str]:
    """The modules that the functions of a file import."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    outer = [node for node in ast.walk(tree_of(file)) if isinstance(node, functions)]
    found = set[str]()
    for node in (inner for function in outer for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & FILE_OF.keys()) or {node.module or ""}
    return found


@cache
def packages_of(module: str) -> frozenset[str]:
    """The packages that are imported with a module, itself included."""
    pending, seen = [module], set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            if name in FILE_OF:
                pending += imported(FILE_OF[name], lazy=False, typing=False)
    return frozenset(name.split(".")[0] for name in seen)


def test_functions_import_only_torch_and_optional_packages() -> None:
    for file in COMMON_FILES + FILES + STT_FILES + SERVICE:
        module = module_of(file)
        # What the module itself does without.
        missing = ({"torch"} | OPTIONAL) - packages_of(module)
        needless = {
            name
            for name in lazy_imports(file) - LAZY.get(module.removeprefix(f"{NAME}."), set())
            if not (packages_of(name) & missing or name.startswith(f"{NAME}.server."))
        }
        assert not needless, module


def test_engine_modules_do_not_import_clients() -> None:
    clients = {"pipecat", "pipecat_service", "tests", "bench", "examples", "qwen_tts"}
    for file in COMMON_FILES + FILES + STT_FILES:
        assert not {name.split(".")[0] for name in imported(file)} & clients, file


PUBLIC = {
    *(NAME, *(f"{NAME}.{name}" for name in megakernel_tts.__all__)),
    *(STT.name, *(f"{STT.name}.{name}" for name in megakernel_stt.__all__)),
}


def test_pipecat_service_uses_public_names_only() -> None:
    packages = NAME, STT.name, COMMON.name
    for file in SERVICE:
        names = imported(file)
        ours = {name for name in names if name.split(".")[0] in packages}
        assert ours <= PUBLIC, (file, ours - PUBLIC)
        others = {"tests", "bench", "examples", "torch"}
        assert not {name.split(".")[0] for name in names} & others, file


def test_the_server_uses_public_names_only() -> None:
    files = sorted((PACKAGE / "server").rglob("*.py"))
    assert files
    for file in files:
        ours = {name for name in imported(file) if name.split(".")[0] in (NAME, COMMON.name)}
        others = {name for name in ours if not name.startswith(f"{NAME}.server")}
        assert others <= PUBLIC, (file, others - PUBLIC)
        assert "torch" not in {name.split(".")[0] for name in imported(file)}, file


# Training a voice writes checkpoints, samples and word times: it uses the models' layout, the
# codec, wav files and the calibration's format.
TRAINING = ("model", "codec", "text.tokenizer", "audio", "calibration")


def test_examples_use_public_names_only() -> None:
    files = sorted((ROOT / "examples").rglob("*.py"))
    assert files
    for file in files:
        training = TRAINING if "train_voice" in file.parts else ()
        allowed = tuple(f"{NAME}.{part}" for part in training)
        ours = {name for name in imported(file) if name.split(".")[0] == NAME}
        inside = {name for name in ours - PUBLIC if not name.startswith(allowed)}
        assert not inside, f"{file} imports {sorted(inside)}"


def names_in_map(page: Path, package: str) -> list[str]:
    """The names of a package's lines in the map of a page: each is before three spaces."""
    text = page.read_text(encoding="utf-8")
    lines = text[text.index(f"\n{package}/") :].splitlines()[2:]
    entries = takewhile(lambda line: line.startswith("  "), lines)
    return [name for line in entries for name in line.strip().split("   ")[0].split(", ")]


@pytest.mark.parametrize("package", [COMMON.name, NAME, STT.name, "pipecat_service"])
def test_architecture_map_lists_every_module(package: str) -> None:
    listed = names_in_map(ROOT / "docs" / "architecture.md", package)
    files = {file.stem for file in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert sorted(listed) == sorted(files)


def test_readme_map_lists_every_folder_of_the_package() -> None:
    folders = {f"{file.parent.name}/" for file in PACKAGE.glob("*/__init__.py")}
    listed = names_in_map(ROOT / "README.md", NAME)
    assert sorted(listed) == sorted(folders | {"voices/"})


def test_modules_hold_no_mutable_state() -> None:
    """Module-level names are constants, types, functions and loggers, so engines share nothing."""
    for file in COMMON_FILES + FILES + STT_FILES + SERVICE:
        for node in tree_of(file).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                for name in names:
                    constant = name.lstrip("_").isupper() or name[0].isupper()
                    assert constant or name.startswith("__") or name == "_log", f"{file}: {name}"


def test_a_class_name_has_one_meaning() -> None:
    """Within a package; synthesis and recognition both have a session, a stream and a loop."""
    synthesis = [*COMMON_FILES, *FILES, *sorted((ROOT / "bench").glob("*.py"))]
    for package in (synthesis, [*COMMON_FILES, *STT_FILES], SERVICE):
        files: dict[str, Path] = {}
        for file in package:
            for node in tree_of(file).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    assert node.name not in files, f"{node.name}: {files[node.name]} and {file}"
                    files[node.name] = file


def test_a_source_file_has_at_most_450_lines() -> None:
    tops = COMMON.name, NAME, STT.name, "pipecat_service", "csrc", "bench", "examples", "tests"
    suffixes = ".py", ".js", ".css", ".cu", ".cuh", ".cpp", ".cc", ".h"
    for top in tops:
        for file in (ROOT / top).rglob("*.*"):
            if file.suffix in suffixes:
                assert file.read_text(encoding="utf-8").count("\n") <= 450, file
