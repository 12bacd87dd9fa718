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
