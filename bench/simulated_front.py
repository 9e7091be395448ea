"""`megakernel-tts serve --gpus` with simulated engines: python -m bench.simulated_front --help.

Like the command, it prints its addresses and serves until SIGTERM.
"""

import argparse

from bench.simulated_engine import SIMULATED_ENGINE
from megakernel_tts.server.app import Server
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.cluster.placement import Placement
from megakernel_tts.server.event_loop import run_loop
from megakernel_tts.server.serving import authority, bind, serve


async def _serve(num_engines: int, slots: int, frame_s: float) -> None:
    """Serves until SIGTERM."""
    placements = [Placement(f"cpu:{i}", "cpu", {}) for i in range(num_engines)]
    async with EngineCluster.start(
        str(frame_s), placements, slots, command=SIMULATED_ENGINE
    ) as cluster:
        server = Server(cluster)
        cluster.add_metrics(server.streams.metrics)
        with bind("127.0.0.1", 0) as listener:
            print(f"Web page: http://{authority(listener)}/", flush=True)
            await serve(server, listener)


def main() -> None:
    """Serves with the options of the command line."""
    parser = argparse.ArgumentParser(description="Serves speech of simulated engines.")
    parser.add_argument("--engines", type=int, default=1, help="engine processes (default: 1)")
    parser.add_argument("--slots", type=int, default=8, help="of each engine (default: 8)")
    parser.add_argument(
        "--frame-ms", type=float, default=5.0, help="time of a frame of all streams (default: 5)"
    )
    options = parser.parse_args()
    run_loop(_serve(options.engines, options.slots, options.frame_ms / 1000))


if __name__ == "__main__":
    main()
