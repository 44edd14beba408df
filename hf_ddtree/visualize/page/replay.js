"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const NODE = { width: 112, height: 38, across: 134, down: 44, margin: 10 };
// Tokens of a lane in the race that are shown.
const TAIL = 100;
const SVG = "http://www.w3.org/2000/svg";

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
const percent = (share) => (share === null ? "?" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`);

// --- rounds ---------------------------------------------------------------------------------------------------------

const { rounds, pieces, texts } = data;
// New tokens before each round, and after the last; the forward over the prompt gives the first.
const starts = [1];
for (const round of rounds) starts.push(starts.at(-1) + round.path.length);
let current = 0;
let hits = [];

function show(index) {
  current = Math.max(0, Math.min(rounds.length - 1, index));
  byId("slider").value = current;
  showText();
  showCounters();
  showTree();
  drawStrip();
  showHits();
}

function showText() {
  const [start, end] = rounds.length ? [starts[current], starts[current + 1]] : [pieces.length, pieces.length];
  byId("before").textContent = pieces.slice(0, start).join("");
  byId("added").textContent = pieces.slice(start, Math.max(start, end - 1)).join("");
  byId("own").textContent = end > start ? pieces[end - 1] : "";
  const box = byId("text");
  box.scrollTop = byId("own").offsetTop - box.offsetTop - box.clientHeight / 2;
}

function showCounters() {
  const round = rounds[current];
  const drafted = round ? round.tokens.length - 1 : 0;
  const accepted = round ? round.path.length - 1 : 0;
  byId("round").textContent = round ? `${current + 1} of ${rounds.length}` : "none";
  byId("drafted").textContent = drafted;
  byId("accepted").textContent = round ? `${accepted} + 1` : 0;
  byId("rejected").textContent = drafted - accepted;
  byId("tokens").textContent = round ? `${starts[current + 1]} of ${pieces.length}` : pieces.length;
  byId("mean").textContent = round ? ((starts[current + 1] - 1) / (current + 1)).toFixed(2) : "";
}

// --- tree -----------------------------------------------------------------------------------------------------------

// Where each node is drawn. A node's first child is in its row, every other child in a row below. The target's own
// token, one more node behind the accepted path, comes first.
function layOut(round) {
  const own = round.tokens.length;
  const children = Array.from({ length: own + 1 }, () => []);
  for (let node = 1; node < own; node++) children[round.parents[node]].push(node);
  for (const of of children) of.sort((a, b) => round.drafter[b] - round.drafter[a]);
  children[round.path.at(-1)].unshift(own);
  const places = [];
  const waiting = [{ node: 0, column: 0, isFirst: true }];
  let row = 0;
  while (waiting.length) {
    const { node, column, isFirst } = waiting.pop();
    if (!isFirst) row += 1;
    places[node] = { x: NODE.margin + column * NODE.across, y: NODE.margin + row * NODE.down };
    for (let i = children[node].length - 1; i >= 0; i--) {
      waiting.push({ node: children[node][i], column: column + 1, isFirst: i === 0 });
    }
  }
  return places;
}

function showTree() {
  const box = byId("tree");
  box.replaceChildren();
  byId("detail").textContent = "Select a node for its numbers.";
  if (!rounds.length) return;
  const round = rounds[current];
  const places = layOut(round);
  const accepted = new Set(round.path);
  box.append(edges(round, places, accepted));
  places.forEach((place, node) => box.append(nodeButton(round, node, place, accepted)));
  const last = places[round.path.at(-1)];
  box.scrollTo(Math.max(0, last.x + 2 * NODE.across - box.clientWidth), Math.max(0, last.y - box.clientHeight / 2));
}

function edges(round, places, accepted) {
  const lines = { rejected: "", accepted: "" };
  places.forEach((place, node) => {
    if (node === 0) return;
    const isOwn = node === round.tokens.length;
    const parent = places[isOwn ? round.path.at(-1) : round.parents[node]];
    const [x, y] = [parent.x + NODE.width, parent.y + NODE.height / 2];
    const middle = x + (NODE.across - NODE.width) / 2;
    lines[isOwn || accepted.has(node) ? "accepted" : "rejected"] +=
      `M${x} ${y}H${middle}V${place.y + NODE.height / 2}H${place.x}`;
  });
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("width", Math.max(...places.map((place) => place.x)) + NODE.width + NODE.margin);
  drawing.setAttribute("height", Math.max(...places.map((place) => place.y)) + NODE.height + NODE.margin);
  for (const [kind, line] of Object.entries(lines)) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", line);
    drawing.append(path);
  }
  return drawing;
}

function nodeButton(round, node, place, accepted) {
  const isOwn = node === round.tokens.length;
  const text = texts[isOwn ? round.next : round.tokens[node]];
  const button = element("button", `node ${isOwn ? "own" : accepted.has(node) ? "accepted" : "rejected"}`);
  button.style.left = `${place.x}px`;
  button.style.top = `${place.y}px`;
  button.dataset.text = text.toLowerCase();
  button.append(element("span", "", visible(text)));
  if (node > 0 && !isOwn) {
    const numbers = element("small");
    numbers.append(element("b", "drafter", percent(round.drafter[node])));
    if (round.target) numbers.append(element("b", "target", percent(round.target[node])));
    button.append(numbers);
  }
  button.addEventListener("click", () => showDetail(round, node));
  return button;
}

function showDetail(round, node) {
  const isOwn = node === round.tokens.length;
  const id = isOwn ? round.next : round.tokens[node];
  const parts = [`${JSON.stringify(texts[id])}, token ${id}`];
  if (isOwn) parts.push("the target's own token");
  else if (node === 0) parts.push("the last token of the round before");
  else {
    let [depth, share] = [0, 1];
    for (let up = node; up > 0; up = round.parents[up]) [depth, share] = [depth + 1, share * round.drafter[up]];
    parts.push(`depth ${depth}`, `drafter ${percent(round.drafter[node])}, whole path ${percent(share)}`);
    if (round.target) parts.push(`target ${percent(round.target[node])}`);
    parts.push(round.path.includes(node) ? "accepted" : "not accepted");
  }
  byId("detail").textContent = parts.join(" | ");
}

// --- strip of all rounds --------------------------------------------------------------------------------------------

function drawStrip() {
  const canvas = byId("strip");
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name);
  const most = rounds.reduce((high, round) => Math.max(high, round.path.length), 1);
  const step = width / Math.max(1, rounds.length);
  const found = new Set(hits);
  context.clearRect(0, 0, width, height);
  rounds.forEach((round, index) => {
    const high = (height * round.path.length) / most;
    const name = index === current ? "--accepted" : found.has(index) ? "--hit" : "--line";
    context.fillStyle = color(name);
    const wide = Math.max(index === current ? 3 * scale : 1, step - (step > 4 ? 1 : 0));
    context.fillRect(index * step, height - high, wide, high);
  });
}

// --- search ---------------------------------------------------------------------------------------------------------

function search() {
  const wanted = byId("search").value.toLowerCase();
  const tokens = new Set(Object.keys(texts).filter((id) => texts[id].toLowerCase().includes(wanted)).map(Number));
  const isHit = (round) => tokens.has(round.next) || round.tokens.some((token) => tokens.has(token));
  hits = wanted ? rounds.flatMap((round, index) => (isHit(round) ? [index] : [])) : [];
  drawStrip();
  showHits();
}

function showHits() {
  const wanted = byId("search").value.toLowerCase();
  const place = hits.indexOf(current);
  byId("found").textContent = wanted ? `${place < 0 ? "" : `${place + 1} of `}${hits.length} rounds` : "";
  for (const button of byId("tree").querySelectorAll(".node")) {
    button.classList.toggle("hit", wanted !== "" && button.dataset.text.includes(wanted));
  }
}

function nextHit(step) {
  if (!hits.length) return;
  const later = hits.filter((index) => (step > 0 ? index > current : index < current));
  const wrapped = step > 0 ? hits[0] : hits.at(-1);
  show((step > 0 ? later[0] : later.at(-1)) ?? wrapped);
  byId("tree").querySelector(".hit")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- playing --------------------------------------------------------------------------------------------------------

let timer = null;

function play(isWanted = timer === null) {
  clearTimeout(timer);
  timer = null;
  byId("play").textContent = isWanted ? "Pause" : "Play";
  if (!isWanted) return;
  if (current === rounds.length - 1) show(0);
  const tick = () => {
    if (current >= rounds.length - 1) return play(false);
    show(current + 1);
    timer = setTimeout(tick, 1000 / byId("speed").value);
  };
  timer = setTimeout(tick, 1000 / byId("speed").value);
}

function step(index) {
  play(false);
  show(index);
}

// --- race -----------------------------------------------------------------------------------------------------------

const race = { lanes: [], frame: null, clock: 0, before: 0 };

function prepareRace() {
  byId("race").hidden = !data.race.length;
  for (const { title, pieces: ownPieces, seconds } of data.race) {
    const box = element("div", "lane");
    const [track, fill, numbers, text] = [element("div", "track"), element("div", "fill"), element("output"), element("p")];
    track.append(fill);
    box.append(element("b", "", title), track, numbers, text);
    byId("lanes").append(box);
    race.lanes.push({ box, fill, numbers, text, pieces: ownPieces, seconds });
  }
  showRace();
}

function showRace() {
  byId("race-clock").textContent = `${race.clock.toFixed(2)} s`;
  for (const lane of race.lanes) {
    const later = lane.seconds.findIndex((second) => second > race.clock);
    const count = race.clock === 0 ? 0 : later < 0 ? lane.seconds.length : later;
    const total = lane.seconds.at(-1) ?? 0;
    lane.fill.style.transform = `scaleX(${count / Math.max(1, lane.seconds.length)})`;
    lane.box.classList.toggle("done", count === lane.seconds.length);
    const rate = total > 0 ? ` (${(lane.seconds.length / total).toFixed(1)}/s)` : "";
    lane.numbers.textContent = `${count} of ${lane.seconds.length} tokens, all in ${total.toFixed(2)} s${rate}`;
    const tail = lane.pieces.slice(Math.max(0, count - TAIL), count).join("").slice(-4 * TAIL);
    lane.text.textContent = tail && visible(tail);
    lane.text.scrollLeft = lane.text.scrollWidth;
  }
}

function playRace() {
  const end = Math.max(...race.lanes.map((lane) => lane.seconds.at(-1) ?? 0));
  const isRunning = race.frame !== null;
  cancelAnimationFrame(race.frame);
  race.frame = null;
  byId("race-play").textContent = isRunning ? "Go on" : "Pause";
  if (isRunning) return;
  if (race.clock >= end) race.clock = 0;
  race.before = performance.now();
  const tick = (now) => {
    race.clock = Math.min(end, race.clock + (byId("race-speed").value * Math.max(0, now - race.before)) / 1000);
    race.before = now;
    showRace();
    const isOver = race.clock >= end;
    race.frame = isOver ? null : requestAnimationFrame(tick);
    if (isOver) byId("race-play").textContent = "Again";
  };
  race.frame = requestAnimationFrame(tick);
}

// --- hands ----------------------------------------------------------------------------------------------------------

const KEYS = {
  " ": () => play(),
  ArrowLeft: () => step(current - 1),
  ArrowRight: () => step(current + 1),
  Home: () => step(0),
  End: () => step(rounds.length - 1),
  "/": () => byId("search").focus(),
  r: () => data.race.length && playRace(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const place = event.target;
  if (place.matches("select, input[type=search]") || (place.matches("button") && event.key === " ")) return;
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") event.target.blur();
  if (event.key !== "Enter") return;
  play(false);
  nextHit(event.shiftKey ? -1 : 1);
});
byId("search").addEventListener("input", search);
byId("first").addEventListener("click", KEYS.Home);
byId("back").addEventListener("click", KEYS.ArrowLeft);
byId("play").addEventListener("click", () => play());
byId("next").addEventListener("click", KEYS.ArrowRight);
byId("last").addEventListener("click", KEYS.End);
byId("slider").addEventListener("input", (event) => step(Number(event.target.value)));
byId("strip").addEventListener("click", (event) => {
  step(Math.floor((event.offsetX / event.target.clientWidth) * rounds.length));
});
byId("race-play").addEventListener("click", playRace);
window.addEventListener("resize", drawStrip);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawStrip);

for (const [name, text] of Object.entries(data.facts)) {
  byId("facts").append(element("dt", "", name), element("dd", "", text));
}
byId("prompt").textContent = data.prompt;
byId("slider").max = Math.max(0, rounds.length - 1);
prepareRace();
show(0);
