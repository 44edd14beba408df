# Every target makes the virtual environment that it needs, with the versions of constraints.txt.

PYTHON ?= python3
# One thread a worker: the models of the tests are too small for more.
PYTEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST_FLAGS ?= --numprocesses logical --maxprocesses 8 --dist worksteal
# What the site shows or links to.
SITE := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE docs examples hub
# Most of what is installed is never imported, so it is compiled when it is.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-oldest clients lint format docs clean

## demo: complete held-out code by plain generate() and by ddtree, with the pair that ships
demo: .venv/user.stamp
	.venv/bin/hf-ddtree demo

## test: the whole test suite
test: .venv/dev.stamp
	$(PYTEST_ENV) .venv/bin/python -m pytest $(PYTEST_FLAGS)

## test-oldest: the core tests with the oldest supported Transformers
test-oldest: .venv-oldest/dev.stamp
	$(PYTEST_ENV) .venv-oldest/bin/python -m pytest $(PYTEST_FLAGS) -m core

## clients: programs that call generate(), plainly and with drafting, each in an environment of its own
clients: .venv/user.stamp
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/run_clients.py
	.venv/bin/python benchmarks/write_page.py

## lint: style and types
lint: .venv/dev.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

## format: rewrite the sources in the house style
format: .venv/dev.stamp
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

## docs: the site, in build/site, from the pages where they lie
docs: .venv/dev.stamp
	rm -rf build/docs build/site && mkdir -p build/docs
	ln -s $(addprefix ../../,$(SITE)) build/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

clean:
	rm -rf .venv .venv-oldest build

.venv/user.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e .
	touch $@

# dflash and speculators (with loguru and pydantic-settings) are the references that drafters are tested against,
# xgrammar (with apache-tvm-ffi) is a library of grammars. Their other dependencies are heavy, and no test needs them.
.venv/dev.stamp: .venv/user.stamp
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	.venv/bin/python $(PIP_INSTALL) --no-deps dflash==0.1.0 xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2 \
		speculators==0.9.0 loguru==0.7.3 pydantic-settings==2.16.3
	touch $@

# constraints.txt, except where constraints-oldest.txt says otherwise.
.venv-oldest/dev.stamp: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE "^($$(sed -n 's/==.*//p' constraints-oldest.txt | paste -sd '|'))==" constraints.txt \
		| cat - constraints-oldest.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(PIP_INSTALL) -c .venv-oldest/constraints.txt -e ".[accelerate,test,train]"
	touch $@
