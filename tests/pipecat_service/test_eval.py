"""Pipecat's own harness holds conversations with the voice agent (`pipecat eval run` does this).

The harness compares the text of the agent's speech; this test checks that audio was received.
No recogniser transcribes it: on a busy machine it arrives in chunks too short for one.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pipecat.evals.scenario import EvalScenarioFile, EvalScriptScenario
from pipecat.evals.session import EvalSession, EvalSessionParams

from tests.fakes import TIMEOUT_S

SCENARIOS = [*EvalScenarioFile.load(Path(__file__).with_name("eval.yaml"))]
LOUD = 0.03  # peak of a window, of full scale
WINDOWS_PER_S = 50
MIN_SPEECH_S = {"conversation": 2.0, "barge_in": 0.3}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_agent_passes(agent: str, scenario: EvalScriptScenario, tmp_path: Path) -> None:
    recording = tmp_path / "conversation.wav"
    params = EvalSessionParams(default_timeout_ms=int(1000 * TIMEOUT_S), record_path=str(recording))
    session = EvalSession.from_scenario(scenario, f"ws://{agent}/ws", params=params)
    result = asyncio.run(asyncio.wait_for(session.run(), 3 * TIMEOUT_S))
    assert result.passed, result.failures
    if minimum_s := MIN_SPEECH_S.get(scenario.name.split("/")[1]):
        pcm, rate = soundfile.read(recording)
        size = rate // WINDOWS_PER_S
        peaks = np.abs(pcm[: len(pcm) // size * size]).reshape(-1, size).max(1)
        assert np.count_nonzero(peaks > LOUD) / WINDOWS_PER_S >= minimum_s
