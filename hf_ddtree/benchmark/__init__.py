"""Measures methods of decoding against each other: the same prompts, alternating, every token compared."""

from .methods import Method, make_methods
from .prompts import DATASETS, load_prompts, prompt_of
from .report import Report, compare
from .run import benchmark

__all__ = ["DATASETS", "Method", "Report", "benchmark", "compare", "load_prompts", "make_methods", "prompt_of"]
