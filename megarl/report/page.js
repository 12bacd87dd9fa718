// Read all charts at one iteration.
const data = JSON.parse(document.getElementById("data").textContent);
const cards = [...document.querySelectorAll("[data-chart]")].map((card) => ({
  card,
  svg: card.querySelector("svg"),
  cursor: card.querySelector(".cursor"),
  numbers: [...card.querySelectorAll("[data-series]")],
  series: data.charts[Number(card.dataset.chart)],
}));
// As in charts.py: the plot's left end, its right end and the width of the whole.
const LEFT = 46, END = 328, WIDTH = 340;
const [low, high] = data.domain[0] === data.domain[1] ? [data.domain[0] - 0.5, data.domain[1] + 0.5] : data.domain;

function show(value) {
  const size = Math.abs(value);
  return size >= 1000 && size < 1e6 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}
// The newest value at or before the point; none before the first.
function readSeries(values, point) {
  const known = values.slice(0, point + 1).filter((value) => value !== null);
  return known.length ? show(known.at(-1)) : "";
}
// index: of the point that is read; undefined: the newest values.
function read(index) {
  for (const { numbers, series } of cards) {
    for (const node of numbers) node.textContent = readSeries(series[Number(node.dataset.series)], index ?? Infinity);
  }
  document.body.classList.toggle("pointing", index !== undefined);
  document.getElementById("at").textContent = index === undefined ? "" : "Iteration " + data.iterations[index];
}
function point(iteration) {
  const distance = (index) => Math.abs(data.iterations[index] - iteration);
  const nearest = data.iterations.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0);
  const x = LEFT + ((data.iterations[nearest] - low) / (high - low)) * (END - LEFT);
  for (const { cursor } of cards) {
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
  }
  read(nearest);
}
for (const { svg } of cards) {
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    point(low + ((x - LEFT) / (END - LEFT)) * (high - low));
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", () => read());
}
// Follow one run through all charts and the table.
for (const node of document.querySelectorAll("[data-run]")) {
  const mark = (on) => {
    document.body.classList.toggle("any-hot", on);
    for (const other of document.querySelectorAll("[data-run]")) {
      if (other.dataset.run === node.dataset.run) other.classList.toggle("hot", on);
    }
  };
  node.addEventListener("mouseenter", () => mark(true));
  node.addEventListener("mouseleave", () => mark(false));
}
// The rollout viewer. What a response says is only ever put into text nodes.
const records = JSON.parse(document.getElementById("rollout-records")?.textContent ?? "[]");
const root = document.querySelector(".viewer");
const find = (name) => root.querySelector(`[data-rv="${name}"]`);
const map = (values, i, f = (x) => x) => (values && values[i] !== null ? f(values[i]) : null);
// name: label, value at token i, whether the sign matters, smallest full scale, help
const FIELDS = {
  advantage: ["advantage", (r, i) => map(r.advantages, i), true, 1e-6, "blue: made more likely by the update, orange: less likely"],
  value: ["value", (r, i) => map(r.values, i), true, 1e-6, "the critic's estimate, before the token, of the reward to come"],
  ratio: ["ratio to the rollout", (r, i) => map(r.log_ratios, i, Math.exp), true, 0.01, "probability by the policy before the update over that by the rollout engine; 1 is equal"],
  mismatch: ["mismatch", (r, i) => map(r.log_ratios, i, Math.abs), false, 0.01, "distance of the log-probs of policy and rollout engine"],
  reference: ["policy to reference", (r, i) => map(r.ref_logprobs, i, (x) => r.rollout_logprobs[i] + (r.log_ratios?.[i] ?? 0) - x), true, 0.01, "log-prob by the policy minus that by the reference"],
  surprise: ["surprise", (r, i) => map(r.rollout_logprobs, i, (x) => -x), false, 0.1, "minus the log-prob of the token that was sampled, in nats"],
};
const OUTCOMES = { right: "right", wrong: "wrong", cut: "wrong, cut at the limit", failed: "no reward" };
const ENDS = { stop: "end of sequence", length: "length limit", max_turns: "turn limit" };
const UNSEEN = "[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Zl}\\p{Zp}]";
const state = { outcome: "", kind: "", query: "", field: "", current: null };

function make(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.textContent = text;
  return node;
}
function format(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(1) : String(Number(x.toPrecision(3)));
}
// Control, bidirectional, invisible and lone surrogate characters become visible codes.
function write(parent, text) {
  let last = 0;
  for (const match of text.matchAll(new RegExp(UNSEEN, "gu"))) {
    parent.append(text.slice(last, match.index));
    last = match.index + match[0].length;
    if (match[0] === "\n") parent.append(make("i", "", "↵"), "\n");
    else parent.append(make("span", "rv-code", `\\u${match[0].codePointAt(0).toString(16).padStart(4, "0")}`));
  }
  parent.append(text.slice(last));
  return parent;
}
const oneLine = (text) => text.replace(new RegExp(`${UNSEEN}+`, "gu"), " ");

for (const r of records) {
  r.outcome = r.score.failure !== null ? "failed" : r.score.correct ? "right" : r.finish_reason === "length" ? "cut" : "wrong";
  r.places = r.kept.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i));
  r.isObserved = (place) => r.observed.some(([start, end]) => start <= place && place < end);
  // The values of a field at the tokens that the policy wrote.
  r.list = (name) => r.places.map((place, i) => (r.isObserved(place) ? null : FIELDS[name][1](r, i))).filter((x) => x !== null);
  const texts = [r.prompt.id, r.prompt.text, r.prompt.answer, r.tokens.join(""), r.score.answer ?? "", r.score.failure ?? ""];
  r.searched = texts.join("\n").toLowerCase();
}
const fields = Object.keys(FIELDS).filter((name) => records.some((r) => r.list(name).length));
const middleOf = (name) => (name === "ratio" ? 1 : 0);
const scales = Object.fromEntries(fields.map((name) => {
  const sizes = records.flatMap((r) => r.list(name).map((x) => Math.abs(x - middleOf(name)))).sort((a, b) => a - b);
  return [name, Math.max(FIELDS[name][3], sizes[Math.floor(0.98 * (sizes.length - 1))] || 0)];
}));
records.sort((a, b) => b.iteration - a.iteration || a.sample - b.sample);

function nameRecord(r) {
  return r.kind === "heldout" ? `after iteration ${r.iteration}, held out` : `iteration ${r.iteration}`;
}
function showList() {
  const found = records
    .filter((r) => (!state.outcome || r.outcome === state.outcome) && (!state.kind || r.kind === state.kind))
    .filter((r) => r.searched.includes(state.query));
  find("list").replaceChildren(...found.slice(0, 500).map((r) => {
    const item = make("button");
    item.append(make("em", "", `${r.num_tokens} tokens`), make("span", `rv-dot rv-${r.outcome}`));
    item.append(make("b", "", r.outcome === "failed" ? "no reward" : format(r.score.reward)), ` · ${nameRecord(r)}`);
    item.append(make("small", "", oneLine(r.prompt.text).slice(-160)));
    item.setAttribute("aria-current", String(r === state.current));
    item.addEventListener("click", () => open(r));
    return item;
  }));
  if (!found.length) find("list").append(make("div", "rv-none", "No response is like that."));
  find("count").textContent = `${found.length} of ${records.length}`;
}
function open(r) {
  state.current = r;
  showList();
  showDetail(r);
}
function showFacts(r, detail) {
  const facts = make("div", "rv-facts"), verdict = make("span", "rv-verdict");
  verdict.append(make("span", `rv-dot rv-${r.outcome}`), OUTCOMES[r.outcome]);
  const versions = [...new Set(r.versions.map(([version]) => version))];
  const shown = [
    ...(r.score.failure === null ? [["reward", format(r.score.reward)]] : []),
    ...Object.entries(r.score.details).map(([name, value]) => [oneLine(name), format(value)]),
    ["", nameRecord(r)], ["tokens", r.num_tokens], ["ended by", ENDS[r.finish_reason] || r.finish_reason],
    ["weights of version", versions.join(", ") || r.weight_version],
    ...(r.age ? [["sampled iterations ago:", r.age]] : []),
    ["prompt", r.prompt.id], ["expected", r.prompt.answer || "–"],
    ...(r.score.answer !== null ? [["answered", r.score.answer]] : []),
  ];
  facts.append(verdict);
  for (const [label, value] of shown) {
    facts.append(make("span", "", `${label} `));
    facts.lastChild.append(write(make("b"), String(value)));
  }
  detail.append(facts);
  if (r.score.failure !== null) detail.append(make("h4", "", "Why there is no reward"), write(make("pre", "rv-text"), r.score.failure));
}
function colour(name, x) {
  const middle = middleOf(name), share = Math.min(1, Math.abs(x - middle) / scales[name]);
  return `color-mix(in srgb, var(--c${FIELDS[name][2] && x < middle ? 1 : 0}) ${Math.round(72 * share)}%, transparent)`;
}
function showLegend(name, detail) {
  const [label, , signed, , help] = FIELDS[name], middle = middleOf(name), most = scales[name], low = signed ? middle - most : middle;
  const legend = make("div", "rv-legend"), range = make("span", "rv-range"), bar = make("span", "rv-bar");
  bar.style.background = `linear-gradient(to right, ${colour(name, low)}, transparent ${signed ? 50 : 0}%, ${colour(name, middle + most)})`;
  range.append(format(low), bar, format(middle + most));
  legend.append(make("b", "", label), range, help);
  detail.append(legend);
}
function describeToken(r, i) {
  const place = r.places[i], box = find("token");
  box.replaceChildren(make("b", "", `token ${place + 1} of ${r.num_tokens} `), write(make("code"), r.tokens[i] || "(part of a character)"), " ");
  if (r.isObserved(place)) { box.append("· written by the environment: the policy learns nothing from it"); return; }
  box.append(`· log-prob ${format(r.rollout_logprobs[i])} (probability ${format(Math.exp(r.rollout_logprobs[i]))}) `);
  for (const name of fields.filter((each) => each !== "surprise")) {
    const x = FIELDS[name][1](r, i);
    if (x !== null) box.append(`· ${FIELDS[name][0]} `, make("b", "", format(x)), " ");
  }
  if (r.returns) box.append("· return ", make("b", "", format(r.returns[i])), " ");
  const run = r.versions.find(([, end]) => place < end);
  if (run) box.append(`· weights of version ${run[0]}`);
}
// The head of a turn or observation, where there are several or there is something to say, and the block for its tokens.
function startBlock(r, number, observed, detail) {
  const turn = r.turns[number], says = (each) => each.reward || Object.keys(each.details).length;
  if (r.turns.length > 1 || r.observed.length || r.turns.some(says)) {
    const parts = observed || !turn ? [] : Object.entries({ ...(turn.reward ? { reward: turn.reward } : {}), ...turn.details });
    const heading = make("h4", "", observed ? "Observation" : `Turn ${number + 1}`);
    heading.append(make("span", "", parts.map(([name, value]) => ` · ${oneLine(name)} ${format(value)}`).join("")));
    detail.append(heading);
  }
  detail.append(make("pre", `rv-text${observed ? " rv-observed" : ""}`));
  return detail.lastChild;
}
function showTokens(r, name, detail) {
  let block = null, key = "", at = null;
  r.places.forEach((place, i) => {
    const gap = i ? place - r.places[i - 1] - 1 : place, observed = r.isObserved(place);
    const number = r.turns.findLastIndex((turn) => turn.start <= place);
    if (key !== `${number} ${observed}`) block = startBlock(r, number, observed, detail);
    key = `${number} ${observed}`;
    if (gap > 0) block.append(make("span", "rv-gap", `… ${gap} tokens are not in tokens.jsonl …`));
    const span = write(make("span", "rv-token"), r.tokens[i]), x = observed ? null : FIELDS[name][1](r, i);
    if (x !== null) span.style.background = colour(name, x);
    const point = () => {
      at?.classList.remove("rv-at");
      at = span;
      at.classList.add("rv-at");
      describeToken(r, i);
    };
    span.addEventListener("pointerenter", point);
    span.addEventListener("click", point);
    block.append(span);
  });
}
function showDetail(r) {
  const detail = find("detail");
  detail.replaceChildren();
  showFacts(r, detail);
  detail.append(make("h4", "", "Prompt"), write(make("pre", "rv-text rv-prompt"), r.prompt.text));
  const name = state.field && r.list(state.field).length ? state.field : "surprise";
  if (name in scales) showLegend(name, detail);
  detail.append(make("h4", "", r.turns.length > 1 ? "Conversation" : "Response"));
  showTokens(r, name, detail);
  detail.append(make("div", "rv-token-facts", "Point at a token to see its numbers."));
  detail.lastChild.dataset.rv = "token";
}
function addChoices(name, choices, read) {
  for (const [key, label] of Object.entries(choices)) {
    const number = records.filter((r) => !key || read(r) === key).length;
    if (!number) continue;
    const button = make("button", "", `${label} ${number}`);
    button.dataset.choice = key;
    button.setAttribute("aria-pressed", String(key === ""));
    button.addEventListener("click", () => {
      state[name] = key;
      for (const other of find(name).children) other.setAttribute("aria-pressed", String(other === button));
      showList();
    });
    find(name).append(button);
  }
}
if (records.length) {
  addChoices("outcome", { "": "all", ...OUTCOMES }, (r) => r.outcome);
  addChoices("kind", { "": "both", train: "training", heldout: "held out" }, (r) => r.kind);
  for (const name of fields) find("field").append(Object.assign(make("option", "", FIELDS[name][0]), { value: name }));
  state.field = fields[0] || "";
  find("field").addEventListener("change", (event) => { state.field = event.target.value; showDetail(state.current); });
  find("query").addEventListener("input", (event) => { state.query = event.target.value.toLowerCase(); showList(); });
  state.current = records.find((r) => r.iteration === records[0].iteration && r.kind === "train") || records[0];
  showList();
  showDetail(state.current);
}
