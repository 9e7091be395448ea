"""`check`: the table of both's tokens, and its exit status."""

import pytest

from megakernel_stt import Token
from megakernel_stt.comparison import Comparison
from megakernel_tts.cli.main import main


@pytest.mark.parametrize(
    ("theirs", "status", "lines"),
    [
        (
            (7, 8),
            0,
            [
                "       0.16        7        7  ' a'",
                "       0.24        8        8  'b'",
                "All 2 tokens are equal.",
            ],
        ),
        (
            (7, 9, 4),
            1,
            [
                "       0.16        7        7  ' a'",
                "!      0.24        8        9  'b'",
                "!                  -        4  4",
                "Token 1 differs: this package has 2, transformers has 3.",
            ],
        ),
    ],
)
def test_tokens_are_printed_side_by_side(
    theirs: tuple[int, ...],
    status: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = Token(7, " a", 0.16, 0.24, 1.0), Token(8, "b", 0.24, 0.32, 1.0)
    arguments = []

    def compare(*args: object) -> Comparison:
        arguments.append(args)
        return Comparison(ours, theirs, tuple(str(i) for i in theirs))

    monkeypatch.setattr("megakernel_stt.comparison.compare", compare)
    assert main(["check", "a-model", "a.wav", "--lookahead", "160"]) == status
    assert capsys.readouterr().out.splitlines() == [
        "    seconds     ours   theirs  text",
        *lines,
    ]
    assert arguments == [("a-model", "a.wav", "auto", 160)]


def test_a_missing_model_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no model", "a.wav"]) == 1
    assert "is not a recognition model" in capsys.readouterr().err
