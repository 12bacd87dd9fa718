// The rollout viewer. What a response says is only ever put into text nodes.
(() => {
  const records = JSON.parse(document.getElementById("rollout-records").textContent);
  const root = document.querySelector(".viewer");
  const find = (name) => root.querySelector(`[data-rv="${name}"]`);
  const log = (values, i, f) => (values && values[i] !== null ? f(values[i]) : null);
  const same = (x) => x;
  // name: label, value at token i, whether the sign matters, smallest full scale, help
  const FIELDS = {
    advantage: ["advantage", (r, i) => log(r.advantages, i, same), true, 1e-6, "blue: made more likely by the update, orange: less likely"],
    value: ["value", (r, i) => log(r.values, i, same), true, 1e-6, "the critic's estimate, before the token, of the reward to come"],
    change: ["change by the update", (r, i) => log(r.log_changes, i, same), true, 0.01, "log-prob after the update minus before it"],
    ratio: ["ratio to the rollout", (r, i) => log(r.log_ratios, i, Math.exp), true, 0.01, "probability by the policy before the update over that by the rollout engine; 1 is equal"],
    mismatch: ["mismatch", (r, i) => log(r.log_ratios, i, Math.abs), false, 0.01, "distance of the log-probs of policy and rollout engine"],
    entropy: ["entropy", (r, i) => log(r.entropies, i, same), false, 0.1, "of the policy's choice at this token, in nats"],
    reference: ["policy to reference", (r, i) => (r.ref_logprobs ? getLogprob(r, i) - r.ref_logprobs[i] : null), true, 0.01, "log-prob by the policy minus that by the reference"],
    surprise: ["surprise", (r, i) => log(r.rollout_logprobs, i, (x) => -x), false, 0.1, "minus the log-prob of the token that was sampled, in nats"],
  };
  const OUTCOMES = { right: "right", wrong: "wrong", cut: "wrong, cut at the limit", failed: "no reward" };
  const PAGE = 100;
  const state = { outcome: "", kind: "", query: "", sort: "newest", field: "", shown: PAGE, current: null };

  function getLogprob(r, i) { return r.rollout_logprobs[i] + (r.log_ratios ? r.log_ratios[i] : 0); }
  function make(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function draw(tag, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
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
    for (const match of text.matchAll(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu)) {
      parent.append(text.slice(last, match.index));
      last = match.index + match[0].length;
      if (match[0] === "\n") parent.append(make("i", "", "↵"), "\n");
      else if (match[0] === "\t") parent.append(make("i", "", "⇥"), "\t");
      else parent.append(make("span", "rv-code", `\\u${match[0].codePointAt(0).toString(16).padStart(4, "0")}`));
    }
    parent.append(text.slice(last));
    return parent;
  }
  const oneLine = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]+/gu, " ");
  const textOf = (r) => (r.tokens ? r.tokens.join("") : r.turns.map((turn) => turn.text).join("\n"));

  for (const r of records) {
    r.outcome = r.score.failure !== null ? "failed" : r.score.correct ? "right" : r.finish_reason === "length" ? "cut" : "wrong";
    r.places = r.kept ? r.kept.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i)) : [];
    r.isObserved = (place) => (r.observed || []).some(([start, end]) => start <= place && place < end);
    const generated = r.places.map((place, i) => i).filter((i) => !r.isObserved(r.places[i]));
    if (r.surprise === undefined) r.surprise = generated.length ? generated.reduce((sum, i) => sum - (r.rollout_logprobs[i] ?? 0), 0) / generated.length : 0;
    const largest = (values) => (values ? values.reduce((most, x) => Math.max(most, Math.abs(x ?? 0)), 0) : -1);
    r.largest = { advantage: largest(r.advantages), mismatch: largest(r.log_ratios), change: largest(r.log_changes) };
    r.searched = [r.prompt.id, r.prompt.text, r.prompt.answer, textOf(r), r.score.answer || "", r.score.failure || ""].join("\n").toLowerCase();
  }
  // Of the prompts the list shows what is not the same in all: a chat template is.
  const prompts = [...new Set(records.map((r) => r.prompt.text))], [one] = prompts;
  let head = 0, tail = 0;
  if (prompts.length > 1) {
    while (head < one.length && prompts.every((text) => text[head] === one[head])) head++;
    while (tail < one.length - head && prompts.every((text) => text.length > head + tail && text.at(-1 - tail) === one.at(-1 - tail))) tail++;
    while (head && /\S/.test(one[head - 1])) head--;
  }
  const fields = Object.keys(FIELDS).filter((name) => records.some((r) => r.tokens && r.tokens.some((_, i) => FIELDS[name][1](r, i) !== null)));
  const scales = Object.fromEntries(fields.map((name) => {
    const middle = name === "ratio" ? 1 : 0, sizes = [];
    for (const r of records) {
      for (let i = 0; i < r.places.length; i++) {
        const x = FIELDS[name][1](r, i);
        if (x !== null && !r.isObserved(r.places[i])) sizes.push(Math.abs(x - middle));
      }
    }
    sizes.sort((a, b) => a - b);
    return [name, Math.max(FIELDS[name][3], sizes[Math.floor(0.98 * (sizes.length - 1))] || 0)];
  }));

  const SORTS = {
    newest: ["newest first", (r) => -r.iteration],
    oldest: ["oldest first", (r) => r.iteration],
    surprise: ["most surprising", (r) => -r.surprise],
    advantage: ["largest advantage", (r) => -r.largest.advantage],
    mismatch: ["largest mismatch", (r) => -r.largest.mismatch],
    change: ["most changed by its update", (r) => -r.largest.change],
    best: ["highest reward", (r) => -r.score.reward],
    worst: ["lowest reward", (r) => r.score.reward],
    long: ["longest", (r) => -r.num_tokens],
  };
  function select() {
    const order = SORTS[state.sort][1];
    return records
      .filter((r) => (!state.outcome || r.outcome === state.outcome) && (!state.kind || r.kind === state.kind))
      .filter((r) => r.searched.includes(state.query))
      .sort((a, b) => order(a) - order(b) || b.iteration - a.iteration || a.sample - b.sample);
  }
  function nameRecord(r) {
    return r.kind === "heldout" ? `after iteration ${r.iteration}, held out` : `iteration ${r.iteration}`;
  }
  function showList() {
    const found = select(), list = find("list");
    list.replaceChildren(...found.slice(0, state.shown).map((r) => {
      const item = make("button");
      item.append(make("em", "", `${r.num_tokens} tokens`), make("span", `rv-dot rv-${r.outcome}`));
      item.append(make("b", "", r.outcome === "failed" ? "no reward" : format(r.score.reward)), ` · ${nameRecord(r)}`);
      item.append(make("small", "", oneLine(r.prompt.text.slice(head, r.prompt.text.length - tail)).slice(0, 160)));
      item.setAttribute("aria-current", String(r === state.current));
      item.addEventListener("click", () => open(r, true));
      return item;
    }));
    if (found.length > state.shown) {
      const more = make("button", "", `show more of ${found.length}`);
      more.addEventListener("click", () => { state.shown += PAGE; showList(); });
      list.append(more);
    }
    if (!found.length) list.append(make("div", "rv-none", "No response is like that."));
    find("count").textContent = `${found.length} of ${records.length}`;
    return found;
  }
  function open(r, scroll = false) {
    state.current = r;
    const items = showList().slice(0, state.shown);
    showDetail(r);
    if (scroll && window.matchMedia("(max-width: 760px)").matches) find("detail").scrollIntoView({ block: "start" });
    const item = find("list").children[items.indexOf(r)];
    if (item) item.scrollIntoView({ block: "nearest" });
  }
  function addFact(parent, label, value) {
    const fact = make("span", "", `${label} `);
    fact.append(write(make("b"), String(value)));
    parent.append(fact);
  }
  function showFacts(r, detail) {
    const facts = make("div", "rv-facts"), verdict = make("span", "rv-verdict");
    verdict.append(make("span", `rv-dot rv-${r.outcome}`), OUTCOMES[r.outcome]);
    facts.append(verdict);
    if (r.score.failure === null) addFact(facts, "reward", format(r.score.reward));
    for (const [name, value] of Object.entries(r.score.details)) addFact(facts, oneLine(name), format(value));
    addFact(facts, "", nameRecord(r));
    addFact(facts, "tokens", r.num_tokens);
    addFact(facts, "ended by", { stop: "end of sequence", length: "length limit", max_turns: "turn limit" }[r.finish_reason] || r.finish_reason);
    const versions = [...new Set((r.versions || []).map(([version]) => version))];
    addFact(facts, "weights of version", versions.length ? versions.join(", ") : r.weight_version);
    if (r.age) addFact(facts, "sampled iterations ago:", r.age);
    addFact(facts, "prompt", r.prompt.id);
    addFact(facts, "expected", r.prompt.answer || "–");
    if (r.score.answer !== null) addFact(facts, "answered", r.score.answer);
    detail.append(facts);
    if (r.score.failure !== null) detail.append(make("h4", "", "Why there is no reward"), write(make("pre", "rv-text"), r.score.failure));
  }
  function showSame(r, detail) {
    const others = records.filter((o) => o.prompt.id === r.prompt.id && o.kind === r.kind);
    if (others.length < 2) return;
    others.sort((a, b) => a.iteration - b.iteration || a.sample - b.sample);
    const row = make("div", "rv-same", "this prompt by iteration: ");
    for (const o of others) {
      const button = make("button");
      button.append(make("span", `rv-dot rv-${o.outcome}`), `${o.iteration}: ${o.outcome === "failed" ? "–" : format(o.score.reward)}`);
      button.setAttribute("aria-pressed", String(o === r));
      button.addEventListener("click", () => open(o));
      row.append(button);
    }
    detail.append(row);
    // The row scrolls where there are many.
    const shown = row.querySelector("[aria-pressed=true]");
    if (shown) row.scrollTop = shown.offsetTop - row.offsetTop - shown.offsetHeight;
  }
  function colour(name, x) {
    const middle = name === "ratio" ? 1 : 0, share = Math.min(1, Math.abs(x - middle) / scales[name]);
    return `color-mix(in srgb, var(--c${FIELDS[name][2] && x < middle ? 1 : 0}) ${Math.round(72 * share)}%, transparent)`;
  }
  function showLegend(name, wanted, detail) {
    const [label, , signed, , help] = FIELDS[name], middle = name === "ratio" ? 1 : 0, most = scales[name];
    const legend = make("div", "rv-legend"), bar = make("span", "rv-bar");
    const low = signed ? middle - most : middle;
    bar.style.background = `linear-gradient(to right, ${colour(name, low)}, transparent ${signed ? 50 : 0}%, ${colour(name, middle + most)})`;
    const range = make("span", "rv-range");
    range.append(format(low), bar, format(middle + most));
    legend.append(make("b", "", label), range, help);
    if (wanted && wanted !== name) legend.append(`· this response has no ${FIELDS[wanted][0]}`);
    detail.append(legend);
  }
  function showChart(r, name, detail, point) {
    const points = r.places.map((place, i) => [place, r.isObserved(place) ? null : FIELDS[name][1](r, i)]);
    const values = points.map(([, y]) => y).filter((y) => y !== null);
    if (values.length < 2) return () => {};
    const middle = name === "ratio" ? 1 : 0, width = Math.max(1, r.num_tokens);
    const low = Math.min(middle, ...values), high = Math.max(middle, ...values);
    const scale = (y) => 60 - (56 * (y - low)) / (high - low || 1);
    const svg = draw("svg", { viewBox: `0 0 ${width} 64`, preserveAspectRatio: "none", role: "img", "aria-label": `${FIELDS[name][0]} by token` });
    for (const [start, end] of r.observed || []) svg.append(draw("rect", { x: start, y: 0, width: end - start, height: 64 }));
    svg.append(draw("path", { class: "rv-zero", d: `M 0 ${scale(middle)} H ${width}` }));
    let path = "", before = null;
    for (const [place, y] of points) {
      if (y !== null) path += `${before === place - 1 ? "L" : "M"} ${place + 0.5} ${scale(y).toFixed(1)} `;
      before = y === null ? null : place;
    }
    svg.append(draw("path", { d: path }));
    const cursor = draw("path", { class: "rv-cursor", d: "" });
    svg.append(cursor);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), place = Math.floor(((event.clientX - box.left) / box.width) * width);
      const after = r.places.findIndex((each) => each >= place);
      point(after < 0 ? r.places.length - 1 : after);
    });
    const chart = make("div", "rv-chart");
    chart.append(svg);
    detail.append(chart);
    return (place) => cursor.setAttribute("d", `M ${place + 0.5} 0 V 64`);
  }
  function describeToken(r, i) {
    const place = r.places[i], box = find("token");
    box.replaceChildren(make("b", "", `token ${place + 1} of ${r.num_tokens} `), write(make("code"), r.tokens[i] || "(part of a character)"), " ");
    if (r.isObserved(place)) { box.append("· written by the environment: the policy learns nothing from it"); return; }
    box.append(`· log-prob ${format(r.rollout_logprobs[i])} (probability ${format(Math.exp(r.rollout_logprobs[i]))}) `);
    for (const name of Object.keys(FIELDS)) {
      const x = name === "surprise" ? null : FIELDS[name][1](r, i);
      if (x !== null) { box.append(`· ${FIELDS[name][0]} `, make("b", "", format(x)), " "); }
    }
    if (r.returns) box.append("· return ", make("b", "", format(r.returns[i])), " ");
    const run = (r.versions || []).find(([, end]) => place < end);
    if (run) box.append(`· weights of version ${run[0]}`);
  }
  function startBlock(r, place, detail) {
    const number = r.turns.findLastIndex((turn) => turn.start <= place), observed = r.isObserved(place);
    const says = (turn) => turn.reward || Object.keys(turn.details || {}).length;
    if (r.turns.length > 1 || (r.observed || []).length || r.turns.some(says)) {
      const head = make("h4", "", observed ? "Observation" : `Turn ${number + 1}`), turn = r.turns[number];
      if (!observed && turn) {
        const parts = Object.entries({ ...(turn.reward ? { reward: turn.reward } : {}), ...turn.details });
        head.append(make("span", "", parts.map(([name, value]) => ` · ${oneLine(name)} ${format(value)}`).join("")));
      }
      detail.append(head);
    }
    const block = make("pre", `rv-text${observed ? " rv-observed" : ""}`);
    detail.append(block);
    return block;
  }
  function showTokens(r, name, detail) {
    const spans = [];
    let moveCursor = () => {}, at = null, block = null, key = null;
    const point = (i) => {
      if (at) at.classList.remove("rv-at");
      at = spans[i];
      at.classList.add("rv-at");
      moveCursor(r.places[i]);
      describeToken(r, i);
    };
    moveCursor = showChart(r, name, detail, point);
    detail.append(make("h4", "", r.turns.length > 1 ? "Conversation" : "Response"));
    r.places.forEach((place, i) => {
      const gap = i ? place - r.places[i - 1] - 1 : place, observed = r.isObserved(place);
      const own = `${r.turns.findLastIndex((turn) => turn.start <= place)} ${observed}`;
      if (own !== key || !block) { block = startBlock(r, place, detail); key = own; }
      if (gap > 0) block.append(make("span", "rv-gap", `… ${gap} tokens are not in tokens.jsonl …`));
      const span = write(make("span", "rv-token"), r.tokens[i]), x = observed ? null : FIELDS[name][1](r, i);
      if (x !== null) span.style.background = colour(name, x);
      span.addEventListener("pointerenter", () => point(i));
      span.addEventListener("click", () => point(i));
      spans.push(span);
      block.append(span);
    });
    if (!r.places.length) detail.append(make("p", "", "The response has no token here."));
  }
  function showDetail(r) {
    const detail = find("detail");
    detail.replaceChildren();
    showFacts(r, detail);
    showSame(r, detail);
    detail.append(make("h4", "", "Prompt"), write(make("pre", "rv-text rv-prompt"), r.prompt.text));
    if (!r.tokens) {
      for (const [number, turn] of r.turns.entries()) {
        detail.append(make("h4", "", r.turns.length > 1 ? `Turn ${number + 1}` : "Response"), write(make("pre", "rv-text"), turn.text));
      }
      return;
    }
    const name = [state.field, "surprise", ...fields].find((field) => fields.includes(field) && r.tokens.some((_, i) => FIELDS[field][1](r, i) !== null));
    if (name) showLegend(name, state.field, detail);
    showTokens(r, name || "surprise", detail);
    const box = make("div", "rv-token-facts", "Point at a token to see its numbers.");
    box.dataset.rv = "token";
    detail.append(box);
  }
  function addChoices(name, choices, count) {
    for (const [key, label] of Object.entries(choices)) {
      const number = records.filter((r) => !key || count(r) === key).length;
      if (!number) continue;
      const button = make("button", "", `${label} ${number}`);
      button.dataset.choice = key;
      button.setAttribute("aria-pressed", String(key === ""));
      button.addEventListener("click", () => {
        state[name] = key;
        state.shown = PAGE;
        for (const other of find(name).children) other.setAttribute("aria-pressed", String(other === button));
        showList();
      });
      find(name).append(button);
    }
  }
  function addOptions(name, options, changed) {
    for (const [key, label] of options) find(name).append(Object.assign(make("option", "", label), { value: key }));
    state[name] = options.length ? options[0][0] : "";
    find(name).addEventListener("change", (event) => { state[name] = event.target.value; changed(); });
  }
  addChoices("outcome", { "": "all", ...OUTCOMES }, (r) => r.outcome);
  addChoices("kind", { "": "both", train: "training", heldout: "held out" }, (r) => r.kind);
  addOptions("sort", Object.entries(SORTS).filter(([name]) => !["advantage", "mismatch", "change"].includes(name) || fields.includes(name)).map(([name, [label]]) => [name, label]), showList);
  addOptions("field", fields.map((name) => [name, FIELDS[name][0]]), () => showDetail(state.current));
  if (!fields.length) find("field").parentElement.hidden = true;
  find("query").addEventListener("input", (event) => { state.query = event.target.value.toLowerCase(); state.shown = PAGE; showList(); });
  find("list").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = step && select()[select().indexOf(state.current) + step];
    if (!next) return;
    event.preventDefault();
    open(next);
    find("list").querySelector('[aria-current="true"]')?.focus();
  });
  const first = showList()[0];
  state.current = records.find((r) => r.iteration === first.iteration && r.kind === "train") || first;
  showList();
  showDetail(state.current);
})();
