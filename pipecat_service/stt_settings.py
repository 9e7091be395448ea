"""Settings of recognition, and the model's names of languages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipecat.services.settings import STTSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven

AUTOMATIC = "auto"  # the engine's name for a language that the model detects
_LOOKAHEAD_MS = 160  # final results do not wait for it


@dataclass
class MegakernelSTTSettings(STTSettings):
    """Settings of a recogniser; each but the model may be changed by an `STTUpdateSettingsFrame`.

    A change while the user speaks applies after the user's turn.

    Parameters:
        model: Model that the service loads, unless it is given an engine.
        language: A Pipecat language, or None. A multilingual model recognises this language, or
            detects it if there is None or the model lacks it. Another model ignores it.
        lookahead_ms: Length of a chunk, one of `STT.lookaheads_ms`: interim results come once per
            chunk, and longer chunks are more accurate. Final results do not wait for a chunk.
        interim: Whether interim results are sent.
    """

    lookahead_ms: int | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    interim: bool | NotGiven = field(default_factory=lambda: NOT_GIVEN)


def default_stt_settings(model: str | None) -> MegakernelSTTSettings:
    """Settings that detect the language.

    Args:
        model: Name of the model.
    """
    return MegakernelSTTSettings(
        model=model, language=None, lookahead_ms=_LOOKAHEAD_MS, interim=True
    )


def model_language(language: str | None, languages: Sequence[str]) -> str | None:
    """The model's name of a language.

    Args:
        language: A code such as `de` or `de-DE`; None to detect the language.
        languages: Those of the model, `STT.languages`.

    Returns:
        The same language, in the same region if the model has it, or `auto`; None if a
        multilingual model lacks the language.
    """
    if language is None or language == AUTOMATIC or not languages:
        return AUTOMATIC
    code = language.lower()
    exact = [name for name in languages if name.lower() == code]
    base = [name for name in languages if _base(name) == _base(code)]
    return next(iter(exact + base), None)


def pipecat_language(code: str | None) -> Language | None:
    """Pipecat's language of a code such as `de-DE`; None if it has none."""
    if code is None:
        return None
    try:
        return Language(code)
    except ValueError:
        return None


def _base(code: str) -> str:
    return code.split("-")[0].lower()
