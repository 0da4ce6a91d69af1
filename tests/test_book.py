"""The rules of the chapters and of the built site, and proof that each rule catches what it should."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import book_checks as checks
from chapters import SETUP_SOURCE, SETUP_TAGS, chapters, normalise, read, text
from stamps import ROOT

SITE = ROOT / "_build" / "html"
CHAPTERS = chapters()
PAGES = sorted((ROOT / "book").glob("*.md"))

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


# ---- the chapters -----------------------------------------------------------------------------------------


@each_chapter
@pytest.mark.parametrize("check", checks.CHAPTER_CHECKS, ids=lambda check: check.__name__)
def test_chapter(path, check):
    assert check(read(path)) == []


@each_chapter
def test_chapter_is_in_normal_form(path):
    assert text(normalise(read(path))) == path.read_text(encoding="utf-8"), "run `make outputs`"


@each_chapter
def test_chapter_links(path):
    cells = checks.markdown_cells(read(path))
    assert [w for cell in cells for w in checks.check_source_links(cell.source, path, ROOT)] == []


@each_chapter
def test_chapter_number_is_its_files(path):
    assert read(path).cells[0].source.startswith(f"# {path.stem[:2]} · ")


def test_every_chapter_is_in_the_table_of_contents():
    listed = set(re.findall(r"file: notebooks/(\w+)", (ROOT / "_toc.yml").read_text()))
    assert {path.stem for path in CHAPTERS} <= listed


# ---- the pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_page_links(path):
    listed = re.findall(r"file: (notebooks/\w+)", (ROOT / "_toc.yml").read_text())
    unwritten = [f"{name}.ipynb" for name in listed if not (ROOT / f"{name}.ipynb").exists()]
    wrong = checks.check_source_links(path.read_text(encoding="utf-8"), path, ROOT)
    assert [w for w in wrong if not any(name in w for name in unwritten)] == []


def test_every_reference_is_cited_and_every_citation_is_known():
    keys = checks.bib_keys((ROOT / "book" / "references.bib").read_text(encoding="utf-8"))
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    texts += [cell.source for path in CHAPTERS for cell in checks.markdown_cells(read(path))]
    assert set().union(*map(checks.cited_keys, texts)) == keys


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_names_no_machine(path):
    assert not checks.MACHINE_PATH.search(path.read_text(encoding="utf-8"))


# ---- the built site ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: run `make book`")
    return checks.read_site(SITE)


def test_site_links(site):
    assert checks.check_site_links(site, SITE) == []


def test_site_is_self_contained(site):
    assert checks.check_self_contained(site, SITE) == []


def test_site_has_every_listed_page(site):
    listed = re.findall(r"(?:file|root): (\S+)", (ROOT / "_toc.yml").read_text())
    assert {f"{name}.html" for name in listed} <= {str(path.relative_to(SITE)) for path in site}


# ---- each rule fails on a notebook that breaks it ---------------------------------------------------------


def good_notebook():
    """The smallest notebook that keeps every rule."""
    printed = new_output("stream", name="stdout", text="".join(f"row {i}: {i * i}\n" for i in range(12)))
    picture = new_output("display_data", data={"image/png": "iVBOR", "text/plain": "<Figure>"})
    described = {"mystnb": {"image": {"alt": "A line that rises."}, "figure": {"caption": "Rows."}}}
    answer = "<details><summary>Answer</summary>\n\nBecause $S^2$ grows.\n\n</details>"
    return new_notebook(
        cells=[
            new_markdown_cell("# 02 · The KV cache\n\n*25 minutes · runs in 40 s on two CPU cores*"),
            new_code_cell(SETUP_SOURCE, metadata={"tags": list(SETUP_TAGS)}),
            new_markdown_cell(f"## Rows\n\n{'Old rows never change. ' * 300}\n\n{answer}"),
            new_code_cell("for i in range(12):\n    print(i)", execution_count=2, outputs=[printed]),
            new_code_cell("plot()", execution_count=3, outputs=[picture], metadata=described),
        ]
    )


@pytest.mark.parametrize("check", checks.CHAPTER_CHECKS, ids=lambda check: check.__name__)
def test_a_good_notebook_passes(check):
    assert check(good_notebook()) == []


def stream(name, text):
    return new_output("stream", name=name, text=text)


def set_source(index, source):
    return lambda nb: setattr(nb.cells[index], "source", source)


def add_text(addition):
    return lambda nb: setattr(nb.cells[2], "source", f"{nb.cells[2].source}\n\n{addition}")


def add_output(output):
    return lambda nb: nb.cells[3].outputs.append(output)


def add_code(source, **fields):
    return lambda nb: nb.cells.append(new_code_cell(source, **{"execution_count": 9, **fields}))


WIDGET = new_output("display_data", data={checks.WIDGET_VIEW: {"model_id": "1"}})
ERROR = new_output("error", ename="ValueError", evalue="no", traceback=[])
BREAKS = [  # (rule, how to break it, what the rule then says)
    (checks.check_setup, set_source(0, "# The KV cache"), "cell 0"),
    (checks.check_setup, set_source(0, "# 02 · The KV cache\n\n*a while*"), "cell 0"),
    (checks.check_setup, set_source(1, "import kvlab"), "cell 1"),
    (checks.check_setup, lambda nb: nb.cells[1].metadata.update(tags=["remove-cell"]), "cell 1"),
    (checks.check_setup, lambda nb: nb.cells.pop(1), "cell 1"),
    (checks.check_setup, lambda nb: nb.cells.clear(), "a chapter has"),
    (checks.check_executed, add_code("x = 1", execution_count=None), "not executed"),
    (checks.check_executed, add_code("print(1)"), "no output"),
    (checks.check_outputs, add_output(ERROR), "ValueError"),
    (checks.check_outputs, add_output(stream("stderr", "warning")), "stderr"),
    (checks.check_outputs, add_output(stream("stdout", "x" * 100_001)), "over 100,000 bytes"),
    (checks.check_outputs, add_output(WIDGET), "widget"),
    (checks.check_outputs, lambda nb: nb.metadata.update(widgets={"state": {}}), "widget state"),
    (checks.check_outputs, add_output(stream("stdout", "saved to /" + "home/me/x")), "one machine"),
    (checks.check_outputs, add_code("open('/" + "root/x')"), "one machine"),
    (checks.check_facts, lambda nb: nb.cells[3].metadata.update(tags=["nbval-ignore-output"]), "0 compared"),
    (checks.check_facts, set_source(3, "# NBVAL_IGNORE_OUTPUT\nprint(1)"), "0 compared"),
    (checks.check_length, set_source(2, "Short."), "words of prose"),
    (checks.check_length, add_text("long " * 2_000), "words of prose"),
    (checks.check_length, add_code("x = 1\n" * 251), "lines of code"),
    (checks.check_figures, lambda nb: nb.cells[4].metadata["mystnb"].pop("image"), "alt"),
    (checks.check_figures, lambda nb: nb.cells[4].metadata["mystnb"].pop("figure"), "caption"),
    (checks.check_figures, add_text("![](x.svg)"), "without a text"),
    (checks.check_plain_markdown, add_text("```{note}\nHi\n```"), "a directive"),
    (checks.check_plain_markdown, add_text(":::note\nHi\n:::"), "a colon fence"),
    (checks.check_plain_markdown, add_text("see {cite}`kwon2023`"), "a role"),
    (checks.check_plain_markdown, add_text("(here)=\n"), "a target"),
    (checks.check_plain_markdown, add_text("{{ name }}"), "a substitution"),
    (checks.check_plain_markdown, add_text(r"\(x\)"), "math"),
    (checks.check_plain_markdown, add_text("<div>x</div>"), "<div>"),
    (checks.check_plain_markdown, add_text('<img src="x">'), "<img>"),
    (checks.check_plain_markdown, add_text("<details>"), "closes"),
]


@pytest.mark.parametrize(("check", "break_it", "said"), BREAKS)
def test_a_bad_notebook_fails(check, break_it, said):
    notebook = good_notebook()
    break_it(notebook)
    assert any(said in sentence for sentence in check(notebook)), check(notebook)


def test_code_math_and_fractions_are_no_html_or_paths():
    notebook = good_notebook()
    add_text("`<div>` and $a<b$ and $c>d$, ms/token and and/or.")(notebook)
    add_text("```python\nx: dict = {}  # {cite}\n```")(notebook)
    assert checks.check_plain_markdown(notebook) == []
    assert checks.check_outputs(notebook) == []


def test_source_links_are_checked(tmp_path):
    (tmp_path / "there.md").write_text("")
    markdown = "[a](there.md#x) [b](missing.md) [c](https://example.org) `[d](e.md)` [f](#g) [h](/there.md)"
    assert checks.check_source_links(markdown, tmp_path / "page.md", tmp_path) == [
        "page.md: missing.md leads nowhere",
        "page.md: /there.md leads nowhere",
    ]


def test_keys_are_found():
    assert checks.bib_keys("@article{a1,\n title={x}}\n@misc{ b-2 ,\n}") == {"a1", "b-2"}
    markdown = "{cite:p}`a1,b-2` {cite}`c3` [x](../book/references.md#ref-d4)"
    assert checks.cited_keys(markdown) == {"a1", "b-2", "c3", "d4"}


def test_site_links_are_checked(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="sub/b.html#x">1</a><a href="c.html">2</a>')
    (tmp_path / "sub" / "b.html").write_text('<a href="../a.html#top">ok</a><a href="#y">no</a>')
    pages = checks.read_site(tmp_path)
    assert sorted(checks.check_site_links(pages, tmp_path)) == [
        "a.html: c.html leads nowhere",
        "a.html: sub/b.html#x names an anchor that is not there",
        "sub/b.html: #y names an anchor that is not there",
    ]


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="//example.org/x.css">',
        '<script src="_static/embed-amd.js"></script>',
    ],
)
def test_loading_from_elsewhere_is_found(tmp_path, tag):
    (tmp_path / "a.html").write_text(tag)
    assert checks.check_self_contained(checks.read_site(tmp_path), tmp_path)


def test_the_normal_form_is_stable_and_drops_noise():
    notebook = good_notebook()
    noise = "[IPKernelApp] WARNING | Kernel is running over TCP without encryption. More.\n"
    parts = [stream("stderr", noise), stream("stdout", "a\n"), stream("stdout", "b\n"), WIDGET]
    notebook.cells[3].outputs = parts
    notebook.cells[3].metadata["execution"] = {"iopub.status.busy": "now"}
    once = text(normalise(notebook))
    assert once == text(normalise(notebook))
    assert [output.text for output in notebook.cells[3].outputs] == ["a\nb\n"]
    assert "execution" not in notebook.cells[3].metadata
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
