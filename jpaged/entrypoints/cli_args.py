"""The command line of the engine and of the server, derived from the fields of EngineArgs.

Imports neither jax nor the server, so that --help and a wrong flag answer at once.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Sequence

import jpaged
from jpaged.engine.engine_args import AsyncEngineArgs, EngineArgs
from jpaged.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """How to serve: the address, and what to do at the end."""

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: float = 5.0
    access_log: bool = True


def byte_count(text: str) -> int:
    """A number of bytes: 1000000, 2G (10**9) or 2GiB (2**30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = {**_UNITS, **_BINARY_UNITS}.get(match[2]) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as in 512MiB or 2G")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineArgs that can be written on a command line."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        if not field.metadata["cli"]:
            continue
        flag = _flag(field.name)
        text = field.metadata["help"].replace("%", "%%")
        if hints[field.name] is bool:
            group.add_argument(
                flag, default=field.default, action=argparse.BooleanOptionalAction, help=text
            )
            continue
        if field.default is not None:
            text += f" (default: {field.default})"
        group.add_argument(
            flag,
            default=field.default,
            type=_parser_of(field.name, hints[field.name]),
            choices=field.metadata["choices"] or None,
            metavar=None if field.metadata["choices"] else _metavar(field.name),
            help=text,
        )


def engine_args(namespace: argparse.Namespace) -> AsyncEngineArgs:
    """The EngineArgs that were asked for. ConfigError, naming the flag, if one is wrong."""
    fields = [f.name for f in dataclasses.fields(EngineArgs) if f.metadata["cli"]]
    try:
        return AsyncEngineArgs(**{name: getattr(namespace, name) for name in fields})
    except ConfigError as error:
        raise flagged(error) from None


def flagged(error: ConfigError) -> ConfigError:
    """The same error in the words of the command line: --max-model-len for max_model_len."""
    text = str(error)
    for field in dataclasses.fields(EngineArgs):
        if field.metadata["cli"] and "_" in field.name:
            text = re.sub(rf"\b{field.name}\b", _flag(field.name), text)
    if error.field is not None and text.startswith(f"{error.field} "):
        text = _flag(error.field) + text[len(error.field) :]
    return ConfigError(text, field=error.field)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating all flags."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all flags)\n")


def serve_parser() -> argparse.ArgumentParser:
    """The parser of scripts/serve.py."""
    parser = _Parser(
        prog="serve.py",
        description="Serves a model over HTTP with an OpenAI-compatible API.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jpaged {jpaged.__version__}")
    defaults = ServerArgs()
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default=defaults.host,
        help=f"address to listen on; 0.0.0.0: all (default: {defaults.host})",
    )
    group.add_argument(
        "--port",
        type=int,
        default=defaults.port,
        help=f"port to listen on; 0: any free one (default: {defaults.port})",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=defaults.shutdown_timeout,
        metavar="SECONDS",
        help="how long running requests may take to finish after Ctrl-C or SIGTERM "
        f"(default: {defaults.shutdown_timeout:g})",
    )
    group.add_argument(
        "--access-log",
        default=defaults.access_log,
        action=argparse.BooleanOptionalAction,
        help="one line on stderr for each request",
    )
    add_engine_arguments(parser)
    return parser


def parse_serve_args(argv: Sequence[str]) -> tuple[ServerArgs, AsyncEngineArgs]:
    """What scripts/serve.py is to do. Ends the process with status 2 if a flag is wrong."""
    parser = serve_parser()
    namespace = parser.parse_args(argv)
    if not 0 <= namespace.port <= 65535:
        parser.error(f"--port must be 0 to 65535, got {namespace.port}")
    if not 0 <= namespace.shutdown_timeout < 10**6:
        parser.error(f"--shutdown-timeout must be at least 0, got {namespace.shutdown_timeout}")
    names = [field.name for field in dataclasses.fields(ServerArgs)]
    try:
        return (
            ServerArgs(**{name: getattr(namespace, name) for name in names}),
            engine_args(namespace),
        )
    except ConfigError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str) -> str:
    return name.rpartition("_")[2].upper()


def _parser_of(name: str, hint: object) -> typing.Callable[[str], object]:
    """What turns the text of a flag into the type of its field."""
    if name.endswith("_bytes"):
        return byte_count
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in (int, float):
        if kind in kinds:
            return kind
    return str
