# `make` lists the targets. Each one first creates or updates .venv if necessary.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export HYDRA_FULL_ERROR := 1
# PYTHONPATH could point to another checkout, which would be tested instead of this one; without bytecode every process compiles
# all modules anew, which costs the tests a minute
unexport PYTHONPATH PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup docs doctor demo test test-all test-slurm fuzz lint bench bench-check status reproduce gpu-day campaign manifest collect figures browser costs readme lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## create .venv with the pinned packages (about 6 GB, most of it CUDA); CPU=1: CPU only, without CUDA

TORCH := torch|torchvision|torchaudio
# of the command line, as some systems export a variable CPU; and as chosen when .venv was created
BUILDS := $(if $(filter command line 1,$(origin CPU) $(CPU)),$(filter 1,$(CPU)),$(wildcard $(VENV)/cpu.lock))

$(VENV)/.ready: requirements.lock requirements-uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "bitcycle needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(RUN) || { test ! -e $(VENV) || was=there; $(PYTHON) -m venv $(VENV); } \
		|| { test -n "$$was" || rm -rf $(VENV); echo "cannot create $(VENV); on Debian: apt install python3-venv"; exit 1; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
ifneq ($(BUILDS),)
	$(VENV)/bin/uv pip install --python $(RUN) --no-deps --torch-backend cpu \
		$$(grep -oE '^($(TORCH))==[0-9.]+' requirements.lock) \
		|| { echo "cannot reach PyTorch's index of CPU builds: use plain \`make setup\`, whose CUDA builds also run on a CPU"; exit 1; }
	@# the rest of the lock file, without PyTorch's CUDA packages
	awk '/^[a-z0-9]/ {kept = !/^(nvidia-|cuda-|triton==|($(TORCH))==)/} kept' requirements.lock > $(VENV)/cpu.lock
	$(VENV)/bin/uv pip install --compile-bytecode --python $(RUN) --no-deps --require-hashes -r $(VENV)/cpu.lock
else
	@rm -f $(VENV)/cpu.lock
	$(VENV)/bin/uv pip install --compile-bytecode --python $(RUN) --require-hashes -r requirements.lock
endif
	$(VENV)/bin/uv pip install --python $(RUN) --no-deps --no-build-isolation --editable .
	@touch $@

doctor: $(VENV)/.ready ## what works on this machine, and how long a run or sweep takes: DOCTOR="schedule=RTH model=resnet74"
	@$(RUN) -m bitcycle doctor $(DOCTOR)

demo: $(VENV)/.ready ## train a small ResNet with RTH on handwritten digits: accuracy, cost, saving and a plot, in about two minutes
	$(RUN) train.py schedule=RTH model=resnet8 dataset=digits scale=mini logging.picture=true

test: $(VENV)/.ready lint ## style and type checks, then the tests (10 to 20 minutes on two cores)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal --durations 20

test-all: $(VENV)/.ready lint ## the same with slow tests: all combinations of tasks, schedules and quantizers
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal --durations 20 -m "slow or not slow"

test-slurm: $(VENV)/.ready ## run a sweep on a temporary SLURM cluster on this machine; as root, installs SLURM if necessary
	scripts/test_slurm.sh "$(abspath $(RUN))"

fuzz: $(VENV)/.ready ## kill runs at random moments and compare them bit by bit with uninterrupted ones, or go on: KILLS=1000 JOBS=2 SEED=0 RECORD=file
	OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --kills $(or $(KILLS),1000) --jobs $(or $(JOBS),1) --seed $(or $(SEED),0) $(if $(RECORD),--record "$(RECORD)")

lint: $(VENV)/.ready ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/.ready ## measure time and memory of steps, quantizers, data and runs: results/benchmark; options: BENCH=--quick
	KINETO_LOG_LEVEL=4 $(RUN) -m bitcycle bench $(BENCH)

bench-check: $(VENV)/.ready ## compare a quick benchmark with the recorded one; fails if a ratio to float32 is more than 15 % worse
	KINETO_LOG_LEVEL=4 $(RUN) -m bitcycle bench --check $(BENCH)

status: $(VENV)/.ready ## show progress and time left of all runs and sweeps; SCALE=mini: at one scale
	@$(RUN) -m bitcycle status $(SCALE)

reproduce: $(VENV)/.ready ## train, analyse and plot all 62 items from scratch into results/reproduce/SCALE; default SCALE=smoke
	$(RUN) -m bitcycle reproduce $(or $(SCALE),smoke)

gpu-day: $(VENV)/.ready ## examine this machine, then train sweeps at paper scale, most claims per hour first: HOURS=8, DRY=1: only the plan, SCALE=paper
	$(RUN) -m bitcycle gpu-day --hours $(or $(HOURS),8) --scale $(or $(SCALE),paper) $(if $(filter-out 0,$(DRY)),--dry-run)

manifest: $(VENV)/.ready ## record which run fills which cell of every figure and table, without training: results/manifest
	$(RUN) -m bitcycle manifest $(SCALE)

campaign: $(VENV)/.ready ## train the runs of sweeps/campaign.yaml at low priority, or resume: JOBS=2, PRIORITY=idle|low|normal, RUNS=folder
	$(RUN) -m bitcycle campaign --jobs $(or $(JOBS),1) --priority $(or $(PRIORITY),idle) $(if $(RUNS),--results-root "$(RUNS)") $(CAMPAIGN)

collect: $(VENV)/.ready ## collect finished runs and their curves in results/summary
	$(RUN) -m bitcycle collect

figures: $(VENV)/.ready ## draw every figure and table of the papers and results/index.html from results/summary
	$(RUN) -m bitcycle figures

browser: ## install headless Chromium and its driver for the tests of the results page (Debian and Ubuntu, as root)
	apt-get install --yes --no-install-recommends chromium chromium-driver || apt-get install --yes chromium-browser chromium-chromedriver

costs: $(VENV)/.ready ## compare every published cost with ours: results/published_costs.md
	$(RUN) scripts/published_costs.py

readme: $(VENV)/.ready ## update the generated parts of README.md, docs and results/notes
	$(RUN) scripts/readme.py

lock: $(VENV)/.ready ## resolve the packages and write requirements.lock
	$(VENV)/bin/uv pip compile --quiet pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --upgrade-package torch==2.13.0 --upgrade-package torchvision==0.28.0 \
		--output-file requirements.lock

docs: $(VENV)/.ready ## build the documentation: site/index.html
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

clean: ## remove .venv and caches, keep results
	@test ! -e $(VENV) || test -f $(VENV)/pyvenv.cfg || { echo "$(VENV) is no environment of Python, and is kept"; exit 1; }
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
