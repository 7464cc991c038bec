# Every target sets up .venv first where it is missing or older than what it is made from.
#
#   make demo                     train, measure, write runs/demo/report.html
#   make test                     the fast tests; also test-slow, test-browser, test-gpu, test-compile, test-emulated,
#                                 lint, bench, bench-gpu, clean
#   make demo TORCH_INDEX=URL     take torch from this index (PyTorch's install page names one for CPU wheels)
#   make demo PYTHON=python3.12   make .venv with this interpreter

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
READY := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint test-slow test-browser test-gpu test-compile test-emulated bench bench-gpu clean

demo: $(READY)
	$(BIN)/msa-lab demo

test: $(READY)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup

# Without a Chromium the tests in a browser are skipped.
test-slow: $(READY)
	-tests/install_chromium.sh
	$(BIN)/python -m pytest -m slow

# The viewer's page in a real browser; without one this fails.
test-browser: $(READY)
	tests/install_chromium.sh
	MSA_TEST_BROWSER=required $(BIN)/python -m pytest -m slow tests/analysis/test_viewer_browser.py

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

# Every variant of the Hopper kernels, without a GPU; what has not changed since is not compiled again.
test-compile: $(READY)
	$(BIN)/python -m msa_kernels.cute.check

# The compiled kernels on a CPU, where a C++ compiler is.
test-emulated: $(READY)
	cd kernels && for check in forward backward kl step properties far; do \
		PYTHONPATH=.:emulator ../$(BIN)/python emulator/check_$$check.py || exit 1; done

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(READY)
	$(BIN)/python kernels/benchmarks/bench_ops.py

bench-gpu: $(READY)
	$(BIN)/python kernels/benchmarks/bench_gpu.py

# Runs and prepared corpora (runs/, data/) are kept.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone, so that TORCH_INDEX decides its build; that index is an extra one because it may not hold
# the other packages in the versions of constraints.txt, and its builds (2.13.0+cpu) sort above the plain version.
$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv (minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) -e '.[dev]'
	touch $@
