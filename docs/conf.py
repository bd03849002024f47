"""The documentation site. `make docs` writes the site to out/site; any warning fails the build."""

import html
import importlib
import inspect
import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

# Before any other file imports Chainer: the package makes Chainer importable.
import multibn.chainer  # noqa: F401
from multibn import __version__
from multibn.flax import BatchNorm
from tests.helpers import examples

project = "multibn"
author = "the multibn authors"
project_copyright = f"{author}, MIT license"
release = version = __version__

extensions = [
    *("myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary"),
    *("sphinx_copybutton", "sphinx_design"),
]
templates_path = ["reference/templates"]
exclude_patterns = ["reference/templates", "decisions"]

# A heading is a target, as on GitHub: [Conventions](conventions.md#conventions).
myst_heading_anchors = 3

# One page for each public name of the lists in reference/.
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# Single backticks in docstrings are code, and a link where the name is a public one.
default_role = "py:obj"
# A method that overrides a documented one is documented there.
autodoc_inherit_docstrings = False

numpydoc_show_class_members = False
# flax's metaclass hides the parameters of its layers.
BatchNorm.__signature__ = inspect.signature(BatchNorm.__init__.__get__(object()))
# No docstring, no summary, unknown or misplaced sections, parameters that do not exist. That each
# parameter is named is a test's matter, tests/pages/test_docs.py, which needs no Sphinx.
numpydoc_validation_checks = {"GL06", "GL07", "GL08", "PR02", "SS01"}

copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_sidebars = {"**": ["groups.html"]}
html_static_path, html_css_files = ["static"], ["site.css"]
html_favicon = "static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "static/search.js")
html_title = f"multibn {version}"
# One setting: [project.urls] of pyproject.toml.
_urls = dict(url.split(", ") for url in metadata("multibn").get_all("Project-URL") or [])
repository = _urls.get("Repository", "")
html_theme_options: dict[str, Any] = {
    "navbar_align": "left",
    "navbar_center": [],  # the side bar has all pages
    "navigation_with_keys": False,
    "show_nav_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
if repository:
    html_theme_options["use_edit_page_button"] = True
    html_theme_options["icon_links"] = [
        {"name": "Repository", "url": repository, "icon": "fa-brands fa-git-alt"},
        {"name": "Issues", "url": f"{repository}/issues", "icon": "fa-solid fa-circle-dot"},
    ]
    html_context = {"edit_page_url_template": f"{repository}/edit/main/docs/{{{{ file_name }}}}"}


# Threads elsewhere, by the names that the pages give to projects.
REPOSITORIES = {
    "apex": "NVIDIA/apex",
    "flax": "google/flax",
    "fvcore": "facebookresearch/fvcore",
    "mmpretrain": "open-mmlab/mmpretrain",
    "nccl": "NVIDIA/nccl",
    "pycls": "facebookresearch/pycls",
    "pytorch": "pytorch/pytorch",
    "sglang": "sgl-project/sglang",
    "tensorflow": "tensorflow/tensorflow",
    "timm": "huggingface/pytorch-image-models",
}


# The search would find these before the guides.
FOR_MAINTAINERS = r"changelog$"
# Links to pages of the repository that the site does not have.
IN_REPOSITORY = re.compile(
    r"\[([^]]+)\]\((?:\.\./)*((?:docs/decisions|benchmarks|evidence|faults|tests)/[\w/-]+\.md)(#[\w-]+)?\)"
)


def _read(app: Any, page: str, source: list[str]) -> None:
    """`pytorch#78078` is a link, and pages for maintainers stay out of the search."""
    up = "../" * (page.count("/") + 1)
    source[0] = source[0].replace("](decisions/", "](../docs/decisions/")
    source[0] = IN_REPOSITORY.sub(
        rf"[\1]({repository}/blob/HEAD/\2\3)" if repository else rf"{{download}}`\1 <{up}\2>`",
        source[0],
    )
    source[0] = re.sub(
        rf"(?<![\w\[])({'|'.join(REPOSITORIES)})#(\d+)",
        lambda found: (
            f"[{found[0]}](https://github.com/{REPOSITORIES[found[1]]}/issues/{found[2]})"
        ),
        source[0],
    )


def _describe_type(
    app: Any, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """A type alias has no docstring of its own: its text is below its assignment.

    A page that a docstring names is a link.
    """
    if what == "data":
        module, _, alias = name.rpartition(".")
        lines[:] = examples.docstring(importlib.import_module(module), alias).splitlines()
    lines[:] = [re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


# Types of signatures, where their libraries describe them: without a network, and by the names that
# Python gives them, which torch's own inventory does not have.
_TORCH, _PYTHON = "https://docs.pytorch.org/docs/stable", "https://docs.python.org/3/library"
_CHAINER = "https://docs.chainer.org/en/stable/reference/generated"
ELSEWHERE = {
    "torch.Tensor": f"{_TORCH}/tensors.html#torch.Tensor",
    "torch.dtype": f"{_TORCH}/tensor_attributes.html#torch.dtype",
    "torch.nn.modules.module.Module": f"{_TORCH}/generated/torch.nn.Module.html",
    "torch.nn.parallel.distributed.DistributedDataParallel": (
        f"{_TORCH}/generated/torch.nn.parallel.DistributedDataParallel.html"
    ),
    **{
        f"torch.nn.modules.batchnorm.{name}": f"{_TORCH}/generated/torch.nn.{name}.html"
        for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    },
    **{
        f"collections.abc.{name}": f"{_PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence")
    },
    "chainer.link.Link": f"{_CHAINER}/chainer.Link.html",
    "chainer.variable.Variable": f"{_CHAINER}/chainer.Variable.html",
}


def _link_elsewhere(
    app: Any, env: Any, node: nodes.Element, content: nodes.Node
) -> nodes.reference | None:
    uri = ELSEWHERE.get(node["reftarget"])
    return nodes.reference("", "", content, refuri=uri, internal=False) if uri else None


class BothThemes(SphinxTransform):
    """A picture x.svg that has a neighbour x-dark.svg is shown by the theme that fits."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        page = Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            dark = image["uri"].replace(".svg", "-dark.svg")
            if dark != image["uri"] and (page / dark).exists():
                other = image.deepcopy()
                other["uri"], other["classes"] = dark, ["only-dark"]
                image["classes"] += ["only-light"]
                image.parent.insert(image.parent.index(image) + 1, other)


def _describe_page(
    app: Any, page: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """A page's first paragraph is its description for search engines."""
    if document and (text := next(iter(document.findall(nodes.paragraph)), None)):
        words = html.escape(" ".join(text.astext().split())[:200])
        context["metatags"] += f'<meta name="description" content="{words}">'


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _describe_type, priority=100)  # before numpydoc
    app.connect("source-read", _read)
    app.connect("missing-reference", _link_elsewhere)
    app.connect("html-page-context", _describe_page)
    app.add_transform(BothThemes)
