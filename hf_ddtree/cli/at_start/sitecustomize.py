"""Imported by every Python process under `hf-ddtree run`: registers the strategy, and logs what calls gain.

Transformers' server says there what is wrong with a request.
"""

import importlib.util
import logging
import os
import sys
from importlib.machinery import PathFinder


def _run_the_next() -> None:
    """Runs the `sitecustomize` that this one hides, if the environment has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _register() -> None:
    try:
        from hf_ddtree.serving import refuse_wrong_requests
    except ImportError as error:
        print(f"hf-ddtree run: {sys.executable} cannot import hf_ddtree ({error})", file=sys.stderr)
        return
    refuse_wrong_requests()
    if os.environ.get("HF_DDTREE_LOG") == "1":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hf-ddtree: %(message)s"))
        logger = logging.getLogger("hf_ddtree")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


_run_the_next()
_register()
