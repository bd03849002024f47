"""The command line, `multibn COMMAND` or `python -m multibn COMMAND`."""

import argparse
import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multibn import __version__, checkpoint, info
from multibn.checkpoint import files
from multibn.parity import command as parity


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.command:
        parser.print_help()
        return 0
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
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, summary: str, more: str, examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {more}", 79),
            epilog="examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(parser=command)
        return command

    command = add(
        "info",
        "show the installed versions, what computes and what carries messages",
        "With the reason and the cure where a faster way is missing. Exit status: 0.",
        """
        multibn info
        multibn info --json > machine.json
        """,
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=info.run)
    command = add(
        "convert",
        "rewrite a checkpoint of Chainer as one of torch, or the other way",
        "The suffix says what a file is: .npz is Chainer's, .pt, .pth and .safetensors are "
        "torch's. DST is replaced only when the new file is complete. Notes name what is lost. "
        "Exit status: 0, or 2 if a file or an option is refused; DST is unchanged then.",
        """
        multibn convert model.npz model.pt
        multibn convert --prefix updater/model:main snapshot.npz model.pt
        multibn convert --names names.json --skip-unknown model.pt model.npz
        """,
    )
    command.add_argument("src", type=Path, metavar="SRC", help="file to read")
    command.add_argument("dst", type=Path, metavar="DST", help="file to write")
    command.add_argument("--names", metavar="FILE.json", help="JSON object: new names by old ones")
    command.add_argument("--prefix", default="", metavar="P", help="convert only the keys below P")
    command.add_argument("--skip-unknown", action="store_true", help="leave out what has no place")
    command.set_defaults(run=_write, make=_converted)
    command = add(
        "pool",
        "pool the running statistics of models that were trained apart",
        "All other arrays must be equal, or are averaged. Exit status: as of convert.",
        "multibn pool a.pt b.pt --counts 100 300 -o pooled.pt",
    )
    command.add_argument("src", nargs="+", type=Path, metavar="SRC", help="files to read")
    command.add_argument("--counts", nargs="+", type=float, required=True, metavar="N")
    command.add_argument("-o", dest="dst", type=Path, required=True, metavar="DST")
    command.add_argument("--prefix", default="", metavar="P", help="pool only the keys below P")
    command.add_argument("--average-parameters", action="store_true", help="average other arrays")
    command.set_defaults(run=_write, make=_pooled)
    command = add(
        "parity",
        "compare both frameworks, over every communicator, with exact results",
        "Their layers train on real processes beside a float64 oracle. Exit status: 0 all within "
        "bounds, 1 a bound is broken, 2 it could not be run.",
        """
        multibn parity
        multibn parity --ranks 2 --cases 'float32,uneven*' --json errors.json
        multibn parity --model mymodels:pair
        """,
    )
    parity.add_arguments(command)
    command.set_defaults(run=parity.run)
    return parser


def _write(args: argparse.Namespace) -> int:
    """Write the arrays that `args.make` gives to DST."""
    verb = "replaced" if args.dst.exists() else "wrote"
    try:
        arrays = args.make(args)
    except ValueError as error:
        print(f"multibn {args.command}: {error}", file=sys.stderr)
        return 2
    print(f"{verb} {args.dst}: {len(arrays)} arrays")
    return 0


def _converted(args: argparse.Namespace) -> dict[str, Any]:
    names = args.names and _names(args.names)
    options = {"prefix": args.prefix, "skip_unknown": args.skip_unknown}
    converted = checkpoint.convert(args.src, args.dst, names=names, **options)
    for note in converted.notes:
        width = shutil.get_terminal_size().columns
        print(textwrap.fill(f"note: {note}", width, subsequent_indent="  ", break_long_words=False))
    return converted.state


def _names(path: str) -> dict[str, str | None]:
    """The new names of layers or arrays by the old ones, from a JSON file."""
    try:
        names = json.loads(Path(path).read_text(encoding="utf-8"))
        if not all(value is None or isinstance(value, str) for value in names.values()):
            raise TypeError("a value is neither a string nor null")
    except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path}: must be a JSON object of names, such as {{"predictor/bn": "norm"}}: {error}. '
            "Write one, or leave it out."
        ) from error
    return names


def _pooled(args: argparse.Namespace) -> dict[str, Any]:
    if len({files.framework(path) for path in (*args.src, args.dst)}) > 1:
        raise ValueError(f"{args.dst}: must be of the framework of all SRC. Convert it afterwards.")
    states = [files.read(path, args.prefix) for path in args.src]
    pool = checkpoint.pool_states(states, args.counts, average_parameters=args.average_parameters)
    files.write(args.dst, pool)
    return pool
