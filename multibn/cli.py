"""The command line, `multibn COMMAND` or `python -m multibn COMMAND`."""

import argparse
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from multibn import __version__, checkpoint, info
from multibn._environment import importable, nearest, wrapped
from multibn.checkpoint.pool import pool_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own; returns the exit status."""
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:  # no such command
        (got,) = re.findall(r"invalid choice: '(.*?)'", str(error)) or [""]
        parser.error(f"{error}{nearest(got, ['info', 'convert', 'pool', 'parity'], 1)}")
    if not args.command and not unknown:
        parser.print_help()
        return 0
    if unknown:
        _refuse_unknown(unknown[0], args.parser if args.command else parser)
    needed = ["numpy", "rich"] if args.command == "parity" else []
    absent = [name for name in needed if not importable(name)]
    if absent:
        return _complain(
            args.command,
            f"{' and '.join(absent)} must be installed: got none. Run pip install '.[cli]' in "
            "multibn's checkout.",
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
        exit_on_error=False,
        description="Batch normalization whose statistics are shared between processes.",
    )
    parser.add_argument("--version", action="version", version=f"multibn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=textwrap.fill(description, 79),
            epilog="examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(parser=command)
        return command

    command = add(
        "info",
        "show the installed versions, the kernels and the transports in use",
        "Show the installed versions, what computes, what carries messages, and the reason and the "
        "cure where a faster way is missing. Exit status: 0.",
        """
        multibn info
        multibn info --json > machine.json
        """,
    )
    info.add_arguments(command)
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
    command.add_argument("src", metavar="SRC", help="file to read")
    command.add_argument("dst", metavar="DST", help="file to write")
    command.add_argument("--names", metavar="FILE.json", help="JSON object: new names by old ones")
    command.add_argument("--prefix", default="", metavar="P", help="convert only the keys below P")
    command.add_argument("--skip-unknown", action="store_true", help="leave out what has no place")
    command.set_defaults(run=_convert)
    command = add(
        "pool",
        "pool the running statistics of models that were trained apart",
        "Write one checkpoint from those of one model's copies: running statistics are pooled by "
        "the counts of samples, all other arrays must be equal, or are averaged. Exit status: 0, "
        "or 2 if a file or an option is refused; DST is unchanged then.",
        "multibn pool a.pt b.pt --counts 100 300 -o pooled.pt",
    )
    command.add_argument("src", nargs="+", type=Path, metavar="SRC", help="files to read")
    command.add_argument("--counts", nargs="+", type=float, required=True, metavar="N")
    command.add_argument("-o", dest="dst", type=Path, required=True, metavar="DST")
    command.add_argument("--prefix", default="", metavar="P", help="pool only the keys below P")
    command.add_argument("--average-parameters", action="store_true", help="average other arrays")
    command.set_defaults(run=_pool)
    command = add(
        "parity",
        "compare both frameworks, over every communicator, with exact results",
        "Train the layers of both frameworks over every communicator that works here, on real "
        "processes, and compare them with a float64 oracle. Exit status: 0 "
        "all within bounds, 1 a bound is broken, 2 it could not be run.",
        """
        multibn parity
        multibn parity --ranks 2 --cases 'float32,uneven*' --json errors.json
        multibn parity --model mymodels:pair
        """,
    )
    if importable("numpy"):  # without NumPy, `main` says that `parity` needs it
        from multibn.parity import command as parity

        parity.add_arguments(command)
        command.set_defaults(run=parity.run)
    return parser


def _refuse_unknown(argument: str, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2, the command's own usage, and the options that were perhaps meant."""
    option = argument.partition("=")[0]
    near = nearest(option, parser._option_string_actions) if option.startswith("-") else ""
    parser.error(f"unknown argument: got {argument!r}{near}.")


# The words of a Python program in messages of `checkpoint`, and those of the command line.
_WORDS = {
    r"`(names|prefix|counts)`": r"`--\1`",
    r"prefix='(.*?)'": r"--prefix '\1'",
    r"skip_unknown=True": "--skip-unknown",
    r"average_parameters=True": "--average-parameters",
    r"\(None leaves": "(null leaves",
}


def _in_options(message: str) -> str:
    """A message of `checkpoint` in the words of the command line."""
    for python, own in _WORDS.items():
        message = re.sub(python, own, message)
    return message


def _names(path: str) -> dict[str, str | None]:
    """The new names of layers or arrays by the old ones, from a JSON file."""
    try:
        names = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(names, dict):
            raise TypeError(f"got {type(names).__name__}")
        if not all(value is None or isinstance(value, str) for value in names.values()):
            raise TypeError("a value is neither a string nor null")
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise ValueError(
            f'{path}: must be a JSON object of names, such as {{"predictor/bn": "norm"}}: {error}. '
            "Write one, or leave it out."
        ) from error
    return names


def _convert(args: argparse.Namespace) -> int:
    wrote = _wrote(args.dst)
    try:
        converted = checkpoint.convert(
            args.src,
            args.dst,
            names=args.names and _names(args.names),
            prefix=args.prefix,
            skip_unknown=args.skip_unknown,
        )
    except ValueError as error:
        return _complain(args.command, _in_options(str(error)))
    for note in converted.notes:
        print(wrapped(f"note: {_in_options(note)}", "  "))
    print(f"{wrote} {len(converted.state)} arrays")
    return 0


def _pool(args: argparse.Namespace) -> int:
    wrote = _wrote(args.dst)
    try:
        pool = pool_files(args.src, args.dst, args.counts, args.prefix, args.average_parameters)
    except ValueError as error:
        names = {f"states[{i}]": str(path) for i, path in enumerate(args.src)}
        message = re.sub(r"states\[\d+\]", lambda m: names.get(m[0], m[0]), str(error))
        return _complain(args.command, _in_options(message))
    print(f"{wrote} {len(pool)} arrays")
    return 0


def _wrote(path: str | Path) -> str:
    """The beginning of a sentence about a file that is about to be written."""
    return f"{'replaced' if os.path.exists(path) else 'wrote'} {path}:"


def _complain(command: str, message: str) -> int:
    print(f"multibn {command}: {message}", file=sys.stderr)
    return 2
