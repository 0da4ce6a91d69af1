# KV Cache Lab. `make book` and `make test` do everything from a fresh copy; the other targets are parts of them.
PYTHON ?= python3
PORT ?= 8000
# owner/name of the hosting repository; without it the site has no Colab buttons. Never invented here.
REPOSITORY ?= $(GITHUB_REPOSITORY)
SITE ?=
export REPOSITORY SITE

RUN := .venv/bin/python

.NOTPARALLEL:
.PHONY: help setup book serve test lint unit notebooks site-tests outputs clean distclean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## .venv with the exact pins, the offline model and kvlab (as an installed wheel)
	@$(PYTHON) scripts/setup.py

book: setup  ## the website in _build/html (REPOSITORY=owner/name: with Colab buttons)
	@$(RUN) scripts/build_site.py

serve: book  ## the website on this machine, port 8000 or PORT=… (search does not work from file://)
	@echo "http://127.0.0.1:$(PORT)/  (Ctrl-C stops it)"
	@$(RUN) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

test: setup lint unit notebooks site-tests  ## lint, unit tests, notebooks through nbval, strict book build, site
	@echo "make test: all passed"

lint: setup  ## ruff over code and notebooks
	@$(RUN) -m ruff check .

# Two workers with one thread each: two workers with two threads each are slower on two cores.
# The house plan comes first and alone: it measures import times.
unit: setup  ## unit tests of the package, on the checkout, and planted faults that they must notice
	$(RUN) -m pytest tests/test_architecture.py -q
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests -n 2 --dist loadfile -q --durations 10 \
		--ignore tests/test_architecture.py --ignore tests/browser --ignore tests/test_book.py
	$(RUN) scripts/mutations.py

notebooks: setup  ## every notebook once, outputs compared, kvlab imported from the installed wheel
	@$(RUN) scripts/run_notebooks.py

site-tests: book  ## the chapters' rules, every link of the built site, and the site in a browser
	$(RUN) -m pytest tests/test_book.py tests/browser -n 2 -q

outputs: setup  ## re-execute notebooks in place and print which facts changed (ONLY=01 for one chapter)
	@$(RUN) scripts/execute.py $(ONLY)

clean:  ## remove what was built, keep .venv
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf .venv
