"""Pipecat's own harness holds conversations with the voice agent (`pipecat eval run` does this)."""

import asyncio
from pathlib import Path

import pytest
from pipecat.evals.scenario import EvalScenarioFile, EvalScriptScenario
from pipecat.evals.session import EvalSession, EvalSessionParams

SCENARIOS = [*EvalScenarioFile.load(Path(__file__).with_name("eval.yaml"))]
PATIENCE = EvalSessionParams(default_timeout_ms=20_000)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_agent_passes(agent: str, scenario: EvalScriptScenario) -> None:
    session = EvalSession.from_scenario(scenario, f"ws://{agent}/ws", params=PATIENCE)
    result = asyncio.run(asyncio.wait_for(session.run(), 60))
    assert result.passed, result.failures
