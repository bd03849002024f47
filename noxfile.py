"""`make versions` and `make release`: environments of their own, in .nox.

`nox --session "versions(minimum)"` runs the tests that need no ranks with one set of versions.
tests/versions does so in the set's environment, and writes docs/versions.md. An index with torch's
builds for CPU, if it is named by PIP_EXTRA_INDEX_URL, saves gigabytes.
"""

import os
import re
from pathlib import Path

import nox

EXTRAS = ("torch", "chainer", "mpi", "cli")

# pyenv's own commands start only the versions that are switched on.
PYENV = sorted(Path.home().glob(".pyenv/versions/3.1*/bin"))
os.environ["PATH"] = os.pathsep.join([*map(str, PYENV), os.environ["PATH"]])

nox.options.default_venv_backend = "virtualenv"


def minimum() -> list[str]:
    """The lowest versions that pyproject.toml admits."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    return [requirement.replace(">=", "==") for requirement in requirements]


SETS = {
    "minimum": ("3.10", minimum()),
    "gpu": ("3.12", ["torch==2.11.*", "triton==3.6.*", "cupy-cuda13x==14.2.*", "numpy==2.5.*"]),
    "pin": ("3.11", ["--constraint", "constraints.txt"]),
    "newest": ("3.13", []),
}


@nox.session
@nox.parametrize(
    "python,name", [nox.param(python, name, id=name) for name, (python, _) in SETS.items()]
)
def versions(session: nox.Session, name: str) -> None:
    """Install one set, and run the tests."""
    chainer = str(Path("chainer-constraints.txt").resolve())
    session.install(
        *("--editable", f".[{','.join(EXTRAS)},dev]", *SETS[name][1]),
        env={"PIP_CONSTRAINT": chainer, "PIP_BUILD_CONSTRAINT": chainer},
    )
    session.run("python", "-m", "tests.versions", name, *session.posargs)


@nox.session(python="3.11")
def release(session: nox.Session) -> None:
    """Install the wheel, and the sdist without a compiler; run the README's program with each."""
    (wheel,), (sdist,) = (list(Path("dist").resolve().glob(name)) for name in ("*.whl", "*.tar.gz"))
    parts = re.search(
        r"```python\n(# train.py.*?)```.*?train.py\n(.*?)```",
        Path("README.md").read_text(),
        re.DOTALL,
    )
    assert parts
    # A rank may be aborted at its end by torch: docs/guides/when-it-fails.md.
    program = f"{parts[1]}import time; time.sleep(0.5)\n"
    Path(session.create_tmp(), "train.py").write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")

    def run(kernels: str) -> None:
        with session.chdir(session.create_tmp()):
            printed = session.run("python", *torchrun, silent=True)
            facts = session.run("python", "-m", "multibn", "info", silent=True)
        if parts[2] not in str(printed):
            session.error(f"The README's program prints {printed}")
        if kernels not in str(facts):
            session.error(f"`multibn info` does not say {kernels!r}: {facts}")

    session.install(f"multibn[torch] @ {wheel.as_uri()}", "--constraint", "constraints.txt")
    run("C core")
    without_compiler = {"PATH": str(session.bin)}
    session.install("--no-deps", "--force-reinstall", str(sdist), env=without_compiler)
    run("the C core is missing")
