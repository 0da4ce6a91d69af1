"""Build the website into _build/html: strict, from nothing, and only when a source has changed.

With REPOSITORY=owner/name in the environment the chapters carry their Colab badge, and the notebooks for
Colab are written to _build/colab.
"""

import html
import os
import shutil
import subprocess
import sys
from pathlib import Path

from publish import Addresses, write_colab
from setup import REQUIREMENTS, WHEELS
from stamps import BUILD, ROOT, digest, is_current, record

SITE = BUILD / "html"
FIRST_PAGE = "book/intro.html"
STAMP = BUILD / "stamps.json"
SOURCES = ["book", "notebooks", "scripts", "kvlab", "_config.yml", "_toc.yml", "README.md", "LICENSE"]


def build_pages() -> None:
    """Jupyter Book with every warning an error, from nothing: old pages would not repeat their warnings."""
    for name in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(BUILD / name, ignore_errors=True)
    program = Path(sys.executable).parent / "jupyter-book"
    command = [str(program), "build", ".", "--all", "-q", "-W", "-n", "--keep-going"]
    log = BUILD / "site.log"
    BUILD.mkdir(exist_ok=True)
    with log.open("w") as out:
        failed = subprocess.run(command, cwd=ROOT, stdout=out).returncode
    if failed or not (SITE / "index.html").exists():
        sys.exit(f"{log.read_text()[-2000:]}\nbook: the build failed; its messages are above and in {log}")


def plain_page(title: str, body: str, root: str, head: str = "") -> str:
    """A small page outside the book, with the title, language and icon that every page needs."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="{root}_static/favicon.svg">{head}</head>'
        f"<body><main><h1>{title}</h1>{body}</main></body></html>\n"
    )


def add_wheel() -> None:
    """Put the wheel beside the site, with a page that names it."""
    target = SITE / "wheels"
    shutil.copytree(WHEELS, target, dirs_exist_ok=True)
    names = [html.escape(path.name) for path in sorted(target.glob("*.whl"))]
    items = "".join(f'<li><a href="{name}">{name}</a></li>' for name in names)
    (target / "index.html").write_text(plain_page("kvlab wheels", f"<ul>{items}</ul>", "../"))


def write_root_page() -> None:
    """Jupyter Book's own redirect has no title and no language."""
    refresh = f'<meta http-equiv="refresh" content="0; url={FIRST_PAGE}">'
    page = plain_page("KV Cache Lab", f'<p><a href="{FIRST_PAGE}">Begin here</a></p>', "", refresh)
    (SITE / "index.html").write_text(page)


def main() -> None:
    try:
        addresses = Addresses.from_environment()
    except ValueError as error:
        sys.exit(f"book: {error}")
    value = digest([*(ROOT / name for name in SOURCES), REQUIREMENTS], repr(addresses))
    if not (is_current(STAMP, "site", value) and (SITE / "index.html").exists()):
        print("book: building the website", flush=True)
        build_pages()
        write_root_page()
        add_wheel()
        shutil.rmtree(BUILD / "colab", ignore_errors=True)
        if addresses:
            write_colab(addresses)
        record(STAMP, "site", value)
    print(f"book: {os.path.relpath(SITE / 'index.html')}  (make serve shows it with search)")
    if addresses:
        print("book: notebooks for Colab are in _build/colab")


if __name__ == "__main__":
    main()
