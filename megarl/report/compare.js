// Colour by another parameter, and follow one run through all charts and the table.
const groups = JSON.parse(document.getElementById("data").textContent);
function colour(number) {
  for (const node of document.querySelectorAll("[data-run]")) {
    const group = "g" + groups[number][node.dataset.run];
    node.setAttribute("class", node.getAttribute("class").replace(/\bg\d\b/, group));
  }
  document.querySelectorAll("[data-legend]").forEach((node) => { node.hidden = node.dataset.legend !== String(number); });
  document.querySelectorAll("[data-colour]").forEach((node) => {
    node.setAttribute("aria-pressed", String(node.dataset.colour === String(number)));
  });
}
for (const button of document.querySelectorAll("[data-colour]")) {
  button.addEventListener("click", () => colour(Number(button.dataset.colour)));
}
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
