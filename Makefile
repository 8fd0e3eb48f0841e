# Everything that a person does with this repository. `make help` lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo demo-once test test-long test-ui test-extra check fix docs lock run bench-accept bench-overhead bench-images bench-video bench-queue bench-telling bench-uploads bench-start bench-upload-memory bench soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

# A venv without ensurepip (some distributions split it off) is filled by the outer pip.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Mediamill needs Python 3.11 or newer; set PYTHON=/path/to/python3") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || ($(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip)

$(RUN): $(BIN)/python requirements/run.txt requirements/build.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/run.txt -r requirements/build.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(RUN) requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

demo: $(RUN)  ## start everything, process a photograph and a video, stay up until Ctrl-C
	@$(BIN)/mediamill demo

demo-once: $(RUN)  ## the same, then stop; writes demo-result.json, exits 0 only if all is ready and verified
	@$(BIN)/mediamill demo --once

run: $(RUN)  ## start the platform for development
	@$(BIN)/mediamill up

test: $(DEV)  ## the test suite (needs nothing but this)
	$(BIN)/python -m pytest -n 3 -m "not browser and not extra and not long"

test-long: $(DEV)  ## the fault campaign (kills, freezes, cuts, restarts at every step) and long stories
	$(BIN)/python -m pytest -n 4 -m long

test-ui: $(DEV)  ## tests in a real browser
	$(BIN)/python -m pytest -m browser || [ $$? -eq 5 ]

test-extra: $(DEV)  ## tests that need npm clients, system tools or privileges
	$(BIN)/python -m pytest -n 2 -m extra || [ $$? -eq 5 ]

check: $(DEV)  ## format, lint, types, import order, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks examples deploy changelog.d README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md

fix: $(DEV)  ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DEV)  ## write the reference pages and the blocking client's source, then the site into build/site
	$(BIN)/python -m mediamill.client.twin
	$(BIN)/ruff format --quiet src/mediamill/client/blocking.py
	$(BIN)/python -m mediamill.reference docs/reference
	$(BIN)/python docs/build_site.py

bench-accept: $(DEV)  ## accepting a job, against a bare durable INSERT
	$(BIN)/python benchmarks/bench_accept.py

bench-overhead: $(DEV)  ## one photograph and one clip, against the bare tools
	$(BIN)/python benchmarks/bench_overhead.py

bench-images: $(DEV)  ## pictures against plain loops, time to the placeholder, memory, bombs
	$(BIN)/python benchmarks/bench_images.py

bench-video: $(DEV)  ## films against bare ffmpeg, ladders, shared encodes, memory, honest progress
	$(BIN)/python benchmarks/bench_video.py

bench-queue: $(DEV)  ## no-op jobs through the engine, against the bare engine library and others
	$(BIN)/python benchmarks/bench_queue.py

bench-telling: $(DEV)  ## polls, streams, webhooks beside a black hole, and how well forecasts hold
	$(BIN)/python benchmarks/bench_telling.py

bench-uploads: $(DEV)  ## files in, by signed PUT and by tus, against a bare write loop
	$(BIN)/python benchmarks/bench_uploads.py

bench-start: $(DEV)  ## `mediamill --help`, against bare click
	$(BIN)/python benchmarks/bench_start.py

SIZE ?= 1GB
bench-upload-memory: $(DEV)  ## memory that a file of SIZE (default 1GB) costs by each way in
	$(BIN)/python benchmarks/bench_upload_memory.py --size $(SIZE)

bench: bench-accept bench-overhead bench-images bench-video bench-queue bench-telling bench-uploads bench-start  ## all benchmarks

soak: $(DEV)  ## random faults for SECONDS (default 600), then an independent check; prints its seed
	$(BIN)/python benchmarks/soak.py

lock: $(DEV)  ## pin every requirement again, with hashes and without addresses
	$(BIN)/uv pip compile -q --universal --python-version 3.11 pyproject.toml --extra embedded --extra tools --extra s3 --extra azure --extra gcs --group dev --generate-hashes --no-emit-index-url --no-header -o requirements/dev.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 pyproject.toml --extra embedded --extra tools -c requirements/dev.txt --generate-hashes --no-emit-index-url --no-header -o requirements/run.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 requirements/build.in --generate-hashes --no-emit-index-url --no-header -o requirements/build.txt

clean:  ## remove the virtual environment and the demo's data
	rm -rf $(VENV) .mediamill demo-result.json
