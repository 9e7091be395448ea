"""The state of a stream is written by its own module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNED = {"stream", "segment", "active_segment", "delivery", "chunking"}


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of a stream or its parts that are assigned from outside."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)):
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
        if name in OWNED:
            yield node


@pytest.mark.parametrize("package", ["megakernel_tts", "megakernel_stt"])
def test_no_engine_module_assigns_the_state_of_a_stream(package: str) -> None:
    found = [
        f"{file.name}:{node.lineno}: {ast.unparse(node)}"
        for file in (ROOT / package / "engine").glob("*.py")
        for node in written(ast.parse(file.read_text()))
    ]
    assert not found, "a method of the owner should write it"


def test_assignments_from_outside_are_found() -> None:
    source = "stream.prompt = None\nself.stream.active_segment.outcome = 1\nself.stream = stream"
    assert [ast.unparse(node) for node in written(ast.parse(source))] == [
        "stream.prompt",
        "self.stream.active_segment.outcome",
    ]
