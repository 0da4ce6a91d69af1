"""The rules of a chapter and of the site, each a function that returns what is wrong, as sentences."""

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chapters import SETUP_SOURCE, SETUP_TAGS, WIDGET_VIEW, facts, is_skipped, tags, text_of
from publish import CODE, LINK

MIN_FACTS = 12
WORDS = (1_000, 2_400)  # what may be; aim at 1,200 to 2,000
MAX_CODE_LINES = 250
MAX_OUTPUT_BYTES = 100_000
TITLE = re.compile(r"# \d\d · .+\n\n\*\d+ minutes · .+\*")
# A place on somebody's machine; a bare word with slashes in it, such as and/or, is none.
MACHINE_PATH = re.compile(
    r"(?<![\w/.])/(?:home|root|Users|tmp|work|mnt|content|opt|usr|var)/\w|\b[A-Z]:\\\w|site-packages"
)
ALLOWED_TAGS = {"details", "summary"}
HTML_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9-]*)(?:\s[^<>]*)?/?>")
MYST = {
    "a directive": re.compile(r"^\s*(?:```+|~~~+|:::+)\s*\{", re.M),
    "a colon fence": re.compile(r"^\s*:::+", re.M),
    "a role": re.compile(r"\{[a-z][\w:.-]*\}`"),
    "a target": re.compile(r"^\s*\([\w-]+\)=\s*$", re.M),
    "a substitution": re.compile(r"\{\{.+?\}\}"),
    "a comment": re.compile(r"^%\s", re.M),
    "math in a fence or in \\( or \\[": re.compile(r"^```math|\\\(|\\\[", re.M),
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def place(cell) -> str:
    first = next((line for line in cell.source.splitlines() if line.strip()), "an empty cell")
    return f"cell {first[:60]!r}"


def without_code(markdown: str) -> str:
    return CODE.sub(" ", markdown)


def check_setup(notebook) -> list[str]:
    """Cell 0 has title, minutes and device; cell 1 is the fixed set-up cell. See scripts/publish.py."""
    if len(notebook.cells) < 3:
        return ["a chapter has a title cell, the set-up cell and more"]
    first, second = notebook.cells[:2]
    wrong = []
    if first.cell_type != "markdown" or not TITLE.fullmatch(first.source.strip()):
        wrong.append("cell 0 must be '# NN · Title' and one line '*NN minutes · device*'")
    if (second.cell_type, second.source, second.metadata.get("tags")) != ("code", SETUP_SOURCE, SETUP_TAGS):
        wrong.append("cell 1 must be chapters.SETUP_SOURCE with the tags of chapters.SETUP_TAGS")
    return wrong


def check_executed(notebook) -> list[str]:
    """Every cell was run and kept what it printed: nbval passes a cell without an execution count."""
    wrong = []
    for cell in code_cells(notebook):
        if is_skipped(cell):
            continue
        if cell.execution_count is None:
            wrong.append(f"{place(cell)} was not executed")
        elif prints(cell.source) and not any(text_of(output) for output in cell.outputs):
            wrong.append(f"{place(cell)} prints, but has no output")
    return wrong


def prints(source: str) -> bool:
    """Whether the cell surely prints: a call of print as a statement of its own, outside any block."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # IPython's own syntax
        return False
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


def check_outputs(notebook) -> list[str]:
    """No errors, nothing on stderr, nothing huge, no widgets, no paths of a machine."""
    wrong = ["the metadata holds widget state"] if "widgets" in notebook.metadata else []
    for cell in notebook.cells:
        shown = cell.source
        for output in cell.get("outputs", []):
            shown += "\n" + json.dumps(output.get("text", "")) + json.dumps(_texts(output))
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                wrong.append(f"{place(cell)} ends in {output.ename}")
            if output.output_type == "stream" and output.name == "stderr":
                wrong.append(f"{place(cell)} writes to stderr: {output.text[:80]!r}")
            if len(json.dumps(output)) > MAX_OUTPUT_BYTES:
                wrong.append(f"{place(cell)} has an output over {MAX_OUTPUT_BYTES:,} bytes")
            if WIDGET_VIEW in output.get("data", {}):
                wrong.append(f"{place(cell)} shows a widget, which a static page cannot")
        if found := MACHINE_PATH.search(shown):
            wrong.append(f"{place(cell)} names a place on one machine: {found[0]!r}")
    return wrong


def _texts(output) -> dict:
    """What an output shows as text, an error's trace included; pictures are left out."""
    shown = {kind: text for kind, text in output.get("data", {}).items() if kind.startswith("text/")}
    return shown | {"traceback": output.get("traceback", [])}


def check_facts(notebook) -> list[str]:
    count = sum(1 for _ in facts(notebook))
    return [f"{count} compared facts, at least {MIN_FACTS} are needed"] if count < MIN_FACTS else []


def prose_words(notebook) -> int:
    text = " ".join(LINK.sub("](", without_code(cell.source)) for cell in markdown_cells(notebook))
    return len(re.findall(r"[^\W\d_][\w'’-]*", text))


def code_lines(notebook) -> int:
    cells = [cell for cell in code_cells(notebook) if cell.source != SETUP_SOURCE]
    return sum(1 for cell in cells for line in cell.source.splitlines() if line.strip())


def check_length(notebook) -> list[str]:
    words, lines = prose_words(notebook), code_lines(notebook)
    wrong = []
    if not WORDS[0] <= words <= WORDS[1]:
        wrong.append(f"{words:,} words of prose, not {WORDS[0]:,} to {WORDS[1]:,}")
    if lines > MAX_CODE_LINES:
        wrong.append(f"{lines} lines of code, more than {MAX_CODE_LINES}")
    return wrong


def check_figures(notebook) -> list[str]:
    """A cell with a figure says in its metadata what the figure shows."""
    wrong = []
    for cell in code_cells(notebook):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        if any(kind.startswith("image/") for kind in kinds):
            meta = cell.metadata.get("mystnb", {})
            if not meta.get("image", {}).get("alt", "").strip():
                wrong.append(f"{place(cell)} needs metadata mystnb.image.alt")
            if not meta.get("figure", {}).get("caption", "").strip():
                wrong.append(f"{place(cell)} needs metadata mystnb.figure.caption")
    for cell in markdown_cells(notebook):
        if re.search(r"!\[\s*\]\(", without_code(cell.source)):
            wrong.append(f"{place(cell)} has a picture without a text")
    return wrong


def check_plain_markdown(notebook) -> list[str]:
    """Colab shows MyST syntax as raw text, so chapters do without; `<details>` folds an answer everywhere."""
    wrong = []
    for cell in markdown_cells(notebook):
        # Directives are fences, so they are looked for in the whole source; the rest outside code and math.
        fenced = [name for name in ("a directive", "a colon fence") if MYST[name].search(cell.source)]
        text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", " ", without_code(cell.source), flags=re.S)
        other = [name for name, pattern in MYST.items() if name not in fenced and pattern.search(text)]
        other += ["a role"] if MYST["a role"].search(cell.source) and "a role" not in other else []
        wrong += [f"{place(cell)} has {name}, which Colab cannot show" for name in fenced + other]
        names = {tag.lower() for tag in HTML_TAG.findall(text)} - ALLOWED_TAGS
        wrong += [f"{place(cell)} has the HTML tag <{name}>" for name in sorted(names)]
        opened, closed = text.count("<details"), text.count("</details>")
        if opened != closed:
            wrong.append(f"{place(cell)} opens {opened} <details> and closes {closed}")
    return wrong


CHAPTER_CHECKS = (
    check_setup,
    check_executed,
    check_outputs,
    check_facts,
    check_length,
    check_figures,
    check_plain_markdown,
)


# ---- links in the sources ---------------------------------------------------------------------------------


def link_targets(markdown: str) -> list[str]:
    return [match[2] for match in LINK.finditer(without_code(markdown))]


def check_source_links(markdown: str, page: Path, root: Path) -> list[str]:
    """Relative links lead to files of the project; anchors are checked on the built site."""
    wrong = []
    for target in link_targets(markdown):
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            continue
        path = (page.parent / unquote(parts.path)).resolve()
        if target.startswith("/") or not path.is_relative_to(root) or not path.exists():
            wrong.append(f"{page.name}: {target} leads nowhere")
    return wrong


def bib_keys(bibliography: str) -> set[str]:
    return set(re.findall(r"^@\w+\{\s*([^,\s]+)\s*,", bibliography, re.M))


def cited_keys(markdown: str) -> set[str]:
    """Keys cited by MyST's roles in pages, or by links to the references page in chapters."""
    roles = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", markdown)
    links = re.findall(r"references\.md#ref-([\w-]+)", markdown)
    return {key.strip() for group in roles for key in group.split(",")} | set(links)


# ---- the built site ---------------------------------------------------------------------------------------


LOADING_TAGS = ("script", "img", "iframe", "source", "video", "audio")


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.external: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes) -> None:
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        address = found.get("src") if tag in LOADING_TAGS else None
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            address = found.get("href")
        if address:
            self.links.append(address)
            if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
                self.external.append(address)
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


def read_site(site: Path) -> dict[Path, Page]:
    """All pages of the built site but the theme's own templates."""
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path: Page(path.read_text(encoding="utf-8")) for path in paths}


def check_site_links(pages: dict[Path, Page], site: Path) -> list[str]:
    """Every link within the site leads to a file, and to an id where it has an anchor."""
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            name = path.relative_to(site)
            if not target.exists():
                wrong.append(f"{name}: {link} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].ids:
                wrong.append(f"{name}: {link} names an anchor that is not there")
    return wrong


def check_self_contained(pages: dict[Path, Page], site: Path) -> list[str]:
    """Pages load nothing from elsewhere, and no widget manager."""
    wrong = [f"{path.relative_to(site)} loads {x}" for path, page in pages.items() for x in page.external]
    widget = re.compile(r"html-manager|embed-amd|require(?:\.min)?\.js|thebe", re.I)
    for path, page in pages.items():
        wrong += [f"{path.relative_to(site)} loads {link}" for link in page.links if widget.search(link)]
    return wrong
