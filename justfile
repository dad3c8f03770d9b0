# The tasks of CONTRIBUTING.md. `just` lists them; `just setup` comes first.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

_list:
    @just --list --unsorted

# an environment in .venv with everything for development
setup:
    python3 -m venv .venv
    pip install -c constraints.txt -e '.[dev]'

# the tests, or those named: just test tests/drafters -k ngram
test *args:
    pytest -n 2 {{ args }}

# format, then every check of .pre-commit-config.yaml and the types
lint:
    pre-commit run --all-files
    mypy --strict specdec

# the site in docs/_build, warnings are errors
docs out="docs/_build":
    sphinx-build -n -W --keep-going -q -b html docs {{ out }}

# docs/models.md, written by the tests that compare families and formats with other code
models-map:
    SPECDEC_MODELS_MAP=docs/models.md pytest -m "" tests/models tests/drafters/test_mtp_drafts.py \
        tests/checkpoints/quantised -k "equal or after_prefill or decoded"

# the program output in docs/getting-started.md
sample-output:
    python docs/_ext/sample_output.py

# what the fragments in changes/ would add to CHANGELOG.md
changes:
    towncrier build --draft

# the whole gate, in new environments
ci *args:
    .ci/run {{ args }}
