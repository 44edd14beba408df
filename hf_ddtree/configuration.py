"""The knobs of tree decoding and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, get_args

from .budget.policy import BudgetPolicy
from .tree.shape import MOST_NODES, TreeShape, require_tree_shape
from .validation import describe_type, did_you_mean, require_positive_int

# What each strategy fixes of `DDTreeConfig`: a chain is a tree of width 1.
STRATEGIES: dict[str, dict[str, Any]] = {"ddtree": {}, "dflash": {"tree_shape": "chain"}}

# The name for standard decoding, which switches off the strategy of a generation config.
STANDARD = "standard"

# The name of the drafter that is none: what followed the last tokens earlier in the text.
LOOKUP = "lookup"

TreeProbabilities = Literal["conditional", "marginal"]
TreeLookup = Literal["text", "target"]
TREE_LOOKUPS: tuple[str, ...] = get_args(TreeLookup)
TREE_PROBABILITIES: tuple[str, ...] = get_args(TreeProbabilities)


@dataclass(frozen=True)
class DDTreeConfig:
    """The knobs of tree decoding; each is also accepted as a plain keyword of `generate()`.

    Args:
        drafter: The drafter by name, where no object can be passed, such as in JSON: a folder or a repository of the
            Hub as `load_drafter` takes it, `"mtp"` for the target's own multi-token-prediction layers, or `"lookup"`
            for prompt lookup alone. It is loaded once for a target and shared by all its calls.
        tree_budget: Most nodes drafted in one round, the root excluded. `"auto"` learns while decoding which number
            gives most tokens per second, standard decoding included; a `BudgetPolicy` decides by itself.
        tree_shape: How the budget is spent. `"best_first"` takes the most probable prefixes (DDTree,
            arXiv:2604.12989), `"spine_first"` takes the whole top-1 chain and then the most probable of the other
            prefixes, `"chain"` takes the top-1 chain alone. By default what suits the drafter: spine-first for one
            that expands its tree level by level, best-first for one that drafts a block.
        tree_probabilities: `"conditional"` takes the probability of a token given those before it: where the drafter
            knows it, as DFlash 2 does, from the drafter, and for other DFlash drafters from what the target said after
            the same tokens, if they may `calibrate` and the call has a `tree_lookup` or a `draft_memory`. `"marginal"`
            takes a position's distribution alone.
        tree_top_k: Most candidate tokens considered at each depth. By default as many as can matter under the budget.
        draft_length: Depth of the deepest node. By default the drafter's horizon.
        tree_lookup: Whether to draft from what the text repeats and from what the target said before: in addition to
            the drafter, or alone if there is none. `"text"` and `"target"` draft from one of the two alone.
        max_matching_ngram_size: Most of the last tokens that a lookup matches. By default as many as match.
        calibrate: Whether a DFlash drafter learns while decoding how often its candidates are accepted, so that trees
            are built from calibrated probabilities. The same call then builds other trees the next time; its tokens
            stay the same.
        return_trees: Whether the output's `ddtree_stats` keeps the trees of all rounds.

    Raises:
        ValueError: If a knob has a value that is not allowed.
    """

    drafter: str | None = None
    tree_budget: int | Literal["auto"] | BudgetPolicy = "auto"
    tree_shape: TreeShape | None = None
    tree_probabilities: TreeProbabilities = "conditional"
    tree_top_k: int | None = None
    draft_length: int | None = None
    tree_lookup: bool | TreeLookup = False
    max_matching_ngram_size: int | None = None
    calibrate: bool = True
    return_trees: bool = False

    def __post_init__(self) -> None:
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            given = "empty" if self.drafter == "" else describe_type(self.drafter)
            raise ValueError(
                f'`drafter` must be a folder, a repository of the Hub, "mtp" or "lookup", but is {given}. Pass a '
                "loaded drafter as `assistant_model`."
            )
        self._check_tree_budget()
        if self.tree_shape is not None:
            require_tree_shape("tree_shape", self.tree_shape)
        if self.tree_probabilities not in TREE_PROBABILITIES:
            allowed = ", ".join(map(repr, TREE_PROBABILITIES))
            raise ValueError(f"`tree_probabilities` must be one of {allowed}, but is {self.tree_probabilities!r}.")
        for name in ("tree_top_k", "draft_length", "max_matching_ngram_size"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name), or_none=True)
        if not isinstance(self.tree_lookup, bool) and self.tree_lookup not in TREE_LOOKUPS:
            allowed = ", ".join(map(repr, TREE_LOOKUPS))
            raise ValueError(f"`tree_lookup` must be True, False or one of {allowed}, but is {self.tree_lookup!r}.")
        for name in ("calibrate", "return_trees"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, but is {getattr(self, name)!r}.")

    def _check_tree_budget(self) -> None:
        budget = self.tree_budget
        if budget == "auto" or isinstance(budget, BudgetPolicy):
            return
        if not isinstance(budget, Integral):
            given = f"{describe_type(budget)}. Pass an instance of it" if isinstance(budget, type) else repr(budget)
            raise ValueError(
                '`tree_budget` must be an integer of at least 1, "auto" or an instance of `hf_ddtree.BudgetPolicy`, '
                f"but is {given}."
            )
        require_positive_int("tree_budget", budget)
        if budget > MOST_NODES:
            raise ValueError(
                f"`tree_budget` is {budget}, but a tree has at most {MOST_NODES} nodes: its ancestor mask has an "
                "entry for each pair of them. Budgets beyond a few hundred hardly ever pay."
            )

    @classmethod
    def knobs(cls) -> tuple[str, ...]:
        """Names of all knobs."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> tuple[DDTreeConfig, dict[str, Any]]:
        """Splits keyword arguments into a configuration and the keyword arguments that are no knobs.

        Raises:
            ValueError: If a knob has a value that is not allowed.
        """
        known = cls.knobs()
        rest = {name: value for name, value in kwargs.items() if name not in known}
        return cls(**{name: value for name, value in kwargs.items() if name in known}), rest

    @classmethod
    def from_knobs(cls, function: str, **knobs: Any) -> DDTreeConfig:
        """A configuration from the keyword arguments of a function that takes nothing but knobs.

        Args:
            function: Its name, for the error message.
            **knobs: The keyword arguments.

        Raises:
            ValueError: If a knob has a value that is not allowed.
            TypeError: If a keyword argument is not a knob.
        """
        config, unknown = cls.from_kwargs(knobs)
        if unknown:
            parameters = (
                *cls.knobs(),
                "assistant_model",
                "candidate_generator",
                "draft_state",
                "draft_memory",
                "record_to",
                "streamer",
            )
            raise TypeError(
                f"`{function}` has no argument {', '.join(map(repr, unknown))}."
                f"{did_you_mean(next(iter(unknown)), parameters)} Its knobs are {', '.join(cls.knobs())}."
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """All knobs by name."""
        return {name: getattr(self, name) for name in self.knobs()}
