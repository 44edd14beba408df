"""LangChain: its pipeline, called, in a batch and streamed."""

import json
import sys
from pathlib import Path

from langchain_huggingface import HuggingFacePipeline

folder, prompts, output = sys.argv[1:]
texts = json.loads(Path(prompts).read_text())
settings = {"max_new_tokens": 48, "do_sample": False}
llm = HuggingFacePipeline.from_model_id(folder, "text-generation", pipeline_kwargs=settings)
answers = [llm.invoke(texts[0]), *llm.batch(texts), "".join(llm.stream(texts[0]))]
Path(output).write_text(json.dumps(answers))
