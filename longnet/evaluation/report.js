"use strict";
const { runs, differences } = JSON.parse(document.getElementById("data").textContent);
const HUES = ["#0969da", "#d1570c", "#1a7f37", "#a40e6b", "#8250df", "#9a6700", "#0f7d8c", "#cf222e"];
const hidden = new Set();
const chosen = {};
const page = document.getElementById("page");
const tip = document.getElementById("tip");

/* Behind the hues that were chosen, steps of the golden angle: far from each other however many there are. */
const color = (run) => HUES[runs.indexOf(run)] ?? `hsl(${(runs.indexOf(run) * 137.5) % 360} 60% 45%)`;
const shown = () => runs.filter((run) => !hidden.has(run.name + run.label));
const evaluated = (table) => shown().filter((run) => run.evaluation && (run.evaluation[table] || []).length);

function make(parent, tag, attributes = {}, text = null) {
  const svg = ["svg", "path", "line", "text", "circle", "g", "rect"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  if (size > 0 && size < 1e-3) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

function length(value) {
  if (value >= 1048576 && value % 1048576 === 0) return value / 1048576 + "M";
  return value >= 1024 && value % 1024 === 0 ? value / 1024 + "K" : number(value);
}

function showTip(event, title, lines) {
  tip.replaceChildren();
  make(tip, "b", {}, title);
  for (const line of lines) make(tip, "div", {}, line);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - box.height - 4)) + "px";
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

function ticks(low, high, log) {
  if (log) {
    const found = [];
    const base = high / low > 200 ? 10 : 2;
    for (let power = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** power <= high * 1.0001; power++) found.push(base ** power);
    const every = Math.ceil(found.length / 6);
    return found.filter((_, index) => index % every === 0);
  }
  const rough = (high - low) / 4 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= rough) * unit;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(+value.toPrecision(12));
  return found;
}

/* A chart of several series; a series has {name, color, points: [[x, y, low, high]], dots}. */
function chart(parent, title, series, options = {}) {
  series = series.map((each) => ({ ...each, points: each.points.filter(([x, y]) => x !== null && y !== null && (!options.logX || x > 0)) }))
    .filter((each) => each.points.length);
  if (!series.length) return;
  const card = make(parent, "div", { class: "card chart" });
  make(card, "h3", {}, title);
  const width = Math.max(260, card.clientWidth - 26), height = 230;
  const [left, right, top, bottom] = [46, 10, 8, 34];
  const svg = make(card, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const points = series.flatMap((each) => each.points);
  const scale = (values, from, to, log) => {
    const f = log ? Math.log : (value) => value;
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { low = log ? low / 1.5 : low - (Math.abs(low) * 0.1 || 1); high = log ? high * 1.5 : high + (Math.abs(high) * 0.1 || 1); }
    return { low, high, at: (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from) };
  };
  const x = scale(points.map((p) => p[0]), left, width - right, options.logX);
  const bounds = points.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]]);
  const y = scale(options.fromZero ? [0, ...bounds] : bounds, height - bottom, top, options.logY);
  const name = options.nameX || number;
  for (const value of ticks(y.low, y.high, options.logY)) {
    make(svg, "line", { class: "axis", x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) });
    make(svg, "text", { x: left - 6, y: y.at(value) + 4, "text-anchor": "end" }, number(value));
  }
  for (const value of ticks(x.low, x.high, options.logX)) {
    make(svg, "text", { x: x.at(value), y: height - bottom + 15, "text-anchor": "middle" }, name(value));
  }
  make(svg, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, options.labelX || "");
  for (const each of series) {
    const line = (place) => each.points.map((p, i) => `${i ? "L" : "M"}${x.at(p[0]).toFixed(1)} ${y.at(place(p)).toFixed(1)}`).join("");
    const banded = each.points.filter((p) => p[2] != null && p[3] != null);
    if (banded.length > 1) {
      const outline = [...banded.map((p) => [p[0], p[3]]), ...banded.reverse().map((p) => [p[0], p[2]])];
      make(svg, "path", { d: "M" + outline.map((p) => `${x.at(p[0])} ${y.at(p[1])}`).join("L") + "Z", fill: each.color, opacity: 0.3 / (1 + series.length) });
    }
    if (!options.scatter) make(svg, "path", { d: line((p) => p[1]), fill: "none", stroke: each.color, "stroke-width": each.thin ? 1 : 1.8, opacity: each.thin ? 0.5 : 1, "data-run": each.name });
    if (options.scatter || each.points.length < 40) {
      for (const p of each.points) make(svg, "circle", { cx: x.at(p[0]), cy: y.at(p[1]), r: 3, fill: each.color });
    }
  }
  const guide = make(svg, "line", { class: "guide", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const near = (each) => each.points.reduce((best, p) => (Math.abs(x.at(p[0]) - at) < Math.abs(x.at(best[0]) - at) ? p : best));
    const nearest = series.map(near).reduce((best, p) => (Math.abs(x.at(p[0]) - at) < Math.abs(x.at(best[0]) - at) ? p : best));
    guide.setAttribute("x1", x.at(nearest[0])); guide.setAttribute("x2", x.at(nearest[0]));
    guide.setAttribute("visibility", "visible");
    const lines = series.map((each) => [each, near(each)]).filter(([, p]) => options.scatter || Math.abs(x.at(p[0]) - x.at(nearest[0])) < 12)
      .map(([each, p]) => `${each.name}  ${number(p[1])}` + (p[2] != null ? ` (${number(p[2])} to ${number(p[3])})` : "") + (options.scatter ? ` at ${name(p[0])}` : ""));
    showTip(event, `${options.labelX || ""} ${name(nearest[0])}`, lines);
  });
  svg.addEventListener("pointerleave", () => { guide.setAttribute("visibility", "hidden"); hideTip(); });
}

function section(title, text) {
  const node = make(page, "section");
  make(node, "h2", {}, title);
  if (text) make(node, "p", {}, text);
  return node;
}

/* A menu whose choice outlives the next drawing. */
function menu(parent, key, label, options) {
  const select = make(parent, "select", { "aria-label": label });
  for (const option of options) make(select, "option", { value: option }, option);
  if (options.includes(chosen[key])) select.value = chosen[key];
  select.addEventListener("change", () => { chosen[key] = select.value; draw(); });
  return select.value;
}

function table(parent, heads, rows) {
  const made = make(make(parent, "div", { class: "scroll" }), "table");
  const head = make(made, "tr");
  for (const each of heads) make(head, "th", {}, each);
  for (const row of rows) {
    const line = make(made, "tr");
    for (const cell of row) make(line, "td", typeof cell === "number" ? { class: "number" } : {}, typeof cell === "number" ? number(cell) : cell);
  }
}

function drawCurves() {
  const has = (column) => shown().some((run) => run.curves[column]);
  if (!["train/loss", "val/loss"].some(has)) return;
  const cards = make(section("Training"), "div", { class: "cards" });
  const of = (column, thin) => shown().filter((run) => run.curves[column]).map((run) => ({ name: run.label, color: color(run), points: run.curves[column], thin }));
  for (const [column, title] of [["train/loss", "Training loss, nats a token"], ["val/loss", "Validation loss, nats a token"], ["val/bits_per_byte", "Validation, bits a byte"], ["gradient_norm", "Gradient norm"], ["tokens_per_second", "Tokens a second"], ["learning_rate", "Learning rate"]]) {
    chart(cards, title, of(column), { labelX: "step" });
  }
}

function drawContexts() {
  const cards = [evaluated("contexts"), evaluated("positions")].some((each) => each.length)
    && make(section("Context", "The loss of the same tokens with windows of several lengths, and of the tokens of whole documents by their position. Bands are 95 % intervals."), "div", { class: "cards" });
  if (!cards) return;
  const by = (name, row) => evaluated(name).map((run) => ({ name: run.label, color: color(run), points: run.evaluation[name].map(row) }));
  const options = { logX: true, nameX: length };
  chart(cards, "Perplexity by context", by("contexts", (r) => [r.context, r.perplexity]), { ...options, labelX: "context" });
  chart(cards, "Loss by context, nats a token", by("contexts", (r) => [r.context, r.loss, r.low, r.high]), { ...options, labelX: "context" });
  chart(cards, "Gain over the shortest context, nats a token", by("contexts", (r) => [r.context, r.gain, r.gain_low, r.gain_high]), { ...options, labelX: "context" });
  chart(cards, "Loss by position, nats a token", by("positions", (r) => [r.end, r.loss, r.low, r.high]), { ...options, labelX: "positions up to" });
}

function heat(parent, run, rows, value) {
  const card = make(parent, "div", { class: "card" });
  make(card, "h3", {}, run.label);
  const lengths = [...new Set(rows.map((r) => r.length))].sort((a, b) => a - b);
  const depths = [...new Set(rows.map((r) => r.depth))].sort((a, b) => a - b);
  const made = make(card, "table", { class: "heat" });
  const head = make(made, "tr");
  make(head, "th", {}, "depth");
  for (const each of lengths) make(head, "th", {}, length(each));
  for (const depth of depths) {
    const line = make(made, "tr");
    make(line, "th", {}, Math.round(depth * 100) + " %");
    for (const each of lengths) {
      const row = rows.find((r) => r.length === each && r.depth === depth);
      const share = row && row[value];
      const cell = make(line, "td", {}, share == null ? "" : Math.round(share * 100) + " %");
      if (share == null) continue;
      cell.style.background = `rgba(var(--full), ${(share * 0.75).toFixed(3)})`;
      cell.addEventListener("pointermove", (event) => showTip(event, `${run.label}: ${length(each)} tokens, depth ${Math.round(depth * 100)} %`, [
        `preferred ${number(row.preferred)} (${number(row.preferred_low)} to ${number(row.preferred_high)})`, `generated ${number(row.generated)}`,
        `tokens right ${number(row.tokens_right)}`, `loss ${number(row.loss)}`, `${row.samples} samples`]));
      cell.addEventListener("pointerleave", hideTip);
    }
  }
}

function drawRetrieval() {
  const having = evaluated("retrieval");
  if (having.length) {
    const place = section("Retrieval", "Preferred: the answer is likelier than nine others (chance is 10 %), in lookup than five (17 %). Generated: greedy generation gives it. Tokens right: share of the answer's tokens that are the likeliest.");
    const task = menu(place, "task", "Task", [...new Set(having.flatMap((run) => run.evaluation.retrieval.map((r) => r.task)))]);
    place.append(" ");
    const value = menu(place, "value", "Measure", ["preferred", "generated", "tokens_right"]);
    const cards = make(place, "div", { class: "cards", style: "margin-top:10px" });
    for (const run of having) heat(cards, run, run.evaluation.retrieval.filter((r) => r.task === task), value);
  }
  const placed = evaluated("placements");
  if (!placed.length) return;
  const place = section("Needles at awkward places", "Loss of the answer, in nats a token, by where the needle begins: around segment borders, and in the phases of the coarsest dilation.");
  const cards = make(place, "div", { class: "cards" });
  for (const name of [...new Set(placed.flatMap((run) => run.evaluation.placements.map((r) => r.place)))]) {
    chart(cards, name, placed.map((run) => ({ name: run.label, color: color(run), points: run.evaluation.placements.filter((r) => r.place === name).map((r) => [r.offset, r.loss]) })), { labelX: "offset" });
  }
}

function drawCells(parent, block, encoded, context) {
  const bytes = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
  const canvas = make(parent, "canvas", { width: block.cells, height: block.cells, role: "img", "aria-label": "who sees whom" });
  const full = getComputedStyle(document.documentElement).getPropertyValue("--full").split(",").map(Number);
  const image = new ImageData(block.cells, block.cells);
  bytes.forEach((share, index) => image.data.set([...full, share && 40 + 215 * (share / 255) ** 0.5], index * 4));
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (offset, size) => Math.max(0, Math.min(block.cells - 1, Math.floor((offset / size) * block.cells)));
    const row = cell(event.clientY - box.top, box.height), column = cell(event.clientX - box.left, box.width);
    const wide = context / block.cells;
    showTip(event, `query ${Math.round(row * wide)}, key ${Math.round(column * wide)}`, [`${number((100 * bytes[row * block.cells + column]) / 255)} % of the pairs seen`]);
  });
  canvas.addEventListener("pointerleave", hideTip);
}

function drawPatterns() {
  const having = shown().filter((run) => run.pattern);
  if (!having.length) return;
  const place = section("Attention patterns", "Who sees whom: queries downwards, keys to the right; the darker, the larger the share of a cell's pairs that is seen. Coverage: the share of pairs at a distance that some head sees. Receptive field: the share of the context that the last position has heard of after so many layers.");
  const most = Math.max(...having.map((run) => run.pattern.blocks[0].heads.length));
  const head = menu(place, "head", "Head", ["all heads together", ...Array.from({ length: most }, (_, index) => `head ${index}`)]);
  const cards = make(place, "div", { class: "cards", style: "margin-top:10px" });
  chart(cards, "Coverage by distance, in one layer", having.map((run) => ({ name: run.label, color: color(run), points: run.pattern.blocks[0].coverage })), { logX: true, nameX: length, labelX: "distance", fromZero: true });
  chart(cards, "Receptive field by depth", having.map((run) => ({ name: run.label, color: color(run), points: run.pattern.receptive.map((share, index) => [index + 1, share]) })), { labelX: "layers", fromZero: true });
  for (const run of having) {
    run.pattern.blocks.forEach((block) => {
      const encoded = head.startsWith("all") ? block.union : block.heads[+head.slice(5)];
      if (!encoded) return;
      const card = make(cards, "div", { class: "card" });
      make(card, "h3", {}, run.label);
      make(card, "small", {}, `${block.text}; context ${length(run.pattern.context)}, at most ${number(block.keys)} keys a query`);
      drawCells(card, block, encoded, run.pattern.context);
    });
  }
}

function drawSpeed() {
  const having = shown().filter((run) => run.speed.tokens_per_second);
  if (!having.length) return;
  const place = section("Speed and memory");
  const cards = make(place, "div", { class: "cards" });
  const by = (column) => having.filter((run) => run.speed[column]).map((run) => ({ name: run.label, color: color(run), points: [[run.context, run.speed[column]]] }));
  const options = { scatter: true, logX: true, logY: true, nameX: length, labelX: "context" };
  if (new Set(having.map((run) => run.context)).size > 1) {
    chart(cards, "Tokens a second by context", by("tokens_per_second"), options);
    chart(cards, "Peak memory by context, GiB", by("peak_memory_gib"), options);
  }
  table(place, ["run", "context", "tokens/s", "share of matmul rate", "peak GiB"], having.map((run) => [run.label, length(run.context), run.speed.tokens_per_second, run.speed.mfu ?? "–", run.speed.peak_memory_gib ?? "–"]));
}

function drawTexts() {
  if (differences.length && shown().length > 1) {
    const columns = shown().map((run) => runs.indexOf(run));
    table(section("Where the configs differ"), ["key", ...columns.map((index) => runs[index].label)], differences.map((row) => [row.key, ...columns.map((index) => row.values[index])]));
  }
  const having = shown().filter((run) => run.sample);
  if (!having.length) return;
  const cards = make(section("Samples"), "div", { class: "cards" });
  for (const run of having) {
    const card = make(cards, "div", { class: "card" });
    make(card, "h3", {}, run.label);
    make(card, "pre", {}, run.sample);
  }
}

function draw() {
  const place = scrollY;
  hideTip();
  page.replaceChildren();
  const nav = document.getElementById("runs");
  nav.replaceChildren();
  for (const run of runs) {
    const key = run.name + run.label;
    const button = make(nav, "button", { type: "button", "aria-pressed": String(!hidden.has(key)), title: run.name });
    make(button, "i").style.background = color(run);
    button.append(run.label);
    button.addEventListener("click", () => { hidden.has(key) ? hidden.delete(key) : hidden.add(key); draw(); });
  }
  for (const part of [drawCurves, drawContexts, drawRetrieval, drawPatterns, drawSpeed, drawTexts]) part();
  if (!page.children.length) make(page, "p", {}, shown().length ? "These runs have logged nothing yet." : "Choose a run above.");
  scrollTo(0, place);
}

let wide = innerWidth;
addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; draw(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
