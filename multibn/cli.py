"""The command line: `multibn COMMAND` or `python -m multibn COMMAND`."""

import argparse
import inspect
import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multibn import __version__, checkpoint, info
from multibn.check import command as check
from multibn.checkpoint import files
from multibn.checkpoint.pool import pool_named_states
from multibn.parity import command as parity


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, `sys.argv[1:]` by default, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.command:
        parser.print_help()
        return 0
    if argv is None:  # this process is the command: SIGTERM must run `finally` blocks
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        status = args.run(args)
        print(end="", flush=True)  # `sys.stdout` may be None
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of stdout has ended; DST is already written
        _flush_stdout()
        return 0
    except (FloatingPointError, ImportError, OSError, ValueError) as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError) and str(error).startswith("No module named"):
            advice = f". Run pip install {error.name}, or choose a file of another format"
        # After `done` is set, DST is complete: only printing the report can fail.
        done = f"{args.done}, but printing the report failed: " if "done" in args else ""
        print(f"multibn {args.command}: {done}{error}{advice}", file=sys.stderr)
        _flush_stdout()
        return 1 if done else 2


def _flush_stdout() -> None:
    """Flush stdout; on failure redirect stdout to devnull, or Python would exit with status 120."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multibn",
        description="Batch normalization whose statistics are shared between processes.",
    )
    parser.add_argument("--version", action="version", version=f"multibn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = inspect.getdoc(run) or ""
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    for name, run in (("info", info.run), ("check", check.run)):
        add(name, run).add_argument("--json", action="store_true", help="machine-readable output")
    option: Callable[..., Any] = add("convert", _convert).add_argument
    option("src", type=Path, metavar="SRC", help="file to read")
    option("dst", type=Path, metavar="DST", help="file to write")
    option("--names", type=Path, metavar="FILE.json", help="JSON object: {old name: new name}")
    option("--prefix", default="", metavar="P", help="convert only the keys under the prefix P")
    for name, file in (("--from", "SRC"), ("--to", "DST")):
        option(name, choices=("torch", "flax"), help=f"framework of {file}, if .safetensors")
    layers = "layers that are ConvTranspose in flax"
    option("--transposed", nargs="+", default=(), metavar="LAYER", help=layers)
    count = "elements per channel of a batch: convert running variances to DST's convention"
    option("--count", type=float, metavar="N", help=count)
    option = add("pool", _pool).add_argument
    option("src", nargs="+", type=Path, metavar="SRC", help="files to read")
    counts = "number of samples on which each SRC was trained"
    option("--counts", nargs="+", type=float, required=True, metavar="N", help=counts)
    option("-o", dest="dst", type=Path, required=True, metavar="DST", help="file to write")
    option("--prefix", default="", metavar="P", help="pool only the keys under the prefix P")
    option("--average-parameters", action="store_true", help="average the other arrays")
    norms = "names or patterns of instance norms that have running statistics"
    option("--instance-norms", nargs="+", default=(), metavar="NAME", help=norms)
    parity.add_arguments(add("parity", parity.run))
    return parser


def _convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint between torch, Chainer and flax.

    The suffix determines the format: .npz for Chainer, .pt, .pth and .safetensors
    for torch, .msgpack for flax. DST is replaced atomically. Notes list what is
    not converted. Exit status: 0 on success; 2 for an invalid file or option (DST
    is unchanged); 1 if DST was written, but the notes could not be printed.

    multibn convert model.npz model.pt
    multibn convert --prefix updater/model:main snapshot.npz model.pt
    multibn convert --names names.json model.pt model.npz
    multibn convert model.msgpack model.pt --transposed decoder.up
    """
    names = _names(args.names) if args.names else None
    verb = "replaced" if args.dst.exists() else "wrote"
    frameworks = {"source": vars(args)["from"], "target": args.to}
    flax_options = {"transposed": args.transposed, "count": args.count}
    converted = checkpoint.convert(
        args.src, args.dst, names=names, prefix=args.prefix, **frameworks, **flax_options
    )
    args.done = f"{verb} {args.dst}: {len(converted.state)} arrays"
    width = shutil.get_terminal_size().columns
    keep_paths: Any = {"break_long_words": False, "break_on_hyphens": False}
    for note in converted.notes:
        print(textwrap.fill(f"note: {note}", width, subsequent_indent="  ", **keep_paths))
    print(args.done)
    return 0


def _names(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f'--names {path} must be a file with a JSON object, {{"old": "new"}}: {error}'
        ) from error


def _pool(args: argparse.Namespace) -> int:
    """Combine the running statistics of models that were trained separately.

    All other arrays must be equal in all files; with --average-parameters, they
    are averaged. Exit status: 0 on success; 2 for an invalid file or option (DST
    is unchanged); 1 if DST was written, but the report could not be printed.

    multibn pool a.pt b.pt --counts 100 300 -o pooled.pt
    """
    frameworks = {files.framework(path) for path in (*args.src, args.dst)}
    if len(frameworks) > 1:
        raise ValueError(
            f"SRC and DST must be files of one framework: got {', '.join(sorted(frameworks))}. "
            "Convert files by multibn convert."
        )
    states = [files.read(path, args.prefix) for path in args.src]
    pooled = pool_named_states(
        states, args.counts, args.src, args.average_parameters, args.instance_norms
    )
    verb = "replaced" if args.dst.exists() else "wrote"
    files.write(args.dst, pooled)
    args.done = f"{verb} {args.dst}: {len(pooled)} arrays"
    print(args.done)
    return 0
