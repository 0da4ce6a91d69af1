"""The built site in a real browser: no errors, nothing loaded from elsewhere, accessible, searchable.

Screenshots go to _build/screenshots, to be looked at.
"""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
SCREENSHOTS = ROOT / "_build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
VIEWS = {  # name: (width, height, theme)
    "desktop": (1280, 900, "light"),
    "desktop-dark": (1280, 900, "dark"),
    "phone": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
# The theme says this on a first visit, before it has stored a mode.
ALLOWED_MESSAGES = ("Got invalid theme mode",)
# The root only leads on to the first page; the theme keeps templates in _static.
PAGES = sorted(
    str(path.relative_to(SITE))
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts and path != SITE / "index.html"
)


def browser_path() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def skip_or_fail(reason: str) -> None:
    (pytest.fail if os.environ.get("KVLAB_REQUIRE_BROWSER") else pytest.skip)(reason)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="session")
def address():
    if not (SITE / "index.html").exists():
        skip_or_fail("the site is not built: run `make book`")
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser(address):
    path = browser_path()
    if not path:
        skip_or_fail("no Chromium or Chrome found; set CHROMIUM to its path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page opened in one view, with everything it complained about."""

    def __init__(self, browser, address: str, view: str) -> None:
        width, height, theme = VIEWS[view]
        self.problems: list[str] = []
        self.address = address
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, has_touch=width < 500
        )
        self.page = self.context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("response", self._on_response)

    def _on_console(self, message) -> None:
        if message.type in ("error", "warning") and not any(ok in message.text for ok in ALLOWED_MESSAGES):
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"external request: {request.url}")

    def _on_response(self, response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def open(self, path: str):
        self.page.goto(self.address + path, wait_until="load")
        self.page.evaluate("() => window.MathJax?.startup?.promise")
        self.page.wait_for_timeout(200)
        return self.page


@pytest.fixture
def visit(browser, address):
    opened: list[Visit] = []

    def start(view: str) -> Visit:
        opened.append(Visit(browser, address, view))
        return opened[-1]

    yield start
    for one in opened:
        one.context.close()


def axe_problems(page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [f"axe {v['id']}: {n['target']} {n['html'][:120]}" for v in violations for n in v["nodes"]]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("path", PAGES)
def test_page(visit, path, view):
    one = visit(view)
    page = one.open(path)
    name = path.removesuffix(".html").replace("/", "-")
    page.screenshot(path=SCREENSHOTS / f"{name}-{view}.png", full_page=True)
    width = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    sideways = [f"the page is {width} px wider than the screen"] if width > 0 else []
    # Copied first: axe reads style sheets by itself, with addresses that are not the page's.
    problems = [*one.problems, *sideways, *axe_problems(page)]
    assert not problems, "\n".join(["", *problems])


def test_the_root_leads_to_the_first_page(visit):
    one = visit("desktop")
    one.page.goto(one.address)
    one.page.wait_for_url("**/book/intro.html")
    assert one.page.title() and one.problems == []


@pytest.mark.parametrize("view", ["desktop", "phone"])
def test_search_finds_a_page(visit, view):
    one = visit(view)
    page = one.open("book/intro.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("memory bandwidth")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a", timeout=60_000)
    found = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.textContent)")
    assert any("Notation" in text for text in found)
    assert one.problems == []


@pytest.mark.parametrize("path", [p for p in PAGES if p.startswith("notebooks/")])
def test_answers_unfold_with_the_keyboard(visit, path):
    page = visit("desktop").open(path)
    summary = page.locator("details > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
