"""The configuration of a DSpark drafter with Gemma 4's layers."""

from huggingface_hub.dataclasses import strict

from ..dspark.config import DSparkConfig


@strict
class Gemma4DSparkConfig(DSparkConfig):
    """A `DSparkConfig` for layers of Gemma 4 with full attention.

    Args:
        attention_k_eq_v: Whether one projection gives both keys and values.
    """

    model_type = "hf_ddtree_gemma4_dspark"

    attention_k_eq_v: bool = False
