"""The replay of a generation: its data, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import make_prompt
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import hf_ddtree
from hf_ddtree import DDTreeOutput, DDTreeStats, DraftTree
from hf_ddtree.testing import OracleTreeCandidateGenerator
from hf_ddtree.visualize import Lane, save_html
from hf_ddtree.visualize.replay import text_pieces

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title = 'taken over'</script>"
ROUNDS, NODES, DEPTH = 1000, 512, 8


class Words:
    """A tokenizer of words, of which one is hostile."""

    pad_token_id = 0
    words = ["", "<!--", "{{js}}", HOSTILE, " a", "\n", " needle", "é", "\u2028"] + [f" w{i}" for i in range(9, 64)]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.words[token % len(self.words)] for token in token_ids)


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def long_output() -> DDTreeOutput:
    """Many large rounds, of which the one before the last holds the needle; the hostile token is in all texts."""
    stats = DDTreeStats.keeping_trees()
    parents = torch.tensor([-1, *[(node - 1) // 2 for node in range(1, NODES + 1)]])
    log_probs = -0.5 * torch.log2(torch.arange(1, NODES + 2)).floor()
    roots = [3 if index % 9 == 0 else 9 + index % 20 for index in range(ROUNDS + 1)]
    for index, root in enumerate(roots[:-1]):
        tokens = torch.tensor([root, *[9 + (node * 7 + index) % 55 for node in range(1, NODES + 1)]])
        if index == ROUNDS - 2:
            tokens[2] = 6
        stats.count([DraftTree(tokens, parents, log_probs)], [[0, 1, 3]], torch.zeros(1, NODES + 1, 64))
    new = [token for trees in stats.trees for token in trees[0].token_ids[[0, 1, 3]].tolist()]
    return DDTreeOutput(sequences=torch.tensor([[0, 0, 4, *new, roots[-1]]]), ddtree_stats=stats)


# --- what the file holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 1])
def test_the_pieces_are_the_text_of_standard_decoding(row, tmp_path):
    model = make_model("llama", "sdpa")
    prompts = torch.cat([make_prompt(0), make_prompt(1)])
    arguments = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(prompts, **arguments)
    output = model.generate(
        prompts,
        **arguments,
        generation_strategy="ddtree",
        candidate_generator=OracleTreeCandidateGenerator(plain, VOCAB_SIZE),
        tree_budget=9,
        return_dict_in_generate=True,
        return_trees=True,
    )
    save_html(output, Words(), tmp_path / "page.html", row)
    data = data_of(tmp_path / "page.html")
    assert data["prompt"] == Words().decode(prompts[row].tolist())
    assert "".join(data["pieces"]) == Words().decode(plain[row, prompts.shape[1] :].tolist())
    emitted = [int(plain[row, prompts.shape[1]])]
    for current in data["rounds"]:
        assert current["tokens"][0] == emitted[-1]
        emitted += [current["tokens"][node] for node in current["path"][1:]] + [current["next"]]
    assert emitted == plain[row, prompts.shape[1] :].tolist()


def test_probabilities_of_the_target_are_those_of_its_own_forward(tmp_path):
    model, drafter, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer("def total(values):\n", return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=24,
        generation_strategy="ddtree",
        assistant_model=drafter,
        tree_budget=8,
        return_dict_in_generate=True,
        return_trees=True,
    )
    stats, start = output.ddtree_stats, inputs.input_ids.shape[1]
    compared = 0
    for trees, paths, (shares,) in zip(stats.trees, stats.accepted_paths, stats.target_probabilities):
        tree, known = trees[0], output.sequences[:, :start]
        assert shares[0] == 1.0 and len(shares) == len(tree)
        for node in (1, len(tree) - 1):
            branch = torch.tensor([tree.tokens_of(tree.path(node))])
            logits = model(torch.cat([known, branch[:, :-1]], dim=1)).logits[0, -1]
            assert shares[node] == pytest.approx(logits.softmax(-1)[branch[0, -1]].item(), rel=1e-3, abs=1e-6)
            compared += 1
        start += len(paths[0])
    assert compared > 4
    assert json.loads(json.dumps(stats.to_dict()))["target_probabilities"] == stats.target_probabilities


def test_a_character_of_several_tokens_comes_with_the_last():
    _, _, tokenizer = hf_ddtree.load_demo()
    text = "x = 'äöü 漢字'  # ✓ done\n" * 4
    tokens = tokenizer(text).input_ids
    pieces = text_pieces(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) and len(pieces) == len(tokens)
    assert not any("\ufffd" in piece for piece in pieces) and "" in pieces


def test_refuses_what_it_cannot_show(tmp_path):
    output = long_output()
    output.ddtree_stats = DDTreeStats()
    with pytest.raises(ValueError, match="return_trees=True"):
        save_html(output, Words(), tmp_path / "page.html")


@pytest.mark.parametrize("row", [1, -1, "0", None])
def test_refuses_a_row_that_is_not_there(row, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"`row` is {row!r}, but must be 0")):
        save_html(long_output(), Words(), tmp_path / "page.html", row=row)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output": torch.zeros(1, 3)}, ValueError, "`output`, a `Tensor`, holds no trees. Pass `return_dict"),
        ({"tokenizer": "gpt2"}, TypeError, "`tokenizer` must have `decode`, as tokenizers do, but is a `str`"),
        ({"race": ["tree"]}, TypeError, "`race` must hold `hf_ddtree.visualize.Lane`, but holds a `str`"),
        ({"path": "no/such/folder/page.html"}, OSError, "The folder of `path`, 'no/such/folder', does not exist"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message, tmp_path):
    given = {"output": long_output(), "tokenizer": Words(), "path": tmp_path / "page.html"} | arguments
    with pytest.raises(error, match=message):
        save_html(**given)


def test_says_what_was_run(tmp_path):
    model, drafter, tokenizer = hf_ddtree.load_demo()
    save_html(long_output(), Words(), tmp_path / "page.html", model=model, drafter=drafter)
    facts = data_of(tmp_path / "page.html")["facts"]
    assert list(facts) == ["target", "drafter", "device", "versions"]
    assert re.fullmatch(r"demo_pair/target, \w+ForCausalLM, \d+\.\d million parameters, float32", facts["target"])
    assert facts["drafter"].startswith("demo_pair/drafter, DFlash2DraftModel, ")
    assert facts["device"].endswith(f"{torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1))
    assert f"torch {torch.__version__}, transformers {transformers.__version__}" in facts["versions"]
    save_html(long_output(), Words(), tmp_path / "page.html", model=model, drafter="prompt lookup")
    assert data_of(tmp_path / "page.html")["facts"]["drafter"] == "prompt lookup"
    save_html(long_output(), Words(), tmp_path / "page.html")
    assert data_of(tmp_path / "page.html")["facts"] == {}


def test_no_text_ends_the_data(tmp_path):
    save_html(long_output(), Words(), tmp_path / "page.html", race=[Lane(HOSTILE, [3], [0.5])])
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("</script>") == text.count("<script") == 2
    assert data_of(tmp_path / "page.html")["texts"]["3"] == HOSTILE
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg")""", text)


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        pytest.skip("needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)")
    path = tmp_path_factory.mktemp("replay") / "page.html"
    lanes = [Lane(title, [9, 10, 11], [at, 2 * at, 3 * at]) for title, at in (("standard", 0.2), (HOSTILE, 0.05))]
    model, _, _ = hf_ddtree.load_demo()
    model.name_or_path = "somebody/target"
    save_html(long_output(), Words(), path, race=lanes, model=model, drafter=HOSTILE)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.implicitly_wait(0)
    driver.get(path.as_uri())
    yield driver
    driver.quit()


def text_of(page: webdriver.Chrome, name: str) -> str:
    return page.find_element(By.ID, name).get_property("textContent")


def press(page: webdriver.Chrome, key: str) -> None:
    page.find_element(By.TAG_NAME, "body").send_keys(key)


def wait_until(page: webdriver.Chrome, condition) -> None:
    WebDriverWait(page, 20, poll_frequency=0.02).until(lambda _: condition())


def test_nothing_of_a_hostile_token_runs(page):
    press(page, Keys.HOME)
    assert page.title == "Tree decoding, round by round"
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert HOSTILE in text_of(page, "before") and len(page.find_elements(By.TAG_NAME, "script")) == 2
    assert page.find_elements(By.CSS_SELECTOR, ".lane b")[1].text == HOSTILE
    names, texts = ([one.text for one in page.find_elements(By.CSS_SELECTOR, f"#facts {tag}")] for tag in ("dt", "dd"))
    assert names == ["target", "drafter", "device", "versions"]
    assert texts[0].startswith("somebody/target, ") and texts[1] == HOSTILE


def test_steps_by_keys_and_mouse(page):
    press(page, Keys.HOME)
    assert text_of(page, "round") == f"1 of {ROUNDS}" and text_of(page, "tokens") == f"4 of {1 + 3 * ROUNDS}"
    press(page, Keys.ARROW_RIGHT)
    assert text_of(page, "round").startswith("2 of")
    page.find_element(By.ID, "next").click()
    assert text_of(page, "round").startswith("3 of")
    press(page, Keys.ARROW_LEFT)
    assert text_of(page, "round").startswith("2 of")
    press(page, Keys.END)
    assert text_of(page, "round") == f"{ROUNDS} of {ROUNDS}"
    page.find_element(By.ID, "strip").click()  # in its middle
    assert abs(int(text_of(page, "round").split()[0]) - ROUNDS / 2) < 4


def test_shows_the_tree_and_what_was_accepted(page):
    press(page, Keys.HOME)
    output = long_output()
    nodes = page.find_elements(By.CSS_SELECTOR, "#tree .node")
    assert len(nodes) == NODES + 2
    classes = [node.get_attribute("class").split()[1] for node in nodes]
    assert [place for place, name in enumerate(classes) if name == "accepted"] == [0, 1, 3]
    assert classes[-1] == "own" and classes.count("rejected") == NODES - 2
    tokens = output.ddtree_stats.trees[0][0].token_ids.tolist()
    assert nodes[1].find_element(By.TAG_NAME, "span").text == Words().decode([tokens[1]]).replace(" ", "·")
    assert [part.text for part in nodes[1].find_elements(By.TAG_NAME, "b")] == ["61%", "1.6%"]
    assert (text_of(page, "accepted"), text_of(page, "rejected")) == ("2 + 1", str(NODES - 2))
    assert text_of(page, "added") + text_of(page, "own") == Words().decode(output.sequences[0, 4:7].tolist())
    page.execute_script("arguments[0].click()", nodes[3])
    assert "depth 2 | drafter 61%, whole path 37% | target 1.6% | accepted" in text_of(page, "detail")


def test_plays_to_the_end_and_stops(page):
    press(page, Keys.END)
    for _ in range(2):
        press(page, Keys.ARROW_LEFT)
    page.execute_script("document.getElementById('speed').value = '20'")
    press(page, " ")
    assert text_of(page, "play") == "Pause"
    wait_until(page, lambda: text_of(page, "play") == "Play")
    assert text_of(page, "round") == f"{ROUNDS} of {ROUNDS}"


def test_finds_a_token(page):
    press(page, Keys.HOME)
    press(page, "/")
    page.switch_to.active_element.send_keys("Needle", Keys.ENTER)
    assert text_of(page, "round") == f"{ROUNDS - 1} of {ROUNDS}" and text_of(page, "found") == "1 of 1 rounds"
    assert [node.text.split("\n")[0] for node in page.find_elements(By.CSS_SELECTOR, ".hit")] == ["·needle"]
    page.switch_to.active_element.send_keys(Keys.BACKSPACE * 6, Keys.ESCAPE)
    assert text_of(page, "found") == "" and not page.find_elements(By.CSS_SELECTOR, ".hit")


def test_races_on_one_clock(page):
    finished = "return [...document.querySelectorAll('.lane')].map((lane) => lane.classList.contains('done'))"
    page.execute_script("race.clock = 0.3; showRace()")
    assert page.execute_script(finished) == [False, True]
    assert [lane.text.split(",")[0] for lane in page.find_elements(By.CSS_SELECTOR, ".lane output")] == [
        "1 of 3 tokens",
        "3 of 3 tokens",
    ]
    press(page, "r")
    wait_until(page, lambda: text_of(page, "race-play") == "Again")
    assert page.execute_script(finished) == [True, True] and text_of(page, "race-clock") == "0.60 s"


@pytest.mark.parametrize("width", [360, 1200])
def test_fits_the_width(page, width):
    page.set_window_size(max(width, 500), 900)  # a window of Chromium is no narrower
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
