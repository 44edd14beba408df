"""outlines: JSON of a data class."""

import json
import sys
from pathlib import Path
from typing import Literal

import outlines
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class Definition(BaseModel):
    kind: Literal["module", "class", "function"]
    is_public: bool
    lines: Literal[10, 100, 1000]


folder, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = outlines.from_transformers(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
answers = []
for text in json.loads(Path(prompts).read_text()):
    answers.append(model(text, Definition, max_new_tokens=64, do_sample=False))
    Definition.model_validate_json(answers[-1])
Path(output).write_text(json.dumps(answers))
