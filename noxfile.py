"""`make versions` and `make release`: environments of their own, in .nox.

`nox --session "versions(minimum)"` runs the tests that need no ranks with one set of versions.
tests/versions.py does so in the set's environment, and writes tests/versions.md. An index with
torch's builds for CPU, if it is named by PIP_EXTRA_INDEX_URL, saves gigabytes.
"""

import os
import re
import shlex
from pathlib import Path

import nox

from tests.helpers import pages

EXTRAS = ("torch", "chainer", "flax", "mpi", "cli")

# pyenv's own commands start only the versions that are switched on.
PYENV = sorted(Path.home().glob(".pyenv/versions/3.1*/bin"))
os.environ["PATH"] = os.pathsep.join([*map(str, PYENV), os.environ["PATH"]])

nox.options.default_venv_backend = "virtualenv"


def minimum() -> list[str]:
    """The lowest versions that pyproject.toml admits."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    # Once: a second one belongs to a marker, "python_version >= '3.11'".
    return [requirement.replace(">=", "==", 1) for requirement in requirements]


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
    session.install("--upgrade", "pip>=25.1")  # knows --group
    session.install(
        *("--group", "dev", "--editable", f".[{','.join(EXTRAS)}]", *SETS[name][1]),
        env={"PIP_CONSTRAINT": chainer, "PIP_BUILD_CONSTRAINT": chainer},
    )
    session.run("python", "-m", "tests.versions", name, *session.posargs)


@nox.session(python=["3.10", "3.13"])
def bare(session: nox.Session) -> None:
    """Install the wheel alone, with the oldest and the newest Python: its compiled parts load."""
    (wheel,) = Path("dist").resolve().glob("*.whl")
    session.install("--only-binary", ":all:", str(wheel))
    with session.chdir(session.create_tmp()):
        facts = str(session.run("multibn", "info", silent=True))
    if "C core" not in facts or re.search("numpy +missing", facts):
        session.error(facts)


# The extras and the page of each tab of the quick start.
QUICK_START = Path("docs/quick-start.md").read_text()
TABS = re.findall(r"pip install '\.\[(.*?)\]'.*?\{include\} (\S+)", QUICK_START, re.DOTALL)


@nox.session(python="3.11")
@nox.parametrize("extras,page", TABS, ids=[extras.replace(",", "-") for extras, _ in TABS])
def release(session: nox.Session, extras: str, page: str) -> None:
    """Install the wheel where nothing else is, and run the page's program by the page's commands.

    Likewise for the sdist, without a compiler.
    """
    (wheel,), (sdist,) = (list(Path("dist").resolve().glob(name)) for name in ("*.whl", "*.tar.gz"))
    os.environ.pop("PYTHONPATH", None)  # the environment's own packages, and no others
    page = os.path.relpath(Path("docs", page).resolve())
    folder = session.create_tmp()
    for name, program in pages.programs(page).items():
        Path(folder, name).write_text(program)

    def run(kernels: str) -> None:
        with session.chdir(folder):
            for line, printed in pages.commands(page):
                shown = str(session.run(*shlex.split(line), silent=True)).splitlines()
                if [row for row in shown if row in printed] != printed:
                    session.error(f"{line} prints {shown}, not as {page}")
            facts = session.run("multibn", "info", silent=True)
        if kernels not in str(facts):
            session.error(f"`multibn info` does not say {kernels!r}: {facts}")

    session.install(f"multibn[{extras}] @ {wheel.as_uri()}", "--constraint", "constraints.txt")
    run("C core")
    without_compiler = {"PATH": str(session.bin)}
    session.install("--no-deps", "--force-reinstall", str(sdist), env=without_compiler)
    run("the C core is missing")
