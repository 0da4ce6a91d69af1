"""The few things that Jupyter Book's configuration cannot say about this site.

- MathJax comes from an installed package and is served by the site itself, so that pages load nothing from
  elsewhere and read well without a network.
- Thebe, which would load code from elsewhere to run cells, is not used: its scripts are left out.
- The list of references and the sidebar get roles that screen readers understand.
- Every anchor of a page can be linked to from Markdown as `page.md#anchor`; MyST alone knows headings only.
- Where the hosting repository is known, chapters carry the Colab badge and the header its launch button.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from publish import COLAB_BRANCH, COLAB_URL, Addresses, with_badge  # noqa: E402

MATHJAX = "tex-chtml.js"
MATHJAX_PARTS = ["output/chtml/fonts/woff-v2", "input/tex/extensions", MATHJAX]


def configure(app: Sphinx, config) -> None:
    config.mathjax_path = f"mathjax/{MATHJAX}"
    if addresses := Addresses.from_environment():
        config.html_baseurl = addresses.site
        config.html_theme_options |= {
            "repository_url": f"https://github.com/{addresses.repository}",
            "repository_branch": COLAB_BRANCH,
            "path_to_docs": "",
            "use_repository_button": True,
            "launch_buttons": {"colab_url": COLAB_URL},
        }


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    for part in MATHJAX_PARTS:
        source, target = package / part, Path(app.outdir) / "_static" / "mathjax" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)


def leave_out_thebe(app: Sphinx, pagename: str, template: str, context: dict, doctree) -> None:
    def wanted(file) -> bool:
        return "thebe" not in f"{file} {getattr(file, 'attributes', '')}".lower()

    context["script_files"] = [f for f in context["script_files"] if wanted(f)]
    context["css_files"] = [f for f in context["css_files"] if wanted(f)]


def mend_roles(app: Sphinx, pagename: str, template: str, context: dict, doctree) -> None:
    """docutils still writes a role that ARIA has withdrawn, and it is not one that a list may hold."""
    if body := context.get("body"):
        context["body"] = body.replace('role="doc-biblioentry"', 'role="listitem"')


def register_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Add the page's terms, labels and citations to the anchors that MyST accepts in `page.md#anchor`."""
    env = app.env
    slugs = env.metadata[env.docname].setdefault("myst_slugs", {})
    for node in doctree.findall(nodes.Element):
        for name in node.get("ids", []):
            slugs.setdefault(name, (node.line or 0, name, node.astext()[:80]))
    if any("bibliography" in type(node).__name__ for node in doctree.findall(nodes.Element)):
        for key in app.env.get_domain("cite").bibdata.data.entries:
            slugs.setdefault(f"ref-{key}", (0, f"ref-{key}", key))


def add_badge(app: Sphinx, docname: str, source: list[str]) -> None:
    addresses = Addresses.from_environment()
    if not addresses or not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    first = notebook["cells"][0]
    first["source"] = with_badge("".join(first["source"]), f"{docname}.ipynb", addresses)
    source[0] = json.dumps(notebook)


def setup(app: Sphinx) -> dict:
    app.connect("config-inited", configure, priority=400)
    app.connect("source-read", add_badge)
    app.connect("doctree-read", register_anchors)
    app.connect("html-page-context", leave_out_thebe, priority=900)
    app.connect("html-page-context", mend_roles)
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
