"""vLLM's OpenAI API server on a socket that is already bound: the process at the head of an engine."""

import socket
import sys


def serve(flags: list[str], listening: socket.socket) -> None:
    """Run vLLM's server until it is told to stop.

    flags: command line of vLLM's API server.
    listening: bound by the owner, so that nobody can take the port while vLLM is still loading.
    """
    import uvloop
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm")).parse_args(flags)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    launcher.create_server_socket = lambda addr, *, reuse_port: listening
    uvloop.run(run_server(args))


def main() -> None:
    """`python -m infra.engine.server SOCKET_FD FLAGS...`"""
    serve(sys.argv[2:], socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
