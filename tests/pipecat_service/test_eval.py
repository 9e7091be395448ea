"""Pipecat's own harness holds conversations with the voice agent (`pipecat eval run` does this).

What the harness is told of the agent's speech is compared there; that it can be heard, here.
No recogniser listens: on a busy machine speech comes in pieces too short for one.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pipecat.evals.scenario import EvalScenarioFile, EvalScriptScenario
from pipecat.evals.session import EvalSession, EvalSessionParams

from tests.pipecat_service.bot import PATIENCE

SCENARIOS = [*EvalScenarioFile.load(Path(__file__).with_name("eval.yaml"))]
LOUD = 0.03  # of full scale
SPOKEN = {"conversation": 2.0, "barge_in": 0.3}  # seconds that are loud at least


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_agent_passes(agent: str, scenario: EvalScriptScenario, tmp_path: Path) -> None:
    recording = tmp_path / "conversation.wav"
    params = EvalSessionParams(default_timeout_ms=int(1000 * PATIENCE), record_path=str(recording))
    session = EvalSession.from_scenario(scenario, f"ws://{agent}/ws", params=params)
    result = asyncio.run(asyncio.wait_for(session.run(), 3 * PATIENCE))
    assert result.passed, result.failures
    if least := SPOKEN.get(scenario.name.split("/")[1]):
        pcm, rate = soundfile.read(recording)
        assert np.count_nonzero(np.abs(pcm) > LOUD) / rate >= least
