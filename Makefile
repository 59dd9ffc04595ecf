# One line each over dev.py, which also runs without make: python3 dev.py TARGET [ARGS…]
PYTHON ?= python3
ARGS ?=

.PHONY: help demo serve test test-slow lint stubs dist env clean
help: ; @$(PYTHON) dev.py --help
demo serve test test-slow lint stubs dist env clean: ; @$(PYTHON) dev.py $@ $(ARGS)
bench-%: ; @$(PYTHON) dev.py $@ $(ARGS)
