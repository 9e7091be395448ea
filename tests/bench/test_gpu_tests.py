from pathlib import Path

import pytest

from bench.gpu_tests import summarise

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="1.5"/>
<testcase classname="tests.a" name="two" time="0.5">{two}</testcase>
<testcase classname="tests.b" name="one" time="2.0"><skipped message="no nvcc"/></testcase>
</testsuite></testsuites>"""
AGAIN = """<testsuite><testcase classname="tests.a" name="two" time="1.0"/></testsuite>"""


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("element", ["failure", "error"])
def test_outcomes_are_counted_in_total_and_by_module(tmp_path: Path, element: str) -> None:
    report = write(tmp_path / "a.xml", REPORT.format(two=f"<{element}/>"))
    summary = summarise([report])
    assert summary["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert summary["tests_by_module"] == {
        "tests.a": {"passed": 1, "failed": 1},
        "tests.b": {"skipped": 1},
    }
    assert summary["failed"] == ["tests.a::two"] and summary["skipped"] == ["tests.b::one"]
    assert summary["seconds"] == 4


def test_the_last_outcome_of_a_test_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.xml", REPORT.format(two="<failure/>"))
    again = write(tmp_path / "b.xml", AGAIN)
    assert summarise([first, again])["failed"] == []
    assert summarise([again, first])["failed"] == ["tests.a::two"]


def test_reports_without_tests_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tests in"):
        summarise([write(tmp_path / "a.xml", "<testsuites/>")])
