"""`megakernel-tts serve`: serves speech over HTTP and WebSockets."""

import argparse
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megakernel_tts.cli.configuration import Configuration, Setting
from megakernel_tts.cli.console import UsageError, file_path, nonempty, permanent_imports

if TYPE_CHECKING:
    from megakernel_tts.server.app import Server
    from megakernel_tts.server.cluster.placement import Placement
    from megakernel_tts.server.engine import SpeechEngine
    from megakernel_tts.server.serving import Certificate
    from megakernel_tts.server.settings import ServerSettings
    from megakernel_tts.server.tracing import Tracing
    from megakernel_tts.server.wyoming import WyomingService

_log = logging.getLogger("megakernel_tts.server")

_MAX_PORT = 65_535
_WYOMING_ADDRESS = ("127.0.0.1", 10_200)
_TRACE_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser, except for `--model` and `--config`."""
    parser.add_argument(
        "--host", type=nonempty, default="127.0.0.1", help="address (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="port; 0 selects a free one (default: 8000)"
    )
    parser.add_argument(
        "--wyoming",
        type=_wyoming_address,
        nargs="?",
        const=_WYOMING_ADDRESS,
        metavar="HOST:PORT",
        help="also serve Wyoming's protocol, for Home Assistant (default address: 127.0.0.1:10200)",
    )
    parser.add_argument(
        "--zeroconf",
        type=nonempty,
        metavar="NAME",
        help="announce Wyoming's address in the local network under this name",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--gpus",
        type=nonempty,
        metavar="N,N",
        help="all, or the numbers of some GPUs: an engine runs on each, in a process of its own. "
        "Without a GPU, as many engines run on the CPU",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=8,
        help="streams that speak at once, on each GPU (default: 8)",
    )
    parser.add_argument(
        "--cache-positions",
        type=int,
        metavar="N",
        help="positions of all streams together that the KV cache on each GPU holds "
        "(default: 2,048 for each slot, or as many as fit into its memory)",
    )
    parser.add_argument(
        "--prefill-positions",
        type=int,
        metavar="N",
        help="positions of prompts that run between two frames while streams speak (default: 128)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=32,
        help="streams that may wait in addition; more are refused at once (default: 32)",
    )
    parser.add_argument(
        "--queue-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="a request without audio after this time is refused (default: 5)",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        default=1000,
        metavar="N",
        help="connections that may be open; requests on further ones are refused (default: 1000)",
    )
    parser.add_argument(
        "--voice",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a cloned voice for a Base model, from say --save-voice; may be repeated",
    )
    parser.add_argument(
        "--voice-dir",
        type=file_path,
        metavar="DIR",
        help="a folder that keeps the voices which clients upload to a Base model",
    )
    parser.add_argument(
        "--pronunciations",
        type=file_path,
        metavar="FILE",
        help="respellings of words in all requests: a TOML file with lines like "
        "nginx = 'engine ex', or JSON",
    )
    parser.add_argument(
        "--api-key-file",
        type=file_path,
        metavar="FILE",
        help="a TOML file with the keys of clients and their limits",
    )
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="serve without keys although other machines reach the address",
    )
    parser.add_argument(
        "--allowed-host",
        type=_host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which clients reach a server without keys, such as that of a proxy; may "
        "be repeated. Addresses, localhost and the name of --host are always allowed",
    )
    parser.add_argument(
        "--tls-cert", type=file_path, metavar="FILE", help="a PEM file with a certificate, for TLS"
    )
    parser.add_argument(
        "--tls-key", type=file_path, metavar="FILE", help="a PEM file with its private key"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of the log on standard error (default: text)",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    Args:
        options: From a parser that `Configuration` has taken over.

    Returns:
        0, after the open streams have finished; errors are raised.

    Raises:
        UsageError: An extra is not installed, or the options are invalid.
        MegakernelTTSError: The model cannot be loaded.
        ValueError: The device is invalid, or the voices do not suit the model.
        OSError: The address is in use, or a file cannot be read.
    """
    try:
        from megakernel_tts.server.app import Server
        from megakernel_tts.server.cluster.engine_cluster import EngineCluster
        from megakernel_tts.server.event_loop import run_loop
        from megakernel_tts.server.logs import configure_logging
        from megakernel_tts.server.serving import bind
    except ModuleNotFoundError as error:
        raise _missing(error, "server") from None
    configuration: Configuration = options.configuration
    configured = configuration.resolve(options, os.environ)
    options = argparse.Namespace(
        **{name.replace("-", "_"): setting.value for name, setting in configured.items()}
    )
    settings = _settings(options)
    placements = _placements(options)
    certificate = _certificate(options)
    tracing = _tracing(options.model, os.environ)
    configure_logging(options.log_format)
    _log_configuration(configured, settings)
    with (
        closing(tracing) if tracing else nullcontext(),
        bind(options.host, options.port) as listener,
        _wyoming(options) as wyoming,
    ):

        async def serve_engine(engine: "SpeechEngine") -> None:
            server = Server(engine, settings, wyoming, tracing)
            if isinstance(engine, EngineCluster):
                engine.add_metrics(server.streams.metrics)
            await _serve(server, listener, certificate, wyoming)

        if placements:
            run_loop(_serve_cluster(options, placements, serve_engine))
        else:
            with permanent_imports():
                from megakernel_tts import TTS

            with TTS.load(
                options.model,
                options.device,
                slots=options.slots,
                cache_positions=options.cache_positions,
                prefill_positions=options.prefill_positions,
            ) as tts:
                run_loop(serve_engine(tts))
    return 0


async def _serve_cluster(
    options: argparse.Namespace,
    placements: "Sequence[Placement]",
    serve_engine: "Callable[[SpeechEngine], Awaitable[None]]",
) -> None:
    """Serves engines in processes of their own."""
    from megakernel_tts.server.cluster.engine_cluster import EngineCluster

    async with EngineCluster.start(
        options.model,
        placements,
        options.slots,
        cache_positions=options.cache_positions,
        prefill_positions=options.prefill_positions,
        log_format=options.log_format,
    ) as cluster:
        await serve_engine(cluster)


async def _serve(
    server: "Server",
    listener: socket.socket,
    certificate: "Certificate | None",
    wyoming: "WyomingService | None",
) -> None:
    """Prints the URLs and serves."""
    from megakernel_tts.server.serving import authority, serve

    address, secure = authority(listener), "s" if certificate else ""
    print(f"Web page: http{secure}://{address}/")
    print(f"OpenAI base URL: http{secure}://{address}/v1")
    print(f"Cartesia WebSocket: ws{secure}://{address}/tts/websocket", flush=True)
    if wyoming is not None:
        print(f"Wyoming: {wyoming.url}", flush=True)
    await serve(server, listener, certificate)


def _placements(options: argparse.Namespace) -> "list[Placement]":
    """The engine processes; none for an engine in this process."""
    from megakernel_tts.server.cluster.placement import parse_gpus, place_engines

    if options.gpus is None:
        return []
    if options.device != "auto":
        raise UsageError("--gpus and --device contradict each other; give one of them")
    if not hasattr(os, "memfd_create"):
        raise UsageError("--gpus needs Linux; leave it out")
    try:
        return place_engines(parse_gpus(options.gpus), os.environ)
    except ValueError as error:
        raise UsageError(f"--gpus: {error}") from None


def _missing(error: ModuleNotFoundError, extra: str) -> UsageError:
    return UsageError(
        f"{error.name} is not installed; install the extra {extra}: "
        f"pip install 'megakernel-tts[{extra}]'"
    )


def _log_configuration(configured: Mapping[str, Setting], settings: "ServerSettings") -> None:
    """Logs each option, the names of the keys, and which options are from where."""
    fields = {name: setting.value for name, setting in configured.items()}
    fields["keys"] = ", ".join(key.name for key in settings.api_keys) or None
    for source in ("file", "environment", "command line"):
        names = [name for name, setting in configured.items() if setting.source == source]
        fields[f"from_{source.replace(' ', '_')}"] = ", ".join(names) or None
    shown = {name: value for name, value in fields.items() if value not in (None, [])}
    _log.info("configuration", extra={"fields": shown})


def _settings(options: argparse.Namespace) -> "ServerSettings":
    from megakernel_tts.server.serving import is_loopback
    from megakernel_tts.server.settings import check_access, read_settings

    reached = None if is_loopback(options.host) else options.host
    try:
        check_access(reached, keys=options.api_key_file is not None, no_auth=options.no_auth)
        return read_settings(
            api_key_file=options.api_key_file,
            voice=options.voice,
            voice_dir=options.voice_dir,
            pronunciations=options.pronunciations,
            max_queue=options.max_queue,
            queue_timeout=options.queue_timeout,
            max_connections=options.max_connections,
            allowed_hosts=_allowed_hosts(options),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _allowed_hosts(options: argparse.Namespace) -> list[str] | None:
    """Names of hosts for which requests are served; None for all names."""
    from megakernel_tts.server.serving import is_loopback

    open_to_pages = is_loopback(options.host) and options.api_key_file is None
    if not (options.allowed_host or open_to_pages):
        return None
    return [options.host, *options.allowed_host]


@contextmanager
def _wyoming(options: argparse.Namespace) -> Generator["WyomingService | None"]:
    """The service for Wyoming's clients, whose address is in use until the block ends."""
    from megakernel_tts.server.serving import bind, is_loopback

    if options.wyoming is None:
        if options.zeroconf is not None:
            raise UsageError("--zeroconf announces Wyoming's address; give --wyoming as well")
        yield None
        return
    try:
        from megakernel_tts.server.wyoming import WyomingService
    except ModuleNotFoundError as error:
        raise _missing(error, "wyoming") from None
    host, port = options.wyoming
    if is_loopback(host):
        if options.zeroconf is not None:
            raise UsageError(
                f"other machines do not reach {host}; --zeroconf needs another address"
            )
    elif not options.no_auth:
        raise UsageError(
            f"other machines reach {host}, and Wyoming's protocol has no keys; give --no-auth if "
            "all of them may use this server"
        )
    with bind(host, port) as listener:
        try:
            service = WyomingService(listener, options.zeroconf)
        except ValueError as error:
            raise UsageError(str(error)) from None
        yield service


def _port(option: str) -> int:
    """Type of the option `--port`; the system would take a larger number modulo 65,536."""
    if not option.isdecimal() or int(option) > _MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"{option!r} is no port; it must be a whole number from 0 to {_MAX_PORT}"
        )
    return int(option)


def _host_name(option: str) -> str:
    """Type of the option `--allowed-host`: a name, without a scheme or a port."""
    if urlsplit(f"//{option}").hostname != option.lower() or "*" in option:
        raise argparse.ArgumentTypeError(
            f"{option!r} is no name of a host; it has no scheme, port, path or *"
        )
    return option


def _wyoming_address(option: str) -> tuple[str, int]:
    """Type of the option `--wyoming`: a host, and a port if it is another than the default."""
    url = urlsplit(f"//{option}")
    try:
        port = url.port
    except ValueError:
        port = -1
    if not url.hostname or port == -1 or url.path:
        raise argparse.ArgumentTypeError(f"{option!r} must be HOST:PORT")
    return url.hostname, _WYOMING_ADDRESS[1] if port is None else port


def _certificate(options: argparse.Namespace) -> "Certificate | None":
    from megakernel_tts.server.serving import Certificate

    if not (options.tls_cert or options.tls_key):
        return None
    if not (options.tls_cert and options.tls_key):
        raise UsageError("--tls-cert and --tls-key belong together; give both")
    certificate = Certificate(options.tls_cert, options.tls_key)
    try:
        certificate.check()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return certificate


def _tracing(model: str, environment: Mapping[str, str]) -> "Tracing | None":
    """Sends traces if OpenTelemetry's variables name a collector, which needs the extra `otel`."""
    if not any(environment.get(name) for name in _TRACE_VARIABLES):
        return None
    try:
        from megakernel_tts.server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise _missing(error, "otel") from None
    return Tracing(PurePath(model).name)
