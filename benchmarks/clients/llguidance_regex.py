"""llguidance: text of a regular expression, by a logits processor around its matcher."""

import json
import re
import sys
from pathlib import Path

import llguidance
import llguidance.hf
import llguidance.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

CALL = r"[a-z][a-z_]{1,8}\([a-z0-9]{1,6}(, [a-z0-9]{1,6}){0,4}\)"


class Guided(LogitsProcessor):
    """Lets through the tokens that the matcher allows, which is told each token once."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, num_tokens: int) -> None:
        self._matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(CALL))
        self._mask = llguidance.torch.allocate_token_bitmask(1, num_tokens)
        self._told: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._told is not None:
            self._matcher.consume_tokens(input_ids[0, self._told :].tolist())
        self._told = input_ids.shape[1]
        llguidance.torch.fill_next_token_bitmask(self._matcher, self._mask)
        llguidance.torch.apply_token_bitmask_inplace(scores, self._mask)
        return scores


folder, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
guide = llguidance.hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size)
answers = []
for text in json.loads(Path(prompts).read_text()):
    inputs = tokenizer(text, return_tensors="pt")
    processors = [Guided(guide, model.config.vocab_size)]
    out = model.generate(**inputs, max_new_tokens=64, do_sample=False, logits_processor=processors)
    answers.append(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    assert re.fullmatch(CALL, answers[-1]), answers[-1]
Path(output).write_text(json.dumps(answers))
