"""PEFT: LoRA switched, disabled, in a batch of several, on embeddings, merged."""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

model, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
inputs = tokenizer(json.loads(Path(prompts).read_text()), return_tensors="pt", padding=True)


def make(targets: list[str]):
    """A model with the adapters `one` and `two`, which change what it says."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config, adapter_name="one")
    adapted.add_adapter("two", config)
    for name, weights in adapted.named_parameters():
        if "lora" in name:
            weights.data *= 0.5
    return adapted.eval()


def complete(adapted, **kwargs) -> list[list[int]]:
    return adapted.generate(**inputs, max_new_tokens=48, do_sample=False, **kwargs).tolist()


answers = {}
adapted = make(["q_proj", "down_proj"])
for name in ("one", "two"):
    adapted.set_adapter(name)
    answers[name] = complete(adapted)
with adapted.disable_adapter():
    answers["disabled"] = complete(adapted)
answers["mixed"] = complete(adapted, adapter_names=["one", "two", "__base__"])
on_embeddings = make(["embed_tokens", "q_proj"])
answers["on embeddings"] = complete(on_embeddings)
answers["merged"] = complete(adapted.merge_and_unload())
Path(output).write_text(json.dumps(answers))
