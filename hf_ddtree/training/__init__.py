"""Training drafters for a target."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..drafters.speculators.writing import save_for_speculators
    from ..drafters.zlab.writing import save_drafter
    from .config import TrainingConfig
    from .documents import Document, PackedDocuments, Rows, RowSource
    from .evaluation import Evaluation, Evaluator
    from .from_scratch import find_mask_token, new_drafter
    from .head_alone import add_head
    from .trainer import DrafterTrainer

# Where the names are; imported when they are first asked for, as only the trainer needs `accelerate`.
_HOMES = {
    "Document": ".documents",
    "DrafterTrainer": ".trainer",
    "Evaluation": ".evaluation",
    "Evaluator": ".evaluation",
    "PackedDocuments": ".documents",
    "RowSource": ".documents",
    "Rows": ".documents",
    "TrainingConfig": ".config",
    "add_head": ".head_alone",
    "find_mask_token": ".from_scratch",
    "new_drafter": ".from_scratch",
    "save_drafter": "..drafters.zlab.writing",
    "save_for_speculators": "..drafters.speculators.writing",
}

__all__ = [
    "Document",
    "DrafterTrainer",
    "Evaluation",
    "Evaluator",
    "PackedDocuments",
    "RowSource",
    "Rows",
    "TrainingConfig",
    "add_head",
    "find_mask_token",
    "new_drafter",
    "save_drafter",
    "save_for_speculators",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(import_module(_HOMES[name], __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
