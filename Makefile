# Every target sets up what it needs: `make demo` and `make test` work from a clean clone.
PYTHON ?= python3
# Found before .venv comes first on PATH: a machine with a GPU may have a torch of its own.
OWN_PYTHON := $(or $(shell command -v $(PYTHON)),$(PYTHON))
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin

# Building Chainer's sdist needs an old setuptools: pip before 25.3 reads PIP_CONSTRAINT in build
# environments too, later ones read PIP_BUILD_CONSTRAINT.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PATH := $(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
# Each of the many processes would compile its modules anew.
export PYTHONDONTWRITEBYTECODE :=
# Open MPI refuses root, and more ranks than cores, unless told otherwise.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe

.DEFAULT_GOAL := help
.PHONY: help demo video test lint docs site evidence bench gpu fuzz faults mutants programs clusters versions release clean

# --no-compile: Python compiles what is imported; all files, one after the other, take pip a minute.
$(VENV)/installed: pyproject.toml setup.py constraints.txt chainer-constraints.txt $(wildcard multibn/*/*/*.[ch])
	@echo "Installing into $(VENV), once: several minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'  # knows --group
	@$(BIN)/python -m pip install --quiet --no-compile --group dev \
		--editable '.[torch,chainer,flax,mpi,cli,lightning,mmengine,video]'
	touch $@

# An environment of its own, which sees the packages of the other one. PyPI's torchvision is built
# for CUDA and cannot be imported beside a torch for CPU; Lightning, which tests import, would try.
PROGRAMS := $(VENV)/programs

$(PROGRAMS)/installed: $(VENV)/installed
	test -x $(PROGRAMS)/bin/python || $(BIN)/python -m venv $(PROGRAMS)
	$(PROGRAMS)/bin/python -c "import site; own = site.getsitepackages()[0]; \
		open(own + '/other.pth', 'w').write(own.replace('$(PROGRAMS)', '$(VENV)'))"
	$(PROGRAMS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(PROGRAMS)/bin/python -m pip install --quiet --group programs --editable '.[lightning]'
	touch $@

$(VENV)/originals: tests/originals/requirements.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $@ --requirement $<
	touch $@

# `##` is for those who use multibn, `#:` for those who work on it.
help:  ## this list
	@echo "For you:"
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  \1	\2/p' Makefile | expand -t 12
	@echo "For maintainers:"
	@sed -n 's/^\([a-z]*\):.*  #: \(.*\)/  \1	\2/p' Makefile | expand -t 12

demo: $(VENV)/installed  ## train the same network in torch, Chainer and JAX, synchronized and not
	$(BIN)/python examples/demo.py

test: $(VENV)/installed $(VENV)/originals  #: all tests, of which none that needs an installed package may be skipped
	@echo "About ten minutes on two cores."
	$(BIN)/python -m pytest --require torch,chainer,flax,core,torchrun,mpiexec,mmengine,mmpretrain,lightning,cli,dev,gymnasium

video: $(VENV)/installed  ## train a reversible MViT on real video, on two ranks
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/video.py

lint: $(VENV)/installed  #: ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

docs: $(VENV)/docs  ## the documentation site: out/site/index.html; any warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir out/doctrees docs out/site
	@echo "out/site/index.html; for excerpts in its search: python -m http.server --directory out/site"

site: docs  #: the site in a browser: text that is cut off, broken links, ten searches; needs chromium
	$(BIN)/python -m tests.pages.site out/site

$(VENV)/evidence: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group evidence
	touch $@

evidence: $(VENV)/evidence  ## when it matters who shares statistics: evidence/README.md
	$(BIN)/python -m evidence

bench: $(VENV)/installed  ## what a layer, a network and a message cost beside their peers: benchmarks/results
	$(BIN)/python -m benchmarks

gpu:  ## the GPU path, checked and timed in four slots of ten minutes by this machine's own Python: SLOT, OUT
	$(OWN_PYTHON) -m benchmarks.gpu $(addprefix --slot ,$(SLOT)) --output $(or $(OUT),out/gpu)

fuzz: $(VENV)/installed  #: 10,000 layer calls in each framework, a quarter of them masked, 100 state machines, 200 sets of equal models, 2,000 spoiled files
	MULTIBN_FUZZ=10000 $(BIN)/python -m pytest -s --timeout 7200 tests/fuzz tests/checkpoint/test_fuzz_files.py

faults: $(VENV)/installed  #: what goes wrong in training, done on purpose: faults/README.md, faults/results
	$(BIN)/python -m faults

$(VENV)/mutants: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group mutants
	touch $@

# MUTANTS=120 SEED=1 are another number, and another choice.
MUTANTS ?= 40
SEED ?= $(shell date +%Y%m%d)
mutants: $(VENV)/mutants  #: deliberate mistakes, drawn at random, and the tests that run them: which of them are seen
	$(BIN)/python -m tests.mutants $(MUTANTS) $(SEED)

programs: $(PROGRAMS)/installed  #: other people's models, trainers and rules: tests/programs/README.md
	$(PROGRAMS)/bin/python -m pytest --require programs tests/programs

# Environments of their own that see the packages of the other one: Ray's, and another MPI.
$(VENV)/ray/installed $(VENV)/mpich/installed $(VENV)/ipyparallel/installed: $(VENV)/%/installed: $(VENV)/installed
	test -x $(VENV)/$*/bin/python || $(BIN)/python -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -c "import site; own = site.getsitepackages()[0]; \
		open(own + '/other.pth', 'w').write(own.replace('$(VENV)/$*', '$(VENV)'))"
	$(VENV)/$*/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/$*/bin/python -m pip install --quiet --group clusters-$*
	touch $@

clusters: $(VENV)/ray/installed $(VENV)/mpich/installed $(VENV)/ipyparallel/installed  #: Slurm (as root, by apt), Ray Train, MPICH and ipyparallel, for real
	mkdir -p out
	command -v slurmctld > /dev/null || (apt-get update && \
		apt-get install --yes --no-install-recommends slurm-wlm munge libpmix2) > out/slurm.log 2>&1 || true
	slurm=$$(command -v slurmctld > /dev/null && echo ,slurm); \
		$(BIN)/python -m pytest -rs --require ray,mpich,ipyparallel$$slurm tests/clusters

$(VENV)/versions: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group versions
	touch $@

versions: $(VENV)/versions  #: the tests without ranks, with the oldest and the newest packages: tests/versions.md
	$(BIN)/python -m nox --session versions

$(VENV)/release: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group release
	touch $@

release: $(VENV)/release  #: wheel and sdist in dist/, checked; the programs of the first page, each in an environment of its own
	rm -rf dist build
	$(BIN)/python -m build
	$(BIN)/python -m auditwheel repair --strip --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m nox --session bare release

clean:  #: remove what make has built
	rm -rf $(VENV) .nox build dist out
