"""Who may know whom. A new file must find its place here."""

import ast
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megakernel_tts"

LEAVES = {"errors"}
PUBLIC = {"", "errors"}

# Module -> the modules of ours that it may import.
ALLOWED: dict[str, set[str]] = {
    "": set(),  # lazily, all of the public homes
    "errors": set(),
    "layers": set(),
    "fields": LEAVES,
    "config": LEAVES | {"fields"},
    "audio": LEAVES,
    "align": {"align", "align.search"},
    "align.search": set(),
    "sampling": LEAVES,
    "split": LEAVES,
    "guard": LEAVES,
    "voice": LEAVES | {"text"},
    "doctor": LEAVES,
    "checkpoint": LEAVES | {"fields"},
    "weights": {"checkpoint", "config"},
    "text": LEAVES | {"fields"},
    "codec": set(),
    "codec.weights": {"checkpoint", "config"},
    "codec.decoder": {"codec.weights", "config", "layers", "codec"},
    "codec.packing": {"codec.weights"},
    "codec.kernels": {"codec.decoder", "codec.packing", "codec.weights", "config", "layers"},
    "codec.cuda": {"codec.decoder", "codec.kernels", "codec.weights", "config"},
    "codec.encoder": {"codec.weights", "config", "layers", "codec"},
    "codec.speaker": {"config", "layers", "weights"},
    "align.words": set(),
    "align.attention": set(),
    "align.online": set(),
    "align.timing": {"align.attention", "align.online", "align.words", "audio"},
    "align.estimate": {"align.words", "audio"},
    "align.calibration": {"align.estimate", "align.timing", "align.words", "fields"},
    "align.truth": {"fields"},
    "align.ranking": {"align.attention", "align.calibration", "align.online", "align.timing"}
    | {"align.words"},
    "align.overhear": LEAVES
    | {"align.ranking", "align.truth", "align.words", "audio", "loader", "prompt", "reference"}
    | {"tts", "voice"},
    # All but its options is imported when it is run.
    "calibrate": {"align.calibration", "align.overhear", "align.ranking", "align.truth"}
    | {"align", "backend", "console", "hub", "info", "loader", "tts"},
    "text_vectors": {"layers", "weights"},
    "prompt": LEAVES | {"config", "text", "text_vectors", "voice", "weights"},
    # Those that run the networks are imported inside the chooser alone.
    "backend": {"checkpoint", "config", "cuda", "frames", "reference", "sampling", "suspension"}
    | {"weights"},
    "watch": set(),
    "stack": {"config", "layers", "watch", "weights"},
    "reference": {"config", "frames", "layers", "prefix_cache", "sampling", "stack", "suspension"}
    | {"watch", "weights"},
    "frames": {"sampling"},
    "passes": set(),
    "prefix_cache": set(),
    "suspension": set(),
    "packing": {"checkpoint", "weights"},
    "cuda": LEAVES
    | {"config", "frames", "packing", "passes", "prefix_cache", "sampling", "suspension"}
    | {"weights"},
    "script": {"guard", "split", "text"},
    "session": LEAVES | {"align.words", "script", "text"},
    "stream": {"frames", "guard", "prompt", "sampling", "script", "session"}
    | {"align.calibration", "align.timing", "align.words", "codec.decoder", "suspension"},
    "vocoder": {"audio", "codec", "codec.cuda", "codec.decoder", "codec.weights", "config"},
    "bell": set(),
    "sounding": {"frames", "stream", "vocoder"},
    "loop": LEAVES
    | {"backend", "bell", "frames", "prompt", "session", "sounding", "stream", "vocoder"},
    "engine": LEAVES
    | {
        "align.calibration",
        "backend",
        "codec.decoder",
        "loop",
        "prompt",
        "sampling",
        "script",
        "session",
        "stream",
    }
    | {"vocoder", "voice"},
    "random_checkpoint": {"checkpoint", "codec.weights", "config", "weights"},
    "random_released": {"checkpoint", "codec.weights", "config", "random_checkpoint", "weights"},
    "hub": LEAVES,
    "loader": LEAVES
    | {
        "align.calibration",
        "backend",
        "checkpoint",
        "codec.decoder",
        "codec.encoder",
        "codec.speaker",
        "codec.weights",
    }
    | {"config", "doctor", "engine", "fields", "prompt", "sampling", "text", "vocoder", "weights"},
    "info": {"config", "hub", "prompt"},
    # A session read to its end.
    "speech": LEAVES | {"align.timing", "align.words", "audio", "session"},
    "tts": LEAVES
    | {"audio", "backend", "config", "hub", "info", "loader", "sampling", "script"}
    | {"session", "speech", "split", "text", "voice"},
    "console": set(),
    "output": {"audio", "console"},
    "say": PUBLIC | {"console", "output"},
    "bench": set(),
    "bench.options": set(),
    "bench.timing": LEAVES | {"bench", "sampling", "session", "tts", "voice"},
    "bench.stages": {"bench", "bench.timing", "tts"},
    "bench.event_loop": {"bench", "bench.timing", "session", "tts"},
    "bench.peers": {"bench", "sampling"},
    "bench.report": {
        "bench",
        "bench.event_loop",
        "bench.peers",
        "bench.stages",
        "bench.timing",
        "sampling",
    },
    "bench.command": {"backend", "hub", "random_released", "tts"}
    | {"bench", "bench.event_loop", "bench.options", "bench.peers", "bench.report"}
    | {"bench.stages", "bench.timing"},
    "cli": PUBLIC
    | {"bench.command", "bench.options", "bench.report", "calibrate", "console", "doctor"}
    | {"output", "say"},
    "__main__": {"cli"},
}


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(file: Path) -> set[str]:
    """The modules that a file names in import statements, wherever they stand."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide who knows whom"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
SERVICE = sorted((ROOT / "pipecat_service").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_stay_within_the_rules(file: Path) -> None:
    module = module_of(file)
    assert module in ALLOWED, f"{module} has no place in the layering"
    modules = {module_of(f) for f in FILES}
    prefix = "megakernel_tts"
    ours = {
        name.removeprefix(prefix).lstrip(".")
        for name in imported(file)
        if name == prefix or name.startswith(f"{prefix}.")
    } & modules
    if module == "":
        homes = {"align.words", "audio", "errors", "info", "sampling", "session", "speech"}
        assert ours <= homes | {"tts", "voice"}
        return
    surplus = ours - ALLOWED[module] - {"", "codec"} if module != "cli" else ours - ALLOWED[module]
    assert not surplus, f"{module} may not import {sorted(surplus)}"


@pytest.mark.parametrize("package", ["megakernel_tts", "pipecat_service"])
def test_the_readme_tells_where_every_module_belongs(package: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = readme[readme.index(f"\n{package}/\n") :].splitlines()[2:]
    rooms = takewhile(lambda line: line.startswith(" "), lines)
    told = Counter(name for line in rooms for name in line.strip().split("   ")[0].split(", "))
    folder = ROOT / package
    files = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("__")}
    files |= {f"{file.parent.name}/" for file in folder.glob("*/__init__.py")}
    assert told - Counter({"voices/demo/": 1}) == Counter(files)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_the_engine_side_knows_no_pipecat_and_no_tests(file: Path) -> None:
    strangers = {"pipecat", "pipecat_service", "tests", "bench", "examples", "qwen_tts"}
    assert not {name.split(".")[0] for name in imported(file)} & strangers


@pytest.mark.parametrize("file", SERVICE, ids=lambda file: file.stem)
def test_the_pipecat_service_sees_public_names_alone(file: Path) -> None:
    homes = {f"megakernel_tts.{name}" for name in __import__("megakernel_tts").__all__}
    names = imported(file)
    assert {name for name in names if name.startswith("megakernel_tts.")} <= homes
    assert not {name.split(".")[0] for name in names} & {"tests", "bench", "examples", "torch"}


def test_examples_see_public_names_alone() -> None:
    """Training makes checkpoints, so it knows their layout, but nothing that speaks with them."""
    layout = {"checkpoint", "codec.weights", "config", "layers", "random_checkpoint", "text"}
    judged = {"codec.decoder", "codec.encoder"}
    inside = {f"megakernel_tts.{name}" for name in layout | judged | {"weights"}}
    for file in (ROOT / "examples").rglob("*.py"):
        training = file.parent.name == "train_voice"
        allowed = inside | {"megakernel_tts.codec"} if training else set[str]()
        ours = {name for name in imported(file) if name.startswith("megakernel_tts.")}
        homes = {f"megakernel_tts.{name}" for name in __import__("megakernel_tts").__all__}
        modules = {name for name in ours if not any(name.startswith(f"{a}.") for a in allowed)}
        assert modules <= homes | allowed, f"{file} reaches inside: {sorted(modules - homes)}"


def test_no_module_state() -> None:
    """Module-level names are constants, types, functions and loggers: two engines share nothing."""
    for file in FILES + SERVICE:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                for name in names:
                    fine = name.isupper() or name.startswith("__") or name[0].isupper()
                    fine = fine or name.lstrip("_").isupper() or name == "_log"
                    assert fine, f"{file}: {name} looks like state"
