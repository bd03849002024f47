"""The command line, `multibn COMMAND` or `python -m multibn COMMAND`."""

import argparse
import signal
import sys
from collections.abc import Sequence

from multibn import __version__, checkpoint, info
from multibn._environment import importable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own; returns the exit status."""
    args = _parser().parse_args(argv)
    needed = ["numpy", "rich"] if args.command == "parity" else []
    if getattr(args, "plot", None):
        needed.append("matplotlib")
    absent = [name for name in needed if not importable(name)]
    if absent:
        return _complain(
            args.command,
            f"{' and '.join(absent)} must be installed: got none. Run pip install 'multibn[cli]'.",
        )
    if argv is None:  # a process of the command's own: SIGTERM must run `finally` blocks
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multibn",
        description="Batch normalization whose statistics are shared between processes.",
    )
    parser.add_argument("--version", action="version", version=f"multibn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "info", help="show the installed versions, and which communicators would work"
    )
    info.add_arguments(command)
    command.set_defaults(run=info.run)
    command = commands.add_parser(
        "convert",
        help="rewrite a checkpoint of Chainer as one of torch, or the other way",
        description="The suffix says what a file is: .npz is Chainer's, .pt, .pth and .safetensors "
        "are torch's. DST is replaced only when the new file is complete. Notes name what is lost.",
    )
    _add_convert_arguments(command)
    command.set_defaults(run=_convert)
    command = commands.add_parser(
        "parity",
        help="compare both frameworks, over every communicator, with exact results",
        description="Train the layers of both frameworks over every communicator that works here, "
        "on real processes, and compare them with a float64 oracle and with each other. Exit "
        "status: 0 all within bounds, 1 a bound is broken, 2 it could not be run.",
    )
    if importable("numpy"):  # without NumPy, `main` says that `parity` needs it
        from multibn.parity import command as parity

        parity.add_arguments(command)
        command.set_defaults(run=parity.run)
    return parser


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", metavar="SRC", help="file to read")
    add("dst", metavar="DST", help="file to write")
    add("--names", metavar="FILE.json", help="JSON object: old to new names of layers or arrays")
    add("--prefix", default="", metavar="P", help="convert only the keys below this name in SRC")
    add("--skip-unknown", action="store_true", help="leave out arrays that have no place in DST")
    add(
        "--num-batches-tracked",
        type=int,
        default=0,
        metavar="N",
        help="the counter of torch's batch norms, which a file of Chainer does not have; default 0",
    )
    add(
        "--avg-var-count",
        type=float,
        nargs=2,
        metavar=("HAVE", "WANT"),
        help="elements per channel that the running variances in SRC are unbiased by, and those "
        "that they should be unbiased by; inf for biased ones",
    )


def _convert(args: argparse.Namespace) -> int:
    try:
        converted = checkpoint.convert(
            args.src,
            args.dst,
            names=checkpoint.load_names(args.names) if args.names else None,
            prefix=args.prefix,
            skip_unknown=args.skip_unknown,
            num_batches_tracked=args.num_batches_tracked,
            avg_var_count=args.avg_var_count and tuple(args.avg_var_count),
        )
    except ValueError as error:
        return _complain(args.command, str(error))
    for note in converted.notes:
        print(f"note: {note}")
    print(f"wrote {len(converted.state)} arrays to {args.dst}")
    return 0


def _complain(command: str, message: str) -> int:
    print(f"multibn {command}: {message}", file=sys.stderr)
    return 2
