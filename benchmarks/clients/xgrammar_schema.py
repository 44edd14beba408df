"""xgrammar: JSON of a schema, by its logits processor."""

import json
import sys
from pathlib import Path

import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer
from xgrammar.contrib.hf import LogitsProcessor

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["module", "class", "function"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,10}$"},
        "public": {"type": "boolean"},
    },
    "required": ["kind", "name", "public"],
}
folder, prompts, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
answers = []
for text in json.loads(Path(prompts).read_text()):
    inputs = tokenizer(text, return_tensors="pt")
    processors = [LogitsProcessor(grammar)]
    out = model.generate(**inputs, max_new_tokens=64, do_sample=False, logits_processor=processors)
    answers.append(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    json.loads(answers[-1])
Path(output).write_text(json.dumps(answers))
