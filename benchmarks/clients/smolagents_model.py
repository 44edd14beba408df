"""smolagents: its local model, whole and streamed, with stop sequences."""

import json
import sys
from pathlib import Path

from smolagents import ChatMessage, TransformersModel

folder, prompts, output = sys.argv[1:]
model = TransformersModel(folder, device_map="cpu", max_new_tokens=48, do_sample=False)
answers = []
for text in json.loads(Path(prompts).read_text()):
    messages = [ChatMessage(role="user", content=[{"type": "text", "text": text}])]
    answers.append(model.generate(messages).content)
    answers.append(model.generate(messages, stop_sequences=["self", ")"]).content)
    answers.append("".join(delta.content or "" for delta in model.generate_stream(messages)))
Path(output).write_text(json.dumps(answers))
