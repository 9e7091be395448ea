"""An engine process with a simulated model, whose name is the time of a frame in seconds.

`EngineCluster` starts it with the command `SIMULATED_ENGINE`.
"""

import sys

from megakernel_tts.server.cluster.engine_process import serve

SIMULATED_ENGINE = (sys.executable, "-m", "bench.simulated_engine")

if __name__ == "__main__":
    from bench.simulation import simulated_tts  # torch, which a front does not need

    serve(lambda request: simulated_tts(request.slots, float(request.model)))
