"""An engine process with a simulated model, whose name is the time of a frame in seconds.

`EngineCluster` starts it with the command `SIMULATED_ENGINE`.
"""

import sys

from megakernel_tts.server.cluster.engine_process import serve
from megakernel_tts.server.cluster.messages import Load
from megakernel_tts.server.engine import SpeechEngine

SIMULATED_ENGINE = (sys.executable, "-m", "bench.simulated_engine")


def _load(request: Load) -> SpeechEngine:
    from bench.simulation import simulated_tts  # torch, which a front does not need

    return simulated_tts(request.slots, float(request.model))


if __name__ == "__main__":
    serve(_load)
