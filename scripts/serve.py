#!/usr/bin/env python3
"""Serves a model over HTTP: `python scripts/serve.py`, `python scripts/serve.py --help`."""

import sys

try:
    from jpaged.entrypoints.cli_args import parse_serve_args
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run `pip install -e .` in the checkout first, and use that Python")


def main(argv: list[str]) -> int:
    server_args, engine_args = parse_serve_args(argv)
    # Only now: the server and what it needs take a while to import.
    from jpaged.entrypoints.server.launch import launch

    return launch(server_args, engine_args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
